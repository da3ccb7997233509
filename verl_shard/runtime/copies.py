"""Copies from the host to a device beside what it computes: the few things streaming asks of a device."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch


class Copies(Protocol):
    """One device's side of streaming. Marks are points in the order of work: of what is computed, or of a copy.

    Work is issued by one thread at a time. A test's device can stand in for a GPU: it needs these methods only.
    """

    device: torch.device

    def pin(self, buffer: torch.Tensor) -> bool:
        """Page-locks a host buffer, so that copies of it run by themselves; False when the system refuses."""

    def unpin(self, buffer: torch.Tensor) -> None:
        """Undoes `pin`, once the copies of the buffer have ended."""

    def mapped(self, buffer: torch.Tensor) -> torch.Tensor | None:
        """A pinned buffer as a tensor of the device, which reads it over the link; None where that cannot be."""

    def buffer(self, n_bytes: int) -> torch.Tensor:
        """A new buffer of bytes on the device, (n_bytes,) of uint8."""

    def mark(self) -> Any:
        """A mark behind all that was given to the device to compute until now."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Starts a copy beside what is computed, to begin when the mark `after` is reached; the mark of its end."""

    def wait(self, mark: Any) -> None:
        """What is computed from now on begins when the copy of that mark has ended. The host does not wait."""

    def settle(self) -> None:
        """What is computed from now on begins when all copies that were started have ended."""


class _Aliased:
    """Host memory under CUDA's array interface, which torch takes without a copy. It keeps the memory alive."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.numel(),), "typestr": "|u1", "data": (buffer.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip


class CudaCopies:
    """Copies to one GPU, on a stream of their own."""

    _PORTABLE_AND_MAPPED = 3

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda  # its calls have no types
        self._side = self._cuda.Stream(device)

    def pin(self, buffer: torch.Tensor) -> bool:
        # torch's own pinned memory comes in powers of two: a block of 466 MB would take 537.
        cudart = self._cuda.cudart()
        with torch.cuda.device(self.device):
            status = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), self._PORTABLE_AND_MAPPED))
        return status == 0 and buffer.is_pinned()

    def unpin(self, buffer: torch.Tensor) -> None:
        torch.cuda.synchronize(self.device)
        cudart = self._cuda.cudart()
        cudart.cudaHostUnregister(buffer.data_ptr())

    def mapped(self, buffer: torch.Tensor) -> torch.Tensor | None:
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            seen = torch.as_tensor(_Aliased(buffer), device=self.device)
            if seen.data_ptr() == buffer.data_ptr():
                return seen
        return None

    def buffer(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def mark(self) -> Any:
        made = self._cuda.Event()
        made.record(torch.cuda.current_stream(self.device))
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        done = self._cuda.Event()
        with torch.cuda.stream(self._side):
            self._side.wait_event(after)
            target.copy_(source, non_blocking=True)
            done.record(self._side)
        return done

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._side)
