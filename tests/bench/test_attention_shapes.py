"""Kernels by torch's choice, and a first call that is told apart from the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl_shard.bench import attention_shapes as module
from verl_shard.bench.attention_shapes import INPUTS, ShapeRow, measure_shapes, shapes_table
from verl_shard.common.tables import as_text


def test_the_first_call_of_each_length_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, tuple[int, ...]]] = []
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    plain = torch.nn.functional.scaled_dot_product_attention

    def timed(query: Any, *others: Any, **options: Any) -> Any:
        cudnn = bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        case = (cudnn, (query.shape[2], others[0].shape[2], options["attn_mask"] is not None))
        now[0] += 0.5 if case not in seen else 0.002
        seen.append(case)
        return plain(query, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", timed)
    rows = measure_shapes("cpu", (5, 7), rows=2, heads=3, size=8)
    assert [(row.inputs, row.cudnn) for row in rows] == [(inputs, on) for on in (True, False) for inputs in INPUTS]
    assert all(row.first == pytest.approx((500.0, 500.0)) for row in rows)
    assert all(row.again == pytest.approx((2.0, 2.0)) for row in rows)
    assert {row.kernel for row in rows} <= {"flash", "math"}  # what there is on the CPU
    assert sum(on for on, _ in seen) == len(seen) / 2 == 3 * 2 * 4
    assert {shape for _, shape in seen} == {(n, n, mask) for n in (5, 7) for mask in (0, 1)} | {(1, 5, 1), (1, 7, 1)}


def test_the_table_says_the_kernel_and_both_times() -> None:
    shown = as_text(160, shapes_table([ShapeRow("causal", True, "cuDNN", (1629.4, 95.2), (0.87, 0.9))], (1000, 1008)))
    for words in ("causal", "cuDNN", "1629 95", "0.87 0.90", "1000 1008"):
        assert words in shown
