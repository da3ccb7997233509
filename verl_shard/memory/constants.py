"""What a process holds on a GPU beside its tensors: named, each with where the number is from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """Bytes, and their source."""

    name: str
    n_bytes: int
    source: str


CUBLAS_HOPPER = Constant(
    "cuBLAS workspace, from compute capability 9.0", 32 * 2**20, "aten/src/ATen/cuda/CublasHandlePool.cpp, default"
)
CUBLAS_OTHER = Constant(
    "cuBLAS workspace, up to compute capability 8.9", 8_519_680, "the same: 2 x 4 MiB and 8 x 16 KiB"
)

HANDLES = {"train": 2, "forward": 1, "generate": 1}
"""Threads that multiply matrices, each with a workspace: the main one, and when training autograd's own."""


def cublas_workspace() -> Constant:
    """Of the GPU there is; of a recent one where there is none."""
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return CUBLAS_OTHER
    return CUBLAS_HOPPER
