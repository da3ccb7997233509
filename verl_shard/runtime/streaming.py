"""Blocks that live on the host and visit a device: what each holds, and the order in which they come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_shard.common.errors import RunError
from verl_shard.runtime.copies import Copies
from verl_shard.runtime.pinned import HostBuffer

_ALIGNED = 512
"""Bytes: where torch itself begins tensors on a GPU, so that the same kernels run."""
LARGE_BUFFER = 2**20
"""Bytes from which on a buffer is taken for a weight."""


@dataclass(frozen=True)
class Packed:
    """Where a tensor lies in a flat buffer of bytes."""

    tensor: torch.Tensor
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    home: torch.device
    """Where it was before."""

    @property
    def n_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in `flat`, with its own dtype, shape and strides."""
        return flat[self.offset : self.offset + self.n_bytes].view(self.dtype).as_strided(self.shape, self.stride)


def pack(tensors: Iterable[torch.Tensor]) -> tuple[list[Packed], int]:
    """A place for each tensor, whatever its dtype, and the bytes of a flat buffer for all. Strides stay where they can."""
    places, end = [], 0
    for tensor in tensors:
        stride = torch.empty_like(tensor, device="meta").stride()  # its own, unless it has gaps or overlaps
        places.append(Packed(tensor, end, tensor.dtype, tensor.shape, stride, tensor.device))
        end += -(-places[-1].n_bytes // _ALIGNED) * _ALIGNED
    return places, end


def weights_of(module: nn.Module, kept: frozenset[int] = frozenset()) -> list[torch.Tensor]:
    """What of a block is streamed: its parameters, and large buffers that a checkpoint holds (weights by another name).

    All other buffers are small, or tables that a forward may write to, and stay on the device. kept: ids of tensors
    that stay there too.
    """
    found: dict[int, torch.Tensor] = {id(parameter): parameter for parameter in module.parameters()}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set:
                continue
            if buffer.numel() * buffer.element_size() >= LARGE_BUFFER:
                found[id(buffer)] = buffer
    return [tensor for key, tensor in found.items() if key not in kept and tensor.numel()]


class HostBlock:
    """A block whose weights are in one flat buffer of the host; between its turns the parameters are views of that."""

    def __init__(self, name: str, module: nn.Module, kept: frozenset[int]) -> None:
        self.name = name
        self.module = module
        self._kept = kept
        self.places, self.n_bytes = pack(weights_of(module, kept))
        self.buffer: HostBuffer | None = None

    @property
    def on_host(self) -> bool:
        return self.buffer is not None

    def pack(self, copies: Copies, pin_limit: int | None) -> None:
        """Moves the weights into a buffer of the host."""
        self.places, self.n_bytes = pack(weights_of(self.module, self._kept))
        with torch.no_grad(), torch.inference_mode(False):
            buffer = HostBuffer(self.n_bytes, copies, pin_limit)
            for place in self.places:
                view = place.view(buffer.data)
                view.copy_(place.tensor)
                place.tensor.data = view
        self.buffer = buffer

    def unpack(self) -> None:
        """Moves the weights back to where they were, as tensors of their own."""
        if self.buffer is None:
            return
        with torch.no_grad(), torch.inference_mode(False):
            for place in self.places:
                home = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.home)
                place.tensor.data = home.copy_(place.view(self.buffer.data))
        self.buffer.free()
        self.buffer = None

    def look_at(self, flat: torch.Tensor | None) -> None:
        """Makes the parameters views of a flat buffer of the device; None: of the one on the host."""
        assert self.buffer is not None, "a block that is used is packed"
        flat = self.buffer.data if flat is None else flat
        with torch.inference_mode(False):
            for place in self.places:
                place.tensor.data = place.view(flat)


