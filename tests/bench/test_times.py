"""The bench of times: constants are found again from times that they made, and it says so where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shapes import small_qwen2

from verl_shard.bench.rates import bench_rates, rates_table
from verl_shard.bench.times import FITTED, Part, Timed, Traces, _plans, bench_times, fitted
from verl_shard.common.errors import ConfigError
from verl_shard.common.tables import as_text
from verl_shard.config.cards import CARDS
from verl_shard.memory.passes import PassSpec
from verl_shard.planning.rates import Rates

_START = Rates.of(CARDS["h200-141g"])


def _timed(traces: Traces, part: Part, rates: Rates) -> tuple[Traces, Timed]:
    seconds = traces.predicted((part,), rates).seconds
    return traces, Timed("small", "", 1.0, seconds, "compute", (part,))


def test_constants_are_found_again() -> None:
    """From passes that each constant bounds in turn: long ones on a slow GPU, short ones on a slow host."""
    truth = replace(
        _START, bf16_flops=0.8 * _START.bf16_flops, attention_flops=0.8 * _START.attention_flops,
        fp32_flops=0.8 * _START.fp32_flops, memory_bandwidth=1.2 * _START.memory_bandwidth, kernel_s=9e-6, forward_s=20e-6,
        backward_s=50e-6, recompute_s=60e-6, decode_s=50e-6,
    )  # fmt: skip
    wide = Traces(small_qwen2(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_hidden_layers=3))
    narrow = Traces(small_qwen2())
    rows = []
    for traces, length in ((wide, 4096), (wide, 2048), (narrow, 16)):
        for batch in (1, 8):
            for phase, again in (("forward", False), ("train", False), ("train", True)):
                wanted = PassSpec(phase=phase, batch_size=batch, seq_len=length, precision="bf16")  # type: ignore[arg-type]
                wanted = replace(wanted, gradient_checkpointing=again)
                rows.append(_timed(traces, Part(wanted, optimizer=phase == "train"), truth))
    rows.append(_timed(narrow, Part(PassSpec(phase="generate", batch_size=1, seq_len=8, new_tokens=8)), truth))
    found = fitted(rows, _START)
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.03), name
    assert found.attention_flops == pytest.approx(truth.attention_flops, rel=0.03)
    assert found.token_s == _START.token_s


def test_a_whole_step_is_its_parts() -> None:
    plans = {what: (parts, step) for what, parts, _, step in _plans("bf16")}
    parts, step = plans["whole step"]
    assert step
    assert [part.wanted.phase for part in parts] == ["generate", "forward", "forward", "train"]
    assert all(part.n_micro * part.wanted.batch_size == parts[0].wanted.batch_size for part in parts[1:])
    assert all(part.wanted.seq_len == parts[0].wanted.length for part in parts[1:])
    assert sum(step for _, step in plans.values()) == 1
    assert all(part.wanted.precision == "bf16-mixed" for _, parts, *_ in _plans("bf16-mixed") for part in parts)


def test_shares_are_shown() -> None:
    shown = as_text(100, rates_table(_START))
    assert "73.8%" in shown
    assert "64.7%" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="bench rates: it measures on a GPU"):
        bench_rates(result=None)
    with pytest.raises(ConfigError, match="bench times: it measures on a GPU"):
        bench_times()
