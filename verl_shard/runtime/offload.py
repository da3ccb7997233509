"""offload_model: a model that only scores, out of GPU memory, in one argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.notices import notice
from verl_shard.common.units import parse_bytes
from verl_shard.mapping.devices import DeviceId, parse_device, torch_device
from verl_shard.resources.limits import available_host_memory
from verl_shard.runtime.offload_choice import WAYS, Choice, Share, check_stream_options, choose_offload
from verl_shard.runtime.stream_hooks import RootHook, hooks_of
from verl_shard.runtime.stream_model import Streamed, blocks_of, host_embedding, stream_model, undo_stream
from verl_shard.runtime.streaming import LARGE_BUFFER

_FOR_ACTIVATIONS = 0.1
"""Of a GPU's memory, what "auto" leaves when it is told no head_room."""


@dataclass(frozen=True)
class Offload:
    """What was done with a model. Bytes; pinned and pageable are of the host.

    home: where a model that accelerate offloads was before; None: over several devices. map_before: its hf_device_map.
    """

    how: str
    why: str
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    streamed: Streamed | None = None
    hook: Any = None
    home: torch.device | None = None
    map_before: Mapping[str, Any] | None = None

    def prepare(self) -> None:
        """Starts copying what the next call begins with, while the host still makes its inputs. Follow it with a call, or
        with release."""
        if self.streamed is not None:
            self.streamed.root.prepare()

    def expect(self, n_calls: int | None) -> None:
        """Says how many calls come, so that nothing is copied ahead after the last; None: it is not known."""
        if self.streamed is not None:
            self.streamed.root.expect(n_calls)

    def release(self) -> None:
        """Gives back what the model still holds of the GPU beside what is resident: buffers that wait for the next call,
        or, after cpu_offload_with_hook, the whole model."""
        if self.streamed is not None:
            self.streamed.root.release()
        if self.hook is not None:
            self.hook.offload()


