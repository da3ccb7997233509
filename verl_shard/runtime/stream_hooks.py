"""Streaming on accelerate's hooks: what runs around a model, around each of its blocks and around its embedding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import find_device, send_to_device
from torch import nn

from verl_shard.common.errors import config_error
from verl_shard.runtime.copies import Copies
from verl_shard.runtime.pinned import HostBuffer
from verl_shard.runtime.streaming import BlockStream, HostBlock, pack


class InputsHook(ModelHook):  # type: ignore[misc]
    """Moves what a module is given to the device that it computes on."""

    def __init__(self, device: torch.device, skip_keys: Any) -> None:
        self._device = device
        self._skip_keys = skip_keys

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return send_to_device(args, self._device), send_to_device(kwargs, self._device, skip_keys=self._skip_keys)


class BlockHook(ModelHook):  # type: ignore[misc]
    """Around a block: its weights come before it, and its buffer is given on after it."""

    def __init__(self, block: HostBlock, copies: Copies, pin_limit: int | None) -> None:
        self.block = block
        self._copies = copies
        self._pin_limit = pin_limit
        self._stream: BlockStream | None = None
        self._index = 0

    def join(self, stream: BlockStream, index: int) -> None:
        """Gives the block its place in the order of its device."""
        self._stream, self._index = stream, index

    def init_hook(self, module: nn.Module) -> nn.Module:
        if not self.block.on_host:
            self.block.pack(self._copies, self._pin_limit)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert self._stream is not None, "hooks join their stream before a model is given back"
        self._stream.need(self._index)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        assert self._stream is not None, "hooks join their stream before a model is given back"
        self._stream.done(self._index)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self._stream is not None:
            self._stream.drop()
        self.block.unpack()
        return module


class EmbeddingHook(ModelHook):  # type: ignore[misc]
    """An input embedding that stays on the host: of its rows, those that are looked up travel.

    Pinned, the device reads them itself, over the link; otherwise the host gathers them and copies them over.
    """

    def __init__(self, copies: Copies, pin_limit: int | None) -> None:
        self._copies = copies
        self._pin_limit = pin_limit
        self._buffer: HostBuffer | None = None
        self._padding: int | None = None
        self._module: nn.Module | None = None
        self.n_bytes = 0
        self.mapped = False

    @property
    def pinned(self) -> bool:
        return self._buffer is not None and self._buffer.pinned

    def init_hook(self, module: nn.Module) -> nn.Module:
        (self._place,), self.n_bytes = pack([module.weight])  # type: ignore[list-item]
        with torch.no_grad(), torch.inference_mode(False):
            self._buffer = HostBuffer(self.n_bytes, self._copies, self._pin_limit)
            self._rows = self._place.view(self._buffer.data)
            self._rows.copy_(self._place.tensor)
            seen = self._copies.mapped(self._buffer.data) if self._buffer.pinned else None
            self.mapped = seen is not None
            self._place.tensor.data = self._rows if seen is None else self._place.view(seen)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.mapped:
            return args, kwargs
        key = next((name for name, value in kwargs.items() if isinstance(value, torch.Tensor)), "input")
        ids = args[0] if args else kwargs[key]
        used, places = torch.unique(ids.cpu(), return_inverse=True)
        with torch.inference_mode(False):
            rows = self._rows.index_select(0, used.clone()).to(self._copies.device)
            self._module, self._padding = module, module.padding_idx  # type: ignore[assignment]
            module.padding_idx = None  # type: ignore[assignment]  # torch holds it against the number of rows
            self._place.tensor.data = rows
        there = places.to(self._copies.device)
        return ((there, *args[1:]), kwargs) if args else (args, {**kwargs, key: there})

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.release()
        return output

    def release(self) -> None:
        """Leaves the rows of a forward pass, also of one that failed."""
        if self._module is not None:
            self._module.padding_idx = self._padding  # type: ignore[assignment]
            self._module = None
            self._place.tensor.data = self._rows

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.release()
        if self._buffer is not None:
            with torch.no_grad(), torch.inference_mode(False):
                home = torch.empty_strided(
                    self._place.shape, self._place.stride, dtype=self._place.dtype, device=self._place.home
                )
                self._place.tensor.data = home.copy_(self._rows)
            self._buffer.free()
            self._buffer = None
        return module


class RootHook(ModelHook):  # type: ignore[misc]
    """Around a whole model: one call at a time; what is not streamed stays on its device; an error leaves nothing lost.

    device: where inputs go; None when accelerate's own hooks move them.
    resident: (module, name, device) of each tensor that stays on a device.
    """

    def __init__(
        self,
        streams: Sequence[BlockStream],
        embedding: EmbeddingHook | None,
        device: torch.device | None,
        resident: Sequence[tuple[nn.Module, str, torch.device]],
        skip_keys: Any,
    ) -> None:
        self.streams = streams
        self.io_same_device = device is not None
        self._embedding = embedding
        self._device = device
        self._resident = resident
        self._skip_keys = skip_keys
        self._homes: list[torch.device] = []
        self._lock = threading.RLock()
        self._depth = 0
        self._forward: Callable[..., Any] | None = None

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._homes = []
        for owner, name, device in self._resident:
            tensor = _tensor(owner, name)
            self._homes.append(tensor.device)
            tensor.data = tensor.data.to(device)
        # accelerate calls hooks before and after a forward pass, and not when it fails; this is called around it.
        self._forward = module._old_forward  # type: ignore[assignment]
        module._old_forward = self._call  # type: ignore[assignment]
        for name in ("to", "cuda"):  # accelerate takes these away with the hook
            module.__dict__[name] = _refuse
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        with self._lock:
            for stream in self.streams:
                stream.drop()
            for (owner, name, _), home in zip(self._resident, self._homes, strict=True):
                tensor = _tensor(owner, name)
                tensor.data = tensor.data.to(home)
            module._old_forward = self._forward  # type: ignore[assignment]
        return module

    def prepare(self) -> None:
        """Starts the copies of the first blocks of a call that is about to come."""
        with self._lock:
            for stream in self.streams:
                stream.begin()

    def expect(self, n_calls: int | None) -> None:
        """Nothing is copied ahead of a call that does not come after so many; None: nobody knows."""
        with self._lock:
            for stream in self.streams:
                stream.to_come = n_calls

    def release(self) -> None:
        """Gives back the buffers of the device that wait for the next call; it fills them anew."""
        with self._lock:
            for stream in self.streams:
                stream.drop()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._forward is not None, "a hook is attached before it is called"
        with self._lock, torch.no_grad():
            self._depth += 1
            try:
                if self._depth > 1:  # the model called itself
                    return self._forward(*args, **kwargs)
                return self._outer_call(self._forward, args, kwargs)
            finally:
                self._depth -= 1

    def _outer_call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            for stream in self.streams:
                stream.begin()
            if self._device is None:
                output = forward(*args, **kwargs)
            else:
                came_from = find_device([args, kwargs])
                args = send_to_device(args, self._device)
                output = forward(*args, **send_to_device(kwargs, self._device, skip_keys=self._skip_keys))
                if self.io_same_device and came_from is not None:
                    output = send_to_device(output, came_from, skip_keys=self._skip_keys)
        except BaseException:
            for stream in self.streams:
                stream.drop()
            if self._embedding is not None:
                self._embedding.release()
            raise
        for stream in self.streams:
            stream.finish()
        return output


def _tensor(owner: nn.Module, name: str) -> torch.Tensor:
    found = {**owner._buffers, **owner._parameters}[name]
    assert found is not None, f"{name} was there when it was counted"
    return found


def _refuse(*_: Any, **__: Any) -> Any:
    why = "its weights are on the host and visit the GPU, where each forward pass expects them"
    fix = "Undo it first: accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    raise config_error("offloaded", "model.to", None, why, fix)


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of accelerate's interface that a module has."""
    hook = getattr(module, "_hf_hook", None)
    return list(hook.hooks) if isinstance(hook, SequentialHook) else [] if hook is None else [hook]


def attach(module: nn.Module, hook: Any) -> None:
    """Adds a hook behind those that a module has."""
    add_hook_to_module(module, hook, append=bool(hooks_of(module)))


def detach(modules: Iterable[nn.Module], ours: tuple[type, ...]) -> None:
    """Takes hooks of these classes away and leaves others."""
    for module in modules:
        hooks = hooks_of(module)
        others = [hook for hook in hooks if not isinstance(hook, ours)]
        if len(others) < len(hooks) or (not hooks and hasattr(module, "_old_forward")):
            remove_hook_from_module(module)
            for hook in others:
                attach(module, hook)


def own_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(name of the module, module, name in it, tensor) of all parameters and buffers, each under all of its names."""
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield path, module, name, tensor
