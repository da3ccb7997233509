"""Right answers are right and wrong ones wrong, by the task's own reward."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.answers import KINDS, make_answers
from verl_shard.quickstart.reward import compute_score
from verl_shard.training.data_of_tasks import Row, entry_of, read_rows
from verl_shard.training.data_tasks import TASKS, task_of, worked_answer


def score(row: Row, response: str) -> float:
    return compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


def test_only_the_right_answer_has_the_whole_reward(data: DataFiles) -> None:
    chance, seen = random.Random(1), Counter[str]()
    for row in read_rows(data.train):
        made = make_answers(task_of(row["data_source"]), entry_of(row), chance, 4)
        assert score(row, made.right) == 1
        assert len(made.wrong) == 4
        for kind, text in made.wrong:
            assert score(row, text) < 1, (kind, text)
            seen[kind] += 1
    # 2400 draws: each kind's share within five standard deviations, sqrt(p (1 - p) / 2400).
    assert set(seen) == set(KINDS)
    for kind, (share, _) in KINDS.items():
        assert seen[kind] / 2400 == pytest.approx(share, abs=5 * (share * (1 - share) / 2400) ** 0.5)


def test_the_shares_of_the_kinds_make_a_whole() -> None:
    assert sum(share for share, _ in KINDS.values()) == pytest.approx(1)


def test_what_the_kinds_get_wrong(data: DataFiles) -> None:
    chance = random.Random(2)
    for row in read_rows(data.val):
        task, entry = task_of(row["data_source"]), entry_of(row)
        texts = {kind: make(task, entry, chance) for kind, (_, make) in KINDS.items()}
        assert texts["empty"] == ""
        assert texts["no tags"] == worked_answer(task, entry, bare=True)
        assert "<answer>" not in texts["no tags"] + texts["wrong and no tags"]
        for kind in ("wrong", "misread"):
            # In good form, with another answer.
            given = texts[kind].split("<answer>")[1].removesuffix("</answer>")
            assert texts[kind].endswith("</answer>")
            assert given != entry["answer"]


def test_numbers_that_must_both_be_misread() -> None:
    entry = {"answer": "1", "metadata": {"numbers": [1, 1]}}
    gcd = next(task for task in TASKS if task.name == "gcd")
    for seed in range(20):
        assert not KINDS["misread"][1](gcd, entry, random.Random(seed)).endswith("<answer>1</answer>")


def test_a_stammer_is_there(data: DataFiles) -> None:
    chance, row = random.Random(6), read_rows(data.train)[0]
    task, entry = task_of(row["data_source"]), entry_of(row)
    texts = [KINDS["stammered"][1](task, entry, chance) for _ in range(200)]
    tags = sum("<answer><answer>" in text for text in texts)
    # Half of them repeat the tag: 100, and five standard deviations of sqrt(200 / 4).
    assert abs(tags - 100) < 36


def test_the_entry_stays_as_it_is(data: DataFiles) -> None:
    row = read_rows(data.train)[1]
    entry = entry_of(row)
    make_answers(task_of(row["data_source"]), entry, random.Random(3), 50)
    assert entry == entry_of(row)


def test_a_seed_decides(data: DataFiles) -> None:
    row = read_rows(data.train)[0]
    task, entry = task_of(row["data_source"]), entry_of(row)
    first, again, other = (make_answers(task, entry, random.Random(seed), 8) for seed in (4, 4, 5))
    assert first == again
    assert first != other
