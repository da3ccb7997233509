"""Copies between devices beside what they compute: on side streams, forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl_shard.common.errors import RunError
from verl_shard.models.devices import DeviceId, torch_device


@dataclass(frozen=True)
class Parcel:
    """A copy that is under way. tensor: of the target device, to be read once it has arrived. done: a point in the order
    of the copies. after: the mark that it waits for."""

    tensor: torch.Tensor
    done: Any = None
    after: Any = None


class Links(Protocol):
    """What a pipeline asks of its devices. A test's devices can stand in for GPUs: they need these methods only.

    Backward passes call it from a thread for each device.
    """

    def device(self, name: DeviceId) -> Any:
        """The device of that name, in the form that `of` gives."""

    def of(self, tensor: torch.Tensor) -> Any:
        """The device that a tensor is on."""

    def place(self, tensor: torch.Tensor, device: Any) -> None:
        """Moves the data of a parameter or buffer, once; the tensor stays the same object."""

    def mark(self, device: Any) -> Any:
        """A point in the order of a device, behind what it has been given to do by now."""

    def start(self, tensor: torch.Tensor, device: Any, after: Any = None) -> Parcel:
        """Begins a copy after what its device has been given to do by now, or by a mark. Neither device waits for it."""

    def arrive(self, parcel: Parcel) -> torch.Tensor:
        """What is given to the target device from here on waits for the copy; the tensor of it."""

    def thread(self, devices: Sequence[Any]) -> AbstractContextManager[None]:
        """To be entered in another thread, which then gives the devices to do as the one that called this."""

    def held(self, device: Any) -> int:
        """Bytes of tensors on a device, as the host counts them."""

    def room(self, device: Any) -> int | None:
        """Bytes that a device still has for tensors; None where that is not known."""


class GpuLinks:
    """GPUs of one host, and the host. A pair of GPUs has a stream on each of them for each direction.

    torch makes a copy between two GPUs on the current stream of the one it comes from, and lets both current streams wait
    for each other. With side streams as the current ones only those do; what computes goes on.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device], tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        self._cuda: Any = torch.cuda  # its calls have no types

    def device(self, name: DeviceId) -> torch.device:
        return torch_device(name)

    def of(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def place(self, tensor: torch.Tensor, device: torch.device) -> None:
        if tensor.device != device:
            gradient, tensor.grad = tensor.grad, None  # must be where its tensor is
            tensor.data = tensor.data.to(device)
            tensor.grad = None if gradient is None else gradient.to(device)

    def _pair(self, source: torch.device, target: torch.device) -> tuple[Any, Any]:
        """The streams of a copy, on the device that it comes from (None of the host) and on the one it goes to."""
        with self._lock:
            if (source, target) not in self._streams:
                leaving = self._cuda.Stream(source) if source.type == "cuda" else None
                self._streams[source, target] = leaving, self._cuda.Stream(target)
            return self._streams[source, target]

    def mark(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        return torch.cuda.current_stream(device).record_event()

    def start(self, tensor: torch.Tensor, device: torch.device, after: Any = None) -> Parcel:
        if device.type != "cuda":  # the host reads it next, so that it has to wait
            return Parcel(tensor.to(device))
        leaving, coming = self._pair(tensor.device, device)
        done = self._cuda.Event()
        if leaving is None:
            # From pageable memory a copy waits for its stream first: this one has nothing but copies to do.
            with self._cuda.stream(coming):
                copy = tensor.to(device, non_blocking=True)
                done.record(coming)
            return Parcel(copy, done)
        made = self.mark(tensor.device) if after is None else after
        leaving.wait_event(made)
        with self._cuda.stream(coming), self._cuda.stream(leaving):
            copy = tensor.to(device, non_blocking=True)
        done.record(coming)
        tensor.record_stream(leaving)
        return Parcel(copy, done, made)

    def arrive(self, parcel: Parcel) -> torch.Tensor:
        if parcel.done is not None:
            stream = torch.cuda.current_stream(parcel.tensor.device)
            stream.wait_event(parcel.done)
            parcel.tensor.record_stream(stream)
        return parcel.tensor

    @contextmanager
    def _as(self, current: int, streams: Sequence[Any]) -> Iterator[None]:
        before = [torch.cuda.current_stream(stream.device) for stream in streams]
        device = torch.cuda.current_device()
        for stream in streams:
            torch.cuda.set_stream(stream)
        torch.cuda.set_device(current)
        try:
            yield
        finally:  # the thread stays, and has other forwards to do
            for stream in before:
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)

    def thread(self, devices: Sequence[torch.device]) -> AbstractContextManager[None]:
        gpus = [device for device in devices if device.type == "cuda"]
        if not gpus:
            return nullcontext()
        return self._as(torch.cuda.current_device(), [torch.cuda.current_stream(device) for device in gpus])

    def held(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def room(self, device: torch.device) -> int | None:
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


TakeIn = Callable[[Parcel], torch.Tensor]
"""Links.arrive, or what calls it later, before the tensor is read."""
SentBack = Callable[[Any, Any], None]
"""Told from which device to which a gradient is on its way; returns when its turn has come there."""


class _Way:
    """Where a gradient is between the two ends of a copy."""

    def __init__(self, links: Links, sent_back: SentBack | None) -> None:
        self.links, self.sent_back = links, sent_back
        self.back: Parcel | None = None


class _Leave(torch.autograd.Function):
    """The end of a copy on the device that it comes from: there its gradient arrives.

    A backward pass has a thread for each device. The gradient must be waited for in this device's own, at its turn: were
    the wait given to the device's stream by the other's thread, which is ahead, all that this thread gives the stream
    later would wait too. So the gradient goes around autograd's edge, which would do that as well.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        back, ctx.way.back = ctx.way.back, None
        return (gradient if back is None else ctx.way.links.arrive(back)), None


class _Come(torch.autograd.Function):
    """The end of a copy on the device that it goes to: from there its gradient is sent back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, way: _Way, copy: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.home = way, way.links.of(tensor)
        ctx.set_materialize_grads(False)
        # An alias, as autograd takes what is returned for its own, and a copy may be used again.
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RunError("Gradients of gradients (create_graph) do not travel between devices: compute them on one")
        if gradient is not None:
            ctx.way.back = ctx.way.links.start(gradient, ctx.home)
            if ctx.way.sent_back is not None:
                ctx.way.sent_back(ctx.way.links.of(gradient), ctx.home)
        return None, None, None


def carry(
    links: Links,
    tensor: torch.Tensor,
    device: Any,
    parcel: Parcel | None = None,
    take_in: TakeIn | None = None,
    sent_back: SentBack | None = None,
) -> torch.Tensor:
    """A tensor on another device, its gradient coming back the same way. parcel: its copy, if it was made before. take_in:
    called instead of links.arrive, to do that later. sent_back: called in the backward."""
    made = links.start(tensor.detach(), device) if parcel is None else parcel
    copy = links.arrive(made) if take_in is None else take_in(made)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return copy
    way = _Way(links, sent_back)
    moved: torch.Tensor = _Come.apply(_Leave.apply(tensor, way), way, copy)  # type: ignore[no-untyped-call]
    return moved
