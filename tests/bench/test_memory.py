"""What the memory bench draws, asks others and compares."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from shapes import small_qwen2
from transformers import AutoConfig

from verl_shard.bench import estimators
from verl_shard.bench.estimators import Asked
from verl_shard.bench.memory import bench_memory, compare_memory
from verl_shard.bench.memory_rows import KINDS, MIXTURES, MODELS, PACKED, draw
from verl_shard.common.errors import ConfigError
from verl_shard.memory.passes import pass_spec

_RECORDED = json.loads((Path(__file__).parents[2] / "docs" / "results" / "h200_memory.json").read_text())
_GPT2_PARAMETERS = 124_439_808
"""Of the published model; its 12 x 12 heads and 50257 x 768 embedding, which the head shares."""


def test_rows_are_drawn_from_the_seed() -> None:
    assert draw(3, 20) == draw(3, 20) != draw(4, 20)
    assert {row.model for row in draw(0, 200)} == set(MODELS)
    assert {row.model for row in draw(0, 100, ["moe"])} == set(MIXTURES)
    assert {row.model for row in draw(0, 100, ["packed"])} == set(PACKED)


def test_kinds_are_drawn_in_turn_and_apart() -> None:
    rows = draw(5, 9, list(KINDS))
    assert [row.kind for row in rows] == ["dense", "moe", "packed"] * 3
    assert rows[::3] == draw(5, 3)
    assert rows[2::3] == draw(5, 3, ["packed"])


def test_every_row_is_a_pass() -> None:
    for row in draw(1, 300, list(KINDS)):
        assert pass_spec(row.fields, phase=row.phase).packed == (row.kind == "packed")


def test_rows_that_were_recorded_are_drawn_again() -> None:
    drawn = iter(draw(_RECORDED["seed"], 4 * len(_RECORDED["rows"])))
    assert all(any(asdict(row) == recorded["row"] for row in drawn) for recorded in _RECORDED["rows"])


def _gpt2(phase: str, **fields: Any) -> Asked:
    return Asked(AutoConfig.for_model("gpt2"), phase, {"batch_size": 1, "seq_len": 8, **fields})


def test_others_by_hand() -> None:
    asked = _gpt2("train", precision="bf16")
    assert asked.n_parameters == _GPT2_PARAMETERS
    assert estimators.deepspeed(asked) == 20 * _GPT2_PARAMETERS
    assert estimators.accelerate(asked) == pytest.approx(4 * 2 * _GPT2_PARAMETERS, rel=0.02)
    assert estimators.accelerate(_gpt2("train", precision="bf16-mixed")) == 2 * (estimators.accelerate(asked) or 0)
    assert estimators.accelerate(_gpt2("forward")) == pytest.approx(2 * _GPT2_PARAMETERS, rel=0.02)
    assert all(of(_gpt2("forward")) is None for of in (estimators.deepspeed, estimators.mem_tracker))


def test_torchs_own_tracker_by_hand() -> None:
    """Weights, gradients, two states and the list of denominators of AdamW, in fp32, where activations are few."""
    config = small_qwen2(hidden_size=128, intermediate_size=512, vocab_size=1000)
    asked = Asked(config, "train", {"batch_size": 1, "seq_len": 2, "precision": "bf16-mixed", "optimizer": "adamw"})
    assert estimators.mem_tracker(asked) == pytest.approx(5 * 4 * asked.n_parameters, rel=0.05)


def _record(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_compared_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(recorded for recorded in _RECORDED["rows"] if recorded["row"]["model"] == "gpt2")
    result = tmp_path / "out.json"
    (measured,) = compare_memory(_record(tmp_path / "in.json", row), result=result)
    assert measured.measured_peak == row["measured_peak"]
    assert measured.peak == pytest.approx(row["measured_peak"], rel=0.01)
    assert measured.others["accelerate estimate-memory"] == row["others"]["accelerate estimate-memory"]
    said = capsys.readouterr()
    assert "accelerate estimate-memory: peak" in said.out
    for estimator in estimators.to_ask(slow=False)[1]:
        assert f"pip install {estimator.distribution}" in said.err
    (again,) = compare_memory(result, result=None)
    assert again.peak == measured.peak, "what it writes it reads"


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{}]}', '{"rows": [{"row": {"model": "gpt2"}}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--compare"):
        compare_memory(path, result=None)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use some of dense, moe, packed"):
        bench_memory(seed=0, n=1, result=None, kinds=["sparse"])
