"""The rate of the CPU, which needs no GPU: FLOPs by hand over a clock's seconds."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from verl_shard.bench import rates


def test_flops_of_a_forward_over_the_median_of_the_turns_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    took = [99.0, 4.0, 1.0, 2.0]
    clock = iter([at for end, s in zip(accumulate(took), took, strict=True) for at in (end - s, end)])
    monkeypatch.setattr("verl_shard.bench.rates.time.perf_counter", lambda: next(clock))
    threads = torch.get_num_threads()
    found = rates.cpu_rate((2, 64, 3, 16))
    # Two blocks of width 64 with one head, 192 inside, and a head of 4,096; attention's products counted whole.
    tokens = 3 * 16
    block = 2 * tokens * (4 * 64 * 64 + 3 * 64 * 192) + 4 * tokens * 16 * 64
    rotary = 2 * 16 * 32
    assert found == (2 * block + 2 * tokens * 64 * 4096 + rotary) / 2.0
    assert torch.get_num_threads() == threads
