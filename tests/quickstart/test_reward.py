import json
from typing import Any

import pytest
import reasoning_gym

from verl_shard.common.errors import ConfigError
from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.reward import compute_score
from verl_shard.training.data_of_tasks import Row, entry_of, read_rows
from verl_shard.training.data_tasks import TASKS, Task, task_of, worked_answer


def score(row: Row, response: str) -> float:
    return compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])


def test_worked_answers_are_right_and_bare_ones_worth_nothing(data: DataFiles) -> None:
    for row in read_rows(data.train):
        task, entry = task_of(row["data_source"]), entry_of(row)
        assert score(row, worked_answer(task, entry)) == 1
        assert score(row, worked_answer(task, entry, bare=True)) == 0


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_score_is_the_verifiers(task: Task, data: DataFiles) -> None:
    verifier = reasoning_gym.create_dataset(task.name, seed=1, size=1, **task.settings)
    row = next(row for row in read_rows(data.val) if task_of(row["data_source"]) is task)
    right = row["reward_model"]["ground_truth"]
    for answer in (right, right + "7", "nothing like it", "", "0"):
        assert score(row, f"<answer>{answer}</answer>") == verifier.score_answer(answer, entry_of(row))
    assert score(row, "<answer>nothing like it</answer>") < 1
    assert score(row, "no tags") == verifier.score_answer(None, entry_of(row)) == 0


def test_the_last_answer_counts(data: DataFiles) -> None:
    row = read_rows(data.val)[0]
    right = f"<answer>{row['reward_model']['ground_truth']}</answer>"
    assert score(row, "<answer>-1</answer> " + right) == 1
    assert score(row, right + "<answer>-1</answer>") < 1
    assert score(row, right.replace("<answer>", "<answer> ") + "<answer>") == 1


def test_what_verl_adds_is_accepted(data: DataFiles) -> None:
    row = read_rows(data.val)[0]
    extra = {**row["extra_info"], "num_turns": 2, "rollout_reward_scores": {}}
    assert compute_score(row["data_source"], "", "", extra, reward_router_address="host:1") == 0


@pytest.mark.parametrize(
    ("source", "extra"),
    [("openai/gsm8k", {"entry": json.dumps({})}), ("reasoning_gym/gcd", None), ("reasoning_gym/gcd", {"index": 1})],
)
def test_other_rows_are_refused(source: str, extra: dict[str, Any] | None) -> None:
    with pytest.raises(ConfigError, match="extra_info"):
        compute_score(source, "<answer>1</answer>", "1", extra)