class BlockStream:
    """The blocks of one device, in the order in which they run, and the flat buffers there that they take turns in.

    While one block computes, the next ones are copied. A block that runs out of order, twice or not at all costs time
    and nothing else: what is not there when it is needed is fetched then.
    """

    def __init__(self, blocks: Sequence[HostBlock], copies: Copies, ahead: int, prefetch: bool) -> None:
        self.blocks = blocks
        self.copies = copies
        self._ahead = ahead
        self._prefetch = prefetch
        self.to_come: int | None = None
        """Calls that are still expected, the one under way among them; None where nobody said."""
        self._buffers: list[torch.Tensor] = []
        self._free: list[tuple[torch.Tensor, Any]] = []
        """Buffers that no block is in, and the mark of the last use of each."""
        self._held: dict[int, torch.Tensor] = {}
        self._ready: dict[int, Any] = {}
        self._running: list[int] = []

    @property
    def buffer_bytes(self) -> int:
        """Of the device, held right now."""
        return sum(buffer.numel() for buffer in self._buffers)

    def begin(self) -> None:
        """Starts the copies of the first blocks, if they are not there from the call before."""
        if not self._buffers:
            size = max(block.n_bytes for block in self.blocks)
            with torch.inference_mode(False):
                for _ in range(min(self._ahead, len(self.blocks))):
                    self._buffers.append(self.copies.buffer(size))
            mark = self.copies.mark()  # the memory may have been another tensor's until now
            self._free = [(buffer, mark) for buffer in self._buffers]
        self._look_ahead(-1)

    def need(self, index: int) -> None:
        """Before a block runs: its weights are there."""
        if not self._buffers:
            self.begin()
        if index not in self._held:
            self._fetch(index)
        self.copies.wait(self._ready[index])
        self._running.append(index)
        self.blocks[index].look_at(self._held[index])

    def done(self, index: int) -> None:
        """After a block ran: its buffer is the next one's."""
        self._running.remove(index)
        if index in self._running:  # it called itself
            return
        self.blocks[index].look_at(None)
        self._ready.pop(index)
        self._free.append((self._held.pop(index), self.copies.mark()))
        self._look_ahead(index)

    def finish(self) -> None:
        """After a call: the buffers go back, unless the next call's first blocks are in them already."""
        if self.to_come is not None:
            self.to_come = max(self.to_come - 1, 0)
        if not self._prefetch or self.to_come == 0:
            self.drop()

    def drop(self) -> None:
        """Gives everything back that is on the device, whatever was going on; the weights are on the host."""
        for index in self._running:
            if self.blocks[index].on_host:
                self.blocks[index].look_at(None)
        if self._buffers:
            self.copies.settle()  # the next owner of the memory must not be written to
        self._buffers, self._free, self._running = [], [], []
        self._held.clear()
        self._ready.clear()

    def _look_ahead(self, index: int) -> None:
        n = len(self.blocks)
        for step in range(1, min(self._ahead, n) + 1):
            if not self._free:
                return
            coming = index + step
            if coming >= n and (not self._prefetch or self.to_come in (0, 1)):
                return
            if coming % n not in self._held:
                self._fetch(coming % n)

    def _fetch(self, index: int) -> None:
        block = self.blocks[index]
        if block.buffer is None:
            why = "a forward pass ran while its weights were being put back"
            raise RunError(f"{block.name} is no longer streamed: {why}. Undo the offload of the whole model at once")
        buffer, after = self._room()
        target = buffer[: block.n_bytes]
        self._ready[index] = self.copies.copy(target, block.buffer.data[: block.n_bytes], after)
        self._held[index] = buffer

    def _room(self) -> tuple[torch.Tensor, Any]:
        """A buffer to copy into: a free one, that of a block that came too early, or a new one."""
        if self._free:
            return self._free.pop(0)
        early = [index for index in self._held if index not in self._running]
        if early:
            last = early[-1]
            self._ready.pop(last)
            return self._held.pop(last), self.copies.mark()  # copies keep their order among themselves
        with torch.inference_mode(False):
            self._buffers.append(self.copies.buffer(self._buffers[0].numel()))
        return self._buffers[-1], self.copies.mark()
