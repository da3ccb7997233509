"""Generation that runs out of memory: fewer responses at once, the same tokens, nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.runtime import generation
from verl_shard.runtime.generation_pieces import Generation
from verl_shard.runtime.generation_sampling import Response, Sampling
from verl_shard.runtime.ladder import Pieces

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free."
)
PROMPTS = [[5, 9, 3, 44], [7, 7], [17, 8, 21, 90, 4, 55], [31, 12, 6], [80, 11], [64, 2, 9, 9, 8]]
SEEDS = [11, 12, 13, 14, 15, 16]
MOST = [9, 3, 9, 1, 9, 6]

pytestmark = pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")


@pytest.fixture
def model(small_config: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_config("llama")).eval()


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))


def run(made: Generation, rows: int | None = 4, **more: Any) -> list[Response]:
    sampling = Sampling(9, temperature=0.9)
    return made.run(
        PROMPTS, SEEDS, sampling, pad_token_id=0, eos_token_ids=[2], device=torch.device("cpu"),
        max_new_tokens=MOST, max_rows=rows, **more,
    )  # fmt: skip


def tokens(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder / "events.jsonl") if line["kind"] == kind]


def failing(model: Any, when: Callable[[int, int, int], bool]) -> list[tuple[int, int]]:
    """Fails when(call, rows, tokens); returns the shapes of all calls."""
    shapes: list[tuple[int, int]] = []

    def look(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        shapes.append(tuple(given[0].shape[:2]))  # type: ignore[arg-type]
        if when(len(shapes), *shapes[-1]):
            raise torch.OutOfMemoryError(SAID)

    model.model.layers[1].mlp.register_forward_pre_hook(look)
    return shapes


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "generate"])
@pytest.mark.parametrize("call", [1, 2, 5], ids=["prefill", "decoding", "later"])
def test_the_same_tokens(model: Any, tmp_path: Path, call: int, by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_rows:
        monkeypatch.setattr(generation, "why_not_rows", lambda _: "of the test")
    expected = run(Generation(model))
    assert [len(response.token_ids) <= most for response, most in zip(expected, MOST, strict=True)] == [True] * 6
    shapes = failing(model, lambda now, rows, _: now == call)
    made = Generation(model)
    found = run(made)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert max(rows for rows, _ in shapes[call:]) == 2
    (remedy,) = events(tmp_path, "remedy")
    assert (remedy["where"], remedy["before"], remedy["after"]) == (
        "generate", "4 responses at once", "2 responses at once",
    )  # fmt: skip
    (report,) = events(tmp_path, "out-of-memory")
    assert report["module"] == "model.layers.1.mlp"
    # It stays so.
    run(made)
    assert max(rows for rows, _ in shapes[call:]) == 2
    assert len(events(tmp_path, "remedy")) == 1


def test_whole_responses_are_kept(model: Any) -> None:
    """Memory runs out late: what has ended by then is not generated again."""
    expected = run(Generation(model), rows=None)
    longer = sum(len(response.token_ids) > 4 for response in expected)
    assert 0 < longer < 5
    shapes = failing(model, lambda now, rows, _: now == 5)
    assert tokens(run(Generation(model), rows=None)) == tokens(expected)
    # Six prompts in one prefill and four tokens of each, when it fails.
    assert shapes[0][0] == 6
    assert sum(rows for rows, length in shapes[5:] if length > 1) == longer


def test_more_at_once_than_there_are_changes_nothing_of_it(model: Any, tmp_path: Path) -> None:
    failing(model, lambda now, rows, _: rows > 4)
    assert len(run(Generation(model), rows=1024)) == 6
    # 512, 256, ... 8 responses at once would be the same six again.
    (remedy,) = events(tmp_path, "remedy")
    assert (remedy["before"], remedy["after"]) == ("6 responses at once", "4 responses at once")


def test_one_request_that_does_not_fit_is_named(model: Any) -> None:
    shapes = failing(model, lambda now, rows, length: length == 5 or length > 1 < rows)
    with pytest.raises(DoesNotFitError) as caught:
        run(Generation(model), rows=2)
    said = str(caught.value)
    assert said.startswith("generate: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "Request 5 (5 tokens and 6 new ones) alone does not fit. One of 5 tokens is estimated to take" in said
    assert shapes[-1] == (1, 5)


def test_fewer_at_once_while_another_process_has_the_memory(model: Any, tmp_path: Path) -> None:
    shapes = failing(model, lambda *_: False)
    model.hf_device_map = {"": "cpu"}
    made = Generation(model, precision="fp32")
    room: list[int] = [2**40]
    assert made.allocator is not None
    made.allocator.free = lambda: {"cpu": room[0]}
    expected = tokens(run(made))
    assert max(rows for rows, _ in shapes) == 4
    needed = [made._needed(Pieces(1, rows)) for rows in (1, 2, 4)]
    one, two, four = (sizes["cpu"] for sizes in needed if sizes)
    assert one < two < four
    room[0] = int(two * 1.06)
    shapes.clear()
    assert tokens(run(made)) == expected
    assert max(rows for rows, _ in shapes) == 2
    (remedy,) = events(tmp_path, "remedy")
    assert (remedy["device"], remedy["after"]) == ("cpu", "2 responses at once")
    room[0] = 2**40
    for rows in (2, 4):  # for two calls in a row
        shapes.clear()
        run(made)
        assert max(shape[0] for shape in shapes) == rows
    assert [line["after"] for line in events(tmp_path, "remedy-back")] == ["4 responses at once"]
