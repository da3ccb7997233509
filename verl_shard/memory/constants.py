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

CUDA_CONTEXT = Constant(
    "CUDA context", 619 * 2**20, "527 to 619 MiB measured on an H200, torch 2.11: the driver's used memory less torch's"
)

CUBLAS_LT = Constant(
    "cuBLASLt workspace, for a product with a bias",
    2**20,
    "aten/src/ATen/cuda/CUDABlas.cpp, default; the same in forward passes measured on an H200",
)


def cublas_workspace() -> Constant:
    """Of the GPU there is; of a recent one where there is none."""
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return CUBLAS_OTHER
    return CUBLAS_HOPPER
