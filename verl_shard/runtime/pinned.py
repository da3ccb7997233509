"""Host memory for copies to a GPU: page-locked, counted over the whole process, within a limit."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import torch

from verl_shard.resources.limits import available_host_memory
from verl_shard.runtime.copies import Copies

_KEPT_FREE = 2**30
"""Bytes of the host that pinning leaves: pages that are locked can no longer be taken back by the system."""
_PART_KEPT_FREE = 20
"""And at least this part of what is available."""

_lock = threading.RLock()  # a collection inside of it may give another buffer back
_pinned = 0


def pinned_bytes() -> int:
    """Bytes of host memory that this process has page-locked for streaming, of all models together."""
    return _pinned


def room_to_pin(pin_limit: int | None) -> int | None:
    """Bytes that may still be pinned: below `pin_limit` for the whole process, and what the host can spare."""
    left = [] if pin_limit is None else [max(pin_limit - _pinned, 0)]
    available = available_host_memory()
    if available is not None:
        left.append(max(available - max(_KEPT_FREE, available // _PART_KEPT_FREE), 0))
    return min(left, default=None)


class HostBuffer:
    """Bytes of the host, pinned where there is room. Given back by `free`, or when nothing refers to it any more."""

    def __init__(self, n_bytes: int, copies: Copies, pin_limit: int | None) -> None:
        room = room_to_pin(pin_limit)
        # Pages of its own: two buffers that share one could not both be pinned.
        pages = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # small pages do as well
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.data = torch.frombuffer(pages, dtype=torch.uint8)
        self.n_bytes = self.data.numel()
        self.pinned = (room is None or n_bytes <= room) and copies.pin(self.data)
        self._release: weakref.finalize[..., HostBuffer] | None = None
        if self.pinned:
            _count(self.n_bytes)
            self._release = weakref.finalize(self, _unpin, self.data, copies)
            self._release.atexit = False  # the end of the process releases it, and CUDA may be gone by then

    def free(self) -> None:
        """Unpins it; the memory itself goes when no tensor looks at it any more."""
        if self._release is not None:
            self._release()
        self.pinned = False


def _unpin(data: torch.Tensor, copies: Copies) -> None:
    copies.unpin(data)
    _count(-data.numel())


def _count(n_bytes: int) -> None:
    global _pinned
    with _lock:
        _pinned += n_bytes
