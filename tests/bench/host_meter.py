"""What real tensors on the host take, storage by storage: torch.cuda.max_memory_allocated for a machine without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUND = 512


class HostMeter(TorchDispatchMode):
    """Counts storages that operations make or touch, and what is resized to nothing and back, as FSDP does."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
        return result

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            inner = getattr(tensor, "_local_tensor", tensor)
            for part in (inner._values, inner._offsets) if inner.is_nested else (inner,):
                if part.device.type == "cpu":
                    self._see(part.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self._gone, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, n_bytes: int) -> None:
        size = -(-n_bytes // ROUND) * ROUND
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    @contextmanager
    def on(self) -> Iterator[None]:
        """While it is on, storages are counted, those that are resized too."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = original
