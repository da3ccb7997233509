"""What benches measure on the GPUs of a machine: time, and what torch has allocated on each."""

from __future__ import annotations

import gc


class GpusMeter:
    """Time, and memory of the first GPUs: bytes that torch has allocated on each. Of none it measures nothing."""

    def __init__(self, n_gpus: int) -> None:
        self._gpus = range(n_gpus)

    def wait(self) -> None:
        import torch

        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def begin_peak(self) -> None:
        """Peaks are counted from here on."""
        import torch

        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)

    def peaks(self) -> tuple[int, ...]:
        import torch

        return tuple(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus)

    def empty(self) -> None:
        """Frees what only cycles or torch's cache still hold."""
        import torch

        gc.collect()
        if self._gpus:
            torch.cuda.empty_cache()