def offload_model(
    model: nn.Module,
    execution_device: str | int | torch.device | Mapping[str, Any] | None = None,
    *,
    offload: str = "stream",
    ahead: int = 2,
    prefetch: bool = False,
    embeddings_on_host: bool = False,
    pin_limit: int | str | None = None,
    head_room: int | str | None = None,
) -> nn.Module:
    """Moves the weights of a model that only scores (a reward model, a reference policy) to the host, where they can be
    had from when it is called. The model comes back, changed in place; results stay the same, bit for bit.

    execution_device: the GPU that computes, by default where the model is, or the first. A DeviceMap, or a model that
        is dispatched over several GPUs already: each GPU streams its own blocks.
    offload: "stream": blocks are copied from pinned memory while the block before computes; of the blocks, `ahead` are
        on the GPU at a time. "cpu_offload" and "cpu_offload_with_hook" are accelerate's, large buffers offloaded too. "none":
        everything is on the GPU. "auto" takes the fastest that fits; offload_of(model).why says which and why.
    ahead: buffers on the GPU, each as large as its largest block: one computes while ahead - 1 are copied.
    prefetch: copy the first blocks of the next call at the end of this one. Its beginning then costs nothing, and the
        buffers stay on the GPU between calls; without it they are given back. offload_of(model).release() does that too.
    embeddings_on_host: to stream: the input embedding stays on the host, and only the rows that are looked up travel.
    pin_limit: to stream: bytes, or such as "40GiB": the most that this process pins for all its models. What is not pinned is
        copied several times slower; a notice says so.
    head_room: for "auto": bytes that weights may take on each GPU; by default what is free, less a tenth of the GPU.

    The model's hf_device_map says where it computes, until undo_offload(model) puts back the one that was there.
    One thread at a time scores; others wait. accelerate.hooks.remove_hook_from_module(model, recurse=True) undoes it;
    undo_offload(model) does too, and leaves the hooks of a model that was dispatched before.
    On the CPU nothing is done, which a notice says.
    Raises ConfigError for what cannot be offloaded, all faults at once; DoesNotFitError when "auto" finds no way.
    """
    if offload_of(model) is None:
        _forget(model)  # what accelerate has undone without us
    faults = Faults()
    with faults.gathering():
        _check_options(offload, ahead)
    with faults.gathering():
        _check_model(model, offload)
    limit = room = None
    with faults.gathering():
        limit = check_stream_options(offload, embeddings_on_host, pin_limit)
    with faults.gathering():
        room = None if head_room is None else parse_bytes(head_room, "head_room")
    placed: dict[str, DeviceId] = {}
    with faults.gathering():
        placed = _placement(model, execution_device)
    faults.check()

    before = getattr(model, "hf_device_map", None)
    if set(placed.values()) == {"cpu"}:
        if offload != "none":
            why = "it computes on the CPU, where its weights are anyway"
            notice("offload-on-cpu", "offload", offload, why, "the model as it is")
        on_cpu = all(tensor.device.type == "cpu" for tensor in model.parameters())
        return _told(model, placed if on_cpu else before, Offload("none", "it computes on the CPU"), before)
    if absent := sorted({d for d in placed.values() if isinstance(d, int) and d >= torch.cuda.device_count()}):
        why = f"torch sees {torch.cuda.device_count()} GPUs here"
        raise config_error("device-missing", "execution_device", absent[0], why, 'Name one that is there, or "cpu"')
    embedding = host_embedding(model) if embeddings_on_host else None
    choice = Choice(offload, embeddings_on_host, "it was asked for")
    if offload == "auto":
        choice = choose_offload(_shares(model, placed, room), ahead=ahead, host_room=_host_room(model))
        embedding = host_embedding(model) if choice.embeddings_on_host else None
    if choice.offload == "stream":
        devices = {name: torch_device(device) for name, device in placed.items()}
        streamed = stream_model(model, devices, ahead=ahead, prefetch=prefetch, embedding=embedding, pin_limit=limit)
        told = Offload("stream", choice.why, streamed.pinned_bytes, streamed.pageable_bytes, streamed)
        return _told(model, placed, told, before)
    return _told(model, placed, _as_accelerate_does(model, placed, choice), before)


def offload_of(model: nn.Module) -> Offload | None:
    """What offload_model did with a model; None when it did nothing, or when that has been undone."""
    told: Offload | None = model.__dict__.get("_verl_shard_offload")
    if told is None or (told.how != "none" and not hooks_of(model)):
        return None
    return told


def is_offloaded(model: nn.Module) -> bool:
    """Whether a model's weights come to the device with every forward."""
    told = offload_of(model)
    return told is not None and told.how != "none"


@contextmanager
def several_calls(*models: nn.Module, each: int | None = None) -> Iterator[None]:
    """Around calls that follow each other: the first blocks are on their way before the first call has its inputs, and what
    waits for a call that does not come is given back at the end. Nothing for a model that is not offloaded.

    each: calls of each model, where they are known: then nothing is copied for one that does not come.
    """
    found = [told for model in models if (told := offload_of(model)) is not None]
    for told in found:
        told.prepare()
        told.expect(each)
    try:
        yield
    finally:
        for told in found:
            told.expect(None)
            told.release()


def undo_offload(model: nn.Module) -> nn.Module:
    """Puts the weights and the hf_device_map back to what they were, and leaves hooks that the model had before. The model
    comes back.

    The weights of a model that is not offloaded stay where they are. Those that were on a GPU need their room there again:
    torch's OutOfMemoryError says where there is none.
    """
    from accelerate.hooks import remove_hook_from_module

    told = offload_of(model)
    if told is not None and told.streamed is not None:
        undo_stream(model)
    elif told is not None and told.how != "none":
        told.release()  # accelerate leaves the model where it is
        remove_hook_from_module(model, recurse=True)
        if told.home is not None:
            model.to(told.home)
    _forget(model)
    return model


