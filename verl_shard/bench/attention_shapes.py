"""What attention takes of inputs whose shape is new, and of those it has seen: with cuDNN's kernel, and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_shard.common.tables import table

ROWS, HEADS, SIZE = 8, 28, 128
LENGTHS = (1000, 1008, 1016, 1024, 1032, 1040)
_KERNELS = {-1: "none", 0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}
"""By torch's number (SDPBackend)."""
INPUTS = ("causal", "a mask", "one token, a mask")


@dataclass(frozen=True)
class ShapeRow:
    """A forward and backward of attention alone (of "one token" a forward). cudnn: whether torch may take cuDNN's kernel.

    kernel: the one that it takes. first: milliseconds of the first call of each length. again: of the fastest of three more.
    """

    inputs: str
    cudnn: bool
    kernel: str
    first: tuple[float, ...]
    again: tuple[float, ...]


def measure_shapes(
    device: str, lengths: Sequence[int] = LENGTHS, *, rows: int = ROWS, heads: int = HEADS, size: int = SIZE
) -> list[ShapeRow]:
    """Every kind of inputs, with cuDNN's attention and without, in bf16 on a GPU and fp32 on the CPU."""
    from contextlib import nullcontext

    from verl_shard.runtime.any_shape import of_any_shape

    made = []
    for cudnn in (True, False):
        with nullcontext() if cudnn else of_any_shape():
            for inputs in INPUTS:
                kernel, first, again = "", [], []
                for length in lengths:
                    step, kernel = _step(inputs, device, (rows, heads, length, size))
                    first.append(_milliseconds(step, device))
                    again.append(min(_milliseconds(step, device) for _ in range(3)))
                made.append(ShapeRow(inputs, cudnn, kernel, tuple(first), tuple(again)))
    return made


def _step(inputs: str, device: str, shape: tuple[int, int, int, int]) -> tuple[Callable[[], None], str]:
    """What is timed, and the kernel that torch takes for it."""
    import torch
    from torch.nn import functional

    attention: Any = functional.scaled_dot_product_attention
    rows, heads, length, size = shape
    queries, learns = (1, False) if inputs == INPUTS[2] else (length, True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = [
        torch.randn(rows, heads, n, size, device=device, dtype=dtype, requires_grad=learns)
        for n in (queries, length, length)
    ]
    mask = None
    if inputs != INPUTS[0]:
        mask = torch.ones(rows, 1, queries, length, dtype=torch.bool, device=device)
        mask = mask.tril(length - queries)
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}

    def step() -> None:
        made = attention(*tensors, **options)
        if learns:
            torch.autograd.backward(made.sum())

    choice: Any = torch._fused_sdp_choice
    return step, _KERNELS.get(int(choice(*tensors, **options)), "another")


def _milliseconds(step: Callable[[], None], device: str) -> float:
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    step()
    wait()
    return 1e3 * (time.perf_counter() - began)


def shapes_table(rows: Sequence[Any], lengths: Sequence[int]) -> Any:
    """rows: as ShapeRow."""
    shown = [
        (
            row.inputs, row.kernel, *(" ".join(f"{value:.{digits}f}" for value in values)
            for values, digits in ((row.first, 0), (row.again, 2))),
        )
        for row in rows
    ]  # fmt: skip
    title = f"Attention of {ROWS} rows, {HEADS} heads of {SIZE}: milliseconds by length ({' '.join(map(str, lengths))})"
    return table(title, ("inputs", "kernel", "the first call", "again"), shown)
