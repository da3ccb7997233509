"""Several devices on the host: numbers are real, each storage has a device, and nothing may read one of another.

Tensors stay on the CPU. A TorchDispatchMode gives what an operation makes the device of what it read, in forward and
backward, and fails where one operation reads tensors of two devices. A copy holds NaN until it has arrived.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_shard.runtime.pipeline_links import Parcel

_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
"""Operations after which the host has a number that a device made."""


class FakeLinks(TorchDispatchMode):
    """As GpuLinks; active (`with links:`) it watches. A tensor that no device has been given is the host's."""

    def __init__(self, kept: dict[str, int] | None = None) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._device: dict[int, str] = {}
        self._on_way: dict[int, torch.Tensor] = {}
        self.copies: list[tuple[str, str, tuple[int, ...]]] = []
        """From where, to where, and the shape of what was copied."""
        self.log: list[tuple[str, str]] = []
        self.waits: list[str] = []
        self.bytes: Counter[str] = Counter()
        self.rooms: dict[str, int] = kept or {}

    def device(self, name: Any) -> str:
        return f"gpu{name}"

    def of(self, tensor: torch.Tensor) -> str:
        return self._device.get(tensor.untyped_storage()._cdata, "host")

    def give(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Says where a tensor is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key not in self._device:
                weakref.finalize(storage, self._gone, key, storage.nbytes())
                self.bytes[device] += storage.nbytes()
            self._device[key] = device
        return tensor

    def _gone(self, key: int, size: int) -> None:
        with self._lock:
            self.bytes[self._device.pop(key)] -= size

    def place(self, tensor: torch.Tensor, device: str) -> None:
        self.give(tensor, device)

    def mark(self, device: str) -> Any:
        return None

    def start(self, tensor: torch.Tensor, device: str, after: Any = None) -> Parcel:
        self.copies.append((self.of(tensor), device, tuple(tensor.shape)))
        with torch.utils._python_dispatch._disable_current_modes():
            data = tensor.detach().clone()
            copy = torch.empty_like(data)
            if copy.is_floating_point():
                copy.fill_(float("nan"))
            else:
                copy.fill_(0)
        self.give(copy, device)
        return Parcel(copy, data)

    def arrive(self, parcel: Parcel) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            parcel.tensor.data.copy_(parcel.done)
        return parcel.tensor

    def thread(self, devices: Any) -> Any:
        watches = self in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return self if watches else nullcontext()

    def held(self, device: str) -> int:
        return self.bytes[device]

    def room(self, device: str) -> int | None:
        return self.rooms.get(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of a nested tensor's making one argument is torch's own example of one, the same in all calls and of no device.
        given = args[:2] if "_nested_view_from_jagged" in str(func) else (args, kwargs)
        read = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor)]
        known = {self.of(t) for t in read} - {"host"}
        assert len(known) < 2, f"{func} reads tensors of {sorted(known)}"
        result = func(*args, **(kwargs or {}))
        if known and any(wait in str(func) for wait in _WAITS):
            self.waits.append(str(func))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and known and self.of(tensor) == "host":
                self.give(tensor, *known)
        if known and "mm" in str(func):
            self.log.append((*known, str(func)))
        return result