def _told(
    model: nn.Module, placed: Mapping[str, Any] | None, told: Offload, before: Mapping[str, Any] | None
) -> nn.Module:
    """The model, which says from now on what was done with it and where it computes."""
    model.__dict__["_verl_shard_offload"] = replace(told, map_before=before)
    if placed is not None:
        model.__dict__["hf_device_map"] = dict(placed)
    return model


def _forget(model: nn.Module) -> None:
    """Leaves a model with the hf_device_map that it had before it was offloaded, or with none."""
    told: Offload | None = model.__dict__.pop("_verl_shard_offload", None)
    if told is None:
        return
    if told.map_before is None:
        model.__dict__.pop("hf_device_map", None)
    elif told.how != "none":  # its weights are where they were; otherwise they are where they were moved to
        model.__dict__["hf_device_map"] = dict(told.map_before)


def _check_options(offload: str, ahead: int) -> None:
    faults = []
    if offload not in WAYS:
        why = "not a way to offload"
        faults.append(Finding("error", "offload", "offload", str(offload), why, f"Use one of {', '.join(WAYS)}"))
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        why = "streaming needs a buffer to copy into"
        faults.append(Finding("error", "ahead", "ahead", str(ahead), why, "Give 1 or more; 2 copies while it computes"))
    if faults:
        raise ConfigError(faults)


def _check_model(model: nn.Module, offload: str) -> None:
    """Raises ConfigError for a model that trains, has no data, is quantized, has no blocks or is offloaded already."""
    name = type(model).__name__
    if any(isinstance(hook, RootHook) for hook in hooks_of(model)):
        fix = "Call it once, or undo_offload(model) before"
        raise config_error("offloaded-before", "model", name, "its blocks are streamed already", fix)
    for module in model.modules():
        for hook in hooks_of(module):
            if getattr(hook, "offload", False) or type(hook).__name__ == "CpuOffload":
                fix = "Undo that first: accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                raise config_error("offloaded-before", "model", name, "accelerate has offloaded it already", fix)
    faults = []
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if offload != "none" and (trains := [key for key, tensor in tensors if tensor.requires_grad]):
        why = f"{len(trains)} of its tensors are trained ({trains[0]} is one), and offloaded weights cannot be"
        fix = "Call model.requires_grad_(False) if it only scores; leave offload out for a model that trains"
        faults.append(Finding("error", "trainable", "model", name, why, fix))
    if empty := [key for key, tensor in tensors if tensor.device.type == "meta"]:
        why = f"{empty[0]} has no data (it is on meta)"
        faults.append(Finding("error", "no-data", "model", name, why, "Load its weights first"))
    if offload in ("stream", "auto"):
        plain = (torch.Tensor, nn.Parameter, nn.Buffer)
        if odd := [key for key, tensor in tensors if type(tensor) not in plain or tensor.layout != torch.strided]:
            why = f"{odd[0]} is no plain tensor: quantized or sharded weights carry more than can be copied as bytes"
            faults.append(Finding("error", "not-plain", "model", name, why, 'Use offload="cpu_offload" or "none"'))
        if not blocks_of(model):
            why = "no list of blocks was found in it, so that there is nothing to stream one by one"
            faults.append(Finding("error", "no-blocks", "model", name, why, 'Use offload="cpu_offload" or "none"'))
    if faults:
        raise ConfigError(faults)


