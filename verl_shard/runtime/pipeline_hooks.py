"""A model over several devices, on accelerate's hooks: each tensor that travels is moved once for each forward pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import ModelHook
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from verl_shard.common.errors import config_error
from verl_shard.runtime.pipeline_links import Links, Parcel, carry
from verl_shard.runtime.whole_rows import GivesPositions, whole_rows

_FOR_THE_LOSS = ("start_positions", "end_positions")
"""Beside what has "label" in its name: inputs that are compared with outputs."""


@dataclass(frozen=True)
class _Moved:
    """A tensor, as it was at a version, and its copy. Held, so that its id is nobody else's."""

    source: torch.Tensor
    version: int
    copy: torch.Tensor


@dataclass(frozen=True)
class _Sent:
    """A tensor that was there at a mark of its device, as it was at a version."""

    source: torch.Tensor
    version: int
    mark: Any


@dataclass(frozen=True)
class _Kept:
    """Data of a copy, for as long as its source lives."""

    version: int
    parcel: Parcel
    copy_version: int


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; made in inference mode it does not know."""
    return -1 if tensor.is_inference() else tensor._version


class Travels:
    """Who has been moved where. One of a model; each thread has forward passes of its own."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._local = threading.local()
        self._kept: Any = WeakTensorKeyDictionary()
        self._lock = threading.Lock()
        self._ready: dict[int, _Sent] = {}
        self._sent_back: Callable[[int, Any, Any], None] | None = None
        self._crossed: set[tuple[int, Any]] = set()
        self.was_late = False
        """Whether a backward was once waited for in vain: it would be in each pass."""
        self.apart = False
        """Whether a device may not be given a backward before it has been given all of the one before. One that has left it may
        have more to do there: to cast weights back, whose casts autocast keeps from the first forward on, and where a second
        tensor came over the same border."""
        self.ran_again = False
        """Whether a block was computed again, outside of any forward."""

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around a forward pass; what it moved is forgotten when the outermost one ends, with an error too."""
        outer = getattr(self._local, "moved", None)
        if outer is None:
            self._local.moved, self._local.sent = {}, {}
        try:
            yield
        finally:
            self._local.moved = outer
            if outer is None:
                self._local.sent = None

    @contextmanager
    def stopping(self, stop: Callable[[Any], None], number: int) -> Iterator[None]:
        """In forward passes of this thread `stop` is called before each module of the map, with its device. number: of the
        micro-batch."""
        self._local.stop, self._local.number = stop, number
        try:
            yield
        finally:
            self._local.stop = self._local.number = None

    def reach(self, device: Any, args: Any, kwargs: Any, skip: Collection[str]) -> tuple[Any, Any]:
        """A module of the map is about to run on that device: what it is given, there.

        Where the thread stops first, copies begin before that and are taken in behind it. A copy waits for all that the
        device it comes from has been given, and the device it goes to waits for the copy: begun behind the stop it would wait
        for another micro-batch's backward, taken in before it would hold one up.
        """
        stop: Callable[[Any], None] | None = getattr(self._local, "stop", None)
        if stop is None:
            self.ran_again = True
            return self.move_all(args, device), self.move_all(kwargs, device, skip)
        late: list[Parcel] = []
        self._local.late = late
        try:
            moved = self.move_all(args, device), self.move_all(kwargs, device, skip)
        finally:
            self._local.late = None
        stop(device)
        for parcel in late:
            self.links.arrive(parcel)
        return moved

    def _take_in(self, parcel: Parcel) -> torch.Tensor:
        late: list[Parcel] | None = getattr(self._local, "late", None)
        if late is None:
            return self.links.arrive(parcel)
        late.append(parcel)
        return parcel.tensor

    @contextmanager
    def ready(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[None]:
        """Inputs that are all there now, and are not written to: their copies wait for nothing that is given to their device
        from here on. Labels go from the first device to the last one, which would wait for the first one's backward."""
        tensors = [value for batch in batches for value in batch.values() if isinstance(value, torch.Tensor)]
        marks = {device: self.links.mark(device) for device in {self.links.of(tensor) for tensor in tensors}}
        self._ready = {id(t): _Sent(t, _version(t), marks[self.links.of(t)]) for t in tensors}
        try:
            yield
        finally:
            self._ready = {}

    def move(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """The tensor on a device: itself, its copy of this forward pass, or a new one."""
        home = self.links.of(tensor)
        if home == device:
            return tensor
        moved: dict[tuple[int, Any], _Moved] | None = getattr(self._local, "moved", None)
        version = _version(tensor)
        known = None if moved is None else moved.get((id(tensor), device))
        if known is not None and known.version == version and (known.copy.requires_grad or not _wants_grad(tensor)):
            return known.copy
        copy = self._carry(tensor, device, version, in_pass=moved is not None)
        if moved is not None:
            moved[id(tensor), device] = _Moved(tensor, version, copy)
            moved[id(copy), home] = _Moved(copy, _version(copy), tensor)
        return copy

    def _carry(self, tensor: torch.Tensor, device: Any, version: int, *, in_pass: bool) -> torch.Tensor:
        """Outside of a pass a checkpointed block runs again, in its backward. What it is given was copied before; a copy
        made anew would wait for all that the other device has been given since, another micro-batch's backward."""
        if not torch.is_grad_enabled() or version < 0:
            return self._carried(tensor, device, self._start(tensor, device))
        with self._lock:
            kept: _Kept | None = None if in_pass else self._kept.get(tensor, {}).get(device)
        if kept is not None and kept.version == version and _version(kept.parcel.tensor) == kept.copy_version:
            return self._carried(tensor, device, kept.parcel)
        parcel = self._start(tensor, device)
        with self._lock:
            # Without a graph: an entry must not hold what its own source hangs on.
            made = _Kept(version, parcel, _version(parcel.tensor))
            self._kept.setdefault(tensor, {})[device] = made
        return self._carried(tensor, device, parcel)

    def _carried(self, tensor: torch.Tensor, device: Any, parcel: Parcel) -> torch.Tensor:
        number: int | None = getattr(self._local, "number", None)
        told = None
        if number is not None and _wants_grad(tensor):
            told = functools.partial(self._told, number)
            autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
            self.apart = self.apart or autocast or (number, device) in self._crossed
            self._crossed.add((number, device))
        return carry(self.links, tensor, device, parcel, self._take_in, told)

    def watch(self, sent_back: Callable[[int, Any, Any], None] | None) -> None:
        """sent_back: told from now on, in backward passes of numbered forwards, of which one a gradient goes, from where, and
        to where. None: nobody is."""
        self._sent_back = sent_back
        self._crossed.clear()
        self.apart, self.ran_again = self.was_late, False

    def _told(self, number: int, source: Any, target: Any) -> None:
        if (told := self._sent_back) is not None:
            told(number, source, target)

    def _start(self, tensor: torch.Tensor, device: Any) -> Parcel:
        """What goes to a second device of this pass, such as a mask to a third stage, waits for no more than to the first."""
        sent: dict[int, _Sent] | None = getattr(self._local, "sent", None)
        known = (sent or {}).get(id(tensor)) or self._ready.get(id(tensor))
        version = _version(tensor)
        after = known.mark if known is not None and known.version == version >= 0 else None
        parcel = self.links.start(tensor.detach(), device, after)
        if sent is not None:
            sent[id(tensor)] = _Sent(tensor, version, parcel.after)
        return parcel

    def move_all(self, value: Any, device: Any, skip: Collection[str] = ()) -> Any:
        """The same structure of lists, tuples and mappings, its tensors on a device; other objects as they are."""
        if isinstance(value, torch.Tensor):
            return self.move(value, device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.move_all(part, device, skip) for part in value))
        if isinstance(value, list | tuple):
            parts = [self.move_all(part, device, skip) for part in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
        if isinstance(value, Mapping):
            changed = {key: part if key in skip else self.move_all(part, device, skip) for key, part in value.items()}
            return value if all(changed[key] is value[key] for key in value) else _like(value, changed)
        if type(value).__name__ == "BlockMask":  # flex attention's; it has tensors and knows how to move them
            return value.to(device)
        return value


def _wants_grad(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _like(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping of the same kind: a transformers output is made from keywords."""
    return changed if type(value) is dict else type(value)(**changed)


class StageHook(ModelHook):  # type: ignore[misc]
    """Around a module of the map: it finds what it is given on its device."""

    offload = False

    def __init__(self, travels: Travels, device: Any, skip: Collection[str]) -> None:
        self.execution_device = device
        self._travels = travels
        self._skip = skip

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._travels.reach(self.execution_device, args, kwargs, self._skip)


class PassHook(ModelHook):  # type: ignore[misc]
    """Around a whole model, or its body without the head: inputs go where they are first read; outputs stay.

    device: where inputs go; for_loss: where those go that a loss compares with outputs; output: where outputs go, None
    for where they are made; hidden: where what the head is given is made, which logits_to_keep is cut out of, None for
    where inputs go.
    """

    offload = False

    def __init__(
        self,
        travels: Travels,
        device: Any,
        for_loss: Any,
        output: Any,
        skip: Collection[str],
        devices: tuple[Any, ...],
        hidden: Any = None,
    ) -> None:
        self.travels = travels
        self.execution_device = device
        self.devices = devices
        self._for_loss = for_loss
        self._output = output
        self._hidden = device if hidden is None else hidden
        self._skip = skip
        self._forward: Callable[..., Any] | None = None
        self._gives_positions: GivesPositions | None = None

    @property
    def links(self) -> Links:
        return self.travels.links

    def to_loss(self, value: Any) -> Any:
        """A tensor on the device where losses are made; numbers as they are."""
        return self.travels.move(value, self._for_loss) if isinstance(value, torch.Tensor) else value

    def init_hook(self, module: nn.Module) -> nn.Module:
        # accelerate calls hooks before and after a forward pass, and not when it fails; this is called around it.
        self._forward = module._old_forward  # type: ignore[assignment]
        self._gives_positions = GivesPositions(module._old_forward)  # type: ignore[arg-type]
        module._old_forward = self._call  # type: ignore[assignment]
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        module._old_forward = self._forward  # type: ignore[assignment]
        return module

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._forward is not None, "a hook is attached before it is called"
        assert self._gives_positions is not None, "likewise"
        move_all = self.travels.move_all
        with self.travels.forward_pass(), whole_rows(not self._gives_positions(args, kwargs)):
            given = {}
            for key, value in kwargs.items():
                given[key] = value if key in self._skip else move_all(value, self._goes_to(key), self._skip)
            output = self._forward(*move_all(args, self.execution_device), **given)
            return output if self._output is None else move_all(output, self._output, self._skip)

    def _goes_to(self, key: str) -> Any:
        if "label" in key or key in _FOR_THE_LOSS:
            return self._for_loss
        return self._hidden if key == "logits_to_keep" else self.execution_device


class RootHook(PassHook):
    """Around the whole model, which must not be moved."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        super().init_hook(module)
        plain: Any = module.to

        def to(*args: Any, **kwargs: Any) -> Any:
            if torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
                _refuse()
            return plain(*args, **kwargs)

        module.__dict__.update(to=to, cuda=_refuse)  # accelerate takes these away with the hook
        return module


def _refuse(*_: Any, **__: Any) -> Any:
    why = "its blocks are on several devices, and each is called where it is"
    fix = "Undo it first: accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    raise config_error("dispatched", "model.to", None, why, fix)
