"""Scoring that runs out of memory: smaller batches, the same scores in the same order, one text that does not fit named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judges import CONVERSATIONS, WORDS, save_judge

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.runtime.scoring_model import ScoringModel
from verl_shard.verl_plugin.reward.actor import RewardActor

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free."
)
FOUR = CONVERSATIONS[:4]

pytestmark = pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")


@pytest.fixture
def folder(small_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    return save_judge(
        tmp_path / "judge", small_config("llama", vocab_size=WORDS, num_labels=1), "SequenceClassification"
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder / "events.jsonl") if line["kind"] == kind]


def failing(model: Any, when: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Fails when(rows, tokens); returns the shapes of all calls."""
    shapes: list[tuple[int, int]] = []

    def look(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        shapes.append(tuple(given[0].shape[:2]))  # type: ignore[arg-type]
        if when(*shapes[-1]):
            raise torch.OutOfMemoryError(SAID)

    model.model.layers[1].mlp.register_forward_pre_hook(look)
    return shapes


def test_smaller_batches_give_the_same_scores(folder: Path, tmp_path: Path) -> None:
    expected = ScoringModel(folder, dtype="float32").score(FOUR)
    made = ScoringModel(folder, dtype="float32", batch_size=16)
    shapes = failing(made.model, lambda rows, _: rows > 1)
    assert made.score(FOUR) == pytest.approx(expected, rel=1e-5)
    # 8 and 4 in a batch would be the same four again.
    assert [rows for rows, _ in shapes] == [4, 2, 1, 1, 1, 1]
    assert [(line["where"], line["before"], line["after"]) for line in events(tmp_path, "remedy")] == [
        ("reward", "batches of 4", "batches of 2"),
        ("reward", "batches of 2", "batches of 1"),
    ]
    assert [line["module"] for line in events(tmp_path, "out-of-memory")] == ["model.layers.1.mlp"] * 2
    made.score(FOUR)
    assert len(shapes) == 10


def test_what_was_scored_is_kept(folder: Path) -> None:
    expected = ScoringModel(folder, dtype="float32").score(FOUR)
    made = ScoringModel(folder, dtype="float32", batch_size=2)
    shapes: list[tuple[int, int]] = []
    shapes = failing(made.model, lambda rows, _: len(shapes) == 2)
    assert made.score(FOUR) == pytest.approx(expected, rel=1e-5)
    assert [rows for rows, _ in shapes] == [2, 2, 1, 1]


def test_one_text_that_does_not_fit_is_named_and_fails_alone(folder: Path) -> None:
    made = ScoringModel(folder, dtype="float32")
    lengths = [len(made._encoder.encode([one])[0].ids) for one in FOUR]
    longest = max(lengths)
    at = lengths.index(longest)
    assert lengths.count(longest) == 1
    failing(made.model, lambda _, tokens: tokens == longest)
    with pytest.raises(DoesNotFitError) as caught:
        made.score(FOUR)
    said = str(caught.value)
    assert said.startswith("reward: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert f". Response {at} ({str(FOUR[at][-1]['content'])!r}, {longest} tokens) alone does not fit beside" in said
    assert f"One of {longest} tokens is estimated to take" in said

    # On a node, requests of others that came with it are answered.
    expected = ScoringModel(folder, dtype="float32").score(FOUR)
    actor = RewardActor(str(folder), {"dtype": "float32"})
    actor._model = made

    async def ask() -> list[Any]:
        return await asyncio.gather(*(actor.score([one]) for one in FOUR), return_exceptions=True)

    answers = asyncio.run(ask())
    assert isinstance(answers.pop(at), DoesNotFitError)
    expected.pop(at)
    assert [score for (score,) in answers] == pytest.approx(expected, rel=1e-5)


def test_smaller_batches_while_another_process_has_the_memory(folder: Path, tmp_path: Path) -> None:
    made = ScoringModel(folder, dtype="float32", batch_size=4)
    expected = made.score(FOUR)
    shapes = failing(made.model, lambda *_: False)
    pieces = made._copies[0].pieces
    assert pieces.allocator is not None
    pieces.allocator.free = lambda: {"cpu": 1}
    assert made.score(FOUR) == pytest.approx(expected, rel=1e-5)
    assert [rows for rows, _ in shapes] == [1, 1, 1, 1]
    assert [line["after"] for line in events(tmp_path, "remedy")] == ["batches of 1"]
    pieces.allocator.free = lambda: {"cpu": 2**40}
    for _ in range(4):
        made.score(FOUR)
    assert [rows for rows, _ in shapes][-1] == 4
    assert [line["after"] for line in events(tmp_path, "remedy-back")] == ["batches of 2", "batches of 4"]