def _placement(model: nn.Module, execution_device: Any) -> dict[str, DeviceId]:
    """A device for each name: that of the map given or applied, or one for all."""
    applied = getattr(model, "hf_device_map", None) or {}
    if len(set(map(str, applied.values()))) > 1:
        placed = {name: parse_device(device, "hf_device_map") for name, device in applied.items()}
        if left := [name for name, device in placed.items() if not isinstance(device, int)]:
            why = f"accelerate keeps {left[0] or 'it'} on {placed[left[0]]}"
            fix = "Load it over GPUs alone, or on the CPU alone"
            raise config_error("offloaded-before", "model", type(model).__name__, why, fix)
        if execution_device is not None and execution_device != applied:
            why = f"the model is dispatched over {len(set(placed.values()))} GPUs already, and blocks are streamed where they are"
            raise config_error("dispatched", "execution_device", execution_device, why, "Leave it out")
        return placed
    if isinstance(execution_device, Mapping):
        placed = {name: parse_device(device, "execution_device") for name, device in execution_device.items()}
        if any(not isinstance(device, int) for device in placed.values()) and len(set(placed.values())) > 1:
            why = "what a map puts on the CPU or disk is not streamed"
            raise config_error("offloaded-map", "execution_device", None, why, "Map it over GPUs alone")
        return placed
    if execution_device is None:
        there = next((tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"), None)
        if there is not None:
            return {"": parse_device(there)}
        return {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}
    device = parse_device(execution_device, "execution_device")
    if device == "disk":
        raise config_error("device", "execution_device", "disk", "nothing computes there", "Name a GPU")
    if str(execution_device) == "cuda" and torch.cuda.is_available():
        device = torch.cuda.current_device()
    return {"": device}


def _as_accelerate_does(model: nn.Module, placed: dict[str, DeviceId], choice: Choice) -> Offload:
    """accelerate's own two ways, or all weights on their device."""
    from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model

    devices = {torch_device(device) for device in placed.values()}
    if choice.offload == "none":
        if len(devices) == 1:
            model.to(devices.pop())
        elif not getattr(model, "hf_device_map", None):
            dispatch_model(model, dict(placed), force_hooks=True)
        return Offload("none", choice.why)
    if len(devices) > 1:
        why = "accelerate's offloading computes on one device"
        raise config_error(
            "one-device", "offload", choice.offload, why, 'Use offload="stream", or one execution_device'
        )
    homes = {tensor.device for tensor in model.parameters()}
    home = homes.pop() if len(homes) == 1 else None
    if choice.offload == "cpu_offload":
        model.to("cpu")
        device = devices.pop()
        cpu_offload(model, device, offload_buffers=True)
        _keep_small_buffers(model, device)
        return Offload("cpu_offload", choice.why, home=home)
    _, hook = cpu_offload_with_hook(model, devices.pop())
    return Offload("cpu_offload_with_hook", choice.why, hook=hook, home=home)


def _keep_small_buffers(model: nn.Module, device: torch.device) -> None:
    """Puts a module's saved buffers back on the GPU, where they are small; streaming leaves them there too.

    accelerate has a module's tensors on the GPU in that module's own forward only. The blocks of DeepSeek-V3 and of the
    mixtures of experts after it read their router's e_score_correction_bias after the router's forward.
    """
    from accelerate.utils import set_module_tensor_to_device

    for module in model.modules():
        saved = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        small = sum(buffer.numel() * buffer.element_size() for buffer in saved.values()) < LARGE_BUFFER
        for hook in hooks_of(module):
            if saved and small and getattr(hook, "offload", False):
                for name in saved:
                    set_module_tensor_to_device(module, name, device, value=hook.weights_map[name])
                hook.offload_buffers = False


def _shares(model: nn.Module, placed: dict[str, DeviceId], head_room: int | None) -> list[Share]:
    """What each GPU of a placement would hold."""
    from verl_shard.runtime.stream_model import shares_of

    made = []
    for share, held in shares_of(model, {name: torch_device(device) for name, device in placed.items()}):
        if head_room is None:
            free, total = torch.cuda.mem_get_info(share.device)
            spare = torch.cuda.memory_reserved(share.device) - torch.cuda.memory_allocated(share.device)
            room = max(int(free + spare + held - _FOR_ACTIVATIONS * total), 0)
        else:
            room = head_room
        made.append(Share(**{**vars(share), "head_room": room}))
    return made


def _host_room(model: nn.Module) -> int | None:
    """Bytes of weights that the host can hold: those it holds of this model, and what is available."""
    available = available_host_memory()
    if available is None:
        return None
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu"}
    return available + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
