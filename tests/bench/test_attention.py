"""The bench of attention implementations, on the CPU with a small model: all are as exact as fp32 there."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from verl_shard.bench.attention import WAYS, bench_attention, lengths, measure
from verl_shard.common.errors import ConfigError


def test_all_ways_that_run_here_agree() -> None:
    config = AutoConfig.for_model(
        "qwen2", vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    ways = [way for way in WAYS if way.implementation != "flash_attention_2"]
    rows = measure("small", config, [7, 3, 1, 12], ways, "cpu", runs=1)
    assert [(row.way, row.packed) for row in rows] == [
        ("sdpa, mask", False),
        ("sdpa, mask", True),
        ("sdpa, no mask", True),
    ]
    for row in rows:
        assert row.output_error < 1e-5
        assert row.gradient_error < 1e-5


def test_lengths_are_drawn_from_the_seed() -> None:
    drawn = lengths(0)
    assert len(drawn) == 16
    assert max(drawn) == 1024
    assert min(drawn) >= 128
    assert drawn == lengths(0) != lengths(1)


def test_unknown_models_are_named() -> None:
    with pytest.raises(ConfigError, match=r"qwen9.*not in the zoo"):
        bench_attention(result=None, models=["qwen9", "qwen2-7b"])


def test_on_an_h200_all_ways_were_as_near_to_fp32_as_sdpa() -> None:
    record = json.loads((Path(__file__).parents[2] / "docs" / "results" / "h200_attention.json").read_text())
    for model in dict.fromkeys(row["model"] for row in record["rows"]):
        rows = {(row["packed"], row["way"]): row for row in record["rows"] if row["model"] == model}
        assert len(rows) == len(WAYS)
        sdpa = rows[False, "sdpa, mask"]
        for row in rows.values():
            for error in ("output_error", "gradient_error"):
                assert row[error] <= record["tolerance"] * sdpa[error]
                assert row[error] == pytest.approx(sdpa[error], rel=0.01)  # what the docs say
