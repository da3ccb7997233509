"""dispatch_model: a model over several devices that can work at the same time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.mapping.check import check_device_map
from verl_shard.mapping.devices import DeviceId, parse_device, torch_device
from verl_shard.models.read import read_model
from verl_shard.models.spec import device_of
from verl_shard.runtime.pipeline_hooks import PassHook, RootHook, StageHook, Travels
from verl_shard.runtime.pipeline_links import GpuLinks, Links
from verl_shard.runtime.stream_hooks import attach, detach, hooks_of, own_tensors
from verl_shard.runtime.verify import check_placement

_log = logging.getLogger(__name__)

_OURS = (StageHook, PassHook)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    *,
    output_device: str | int | torch.device = "last",
    skip_keys: str | Iterable[str] | None = None,
    main_device: str | int | torch.device | None = None,
    force_hooks: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Any = None,
    offload_index: Any = None,
    offload_buffers: bool = False,
    preload_module_classes: Iterable[str] | None = None,
    links: Links | None = None,
) -> nn.Module:
    """Lays a model over the devices of a map, so that they can work at the same time; as accelerate's dispatch_model, whose
    hooks it replaces. The model comes back, changed in place.

    Tensors that go from one GPU to another travel on streams of their own, each once for each forward pass, gradients the
    same way back: no GPU waits for another longer than it needs its data. Then several micro-batches that are issued one
    behind the other overlap; run_micro_batches does that.

    device_map: of names to devices, from build_device_map or as accelerate takes them; checked with check_device_map.
        One device only: the model is moved there, and has no hooks.
    output_device: "last" leaves outputs where they are made, "first" brings them to where the inputs go; or a device.
    skip_keys: names of inputs and outputs that stay where they are; by default those that transformers says.
    main_device: accelerate's, where inputs go: the device of the input embedding, no other.
    force_hooks: hooks on one device too, which then takes its inputs from anywhere.
    links: for tests: what copies between devices.

    state_dict, offload_dir, offload_index, offload_buffers and preload_module_classes are accelerate's, for weights that
    are offloaded, and refused: offload_model does that.
    Inputs that a loss compares with outputs (labels) go to the head's device. Weights that are where they belong stay, and
    ties stay ties. accelerate.hooks.remove_hook_from_module(model, recurse=True) takes the hooks away.
    Raises ConfigError with all that is wrong; RunError when a weight is not where it should be in the end.
    """
    faults = Faults()
    offloading = {
        "state_dict": state_dict, "offload_dir": offload_dir, "offload_index": offload_index,
        "offload_buffers": offload_buffers or None, "preload_module_classes": preload_module_classes,
    }  # fmt: skip
    for name, value in offloading.items():
        if value is not None:
            why = "it is about weights that are offloaded, and this keeps all on their devices"
            given = value if isinstance(value, bool | str) else "given"
            faults.findings.append(
                Finding("error", "offload-argument", name, str(given), why, "Leave it out, or use offload_model")
            )
    with faults.gathering():
        _check_model(model)
    placed: dict[str, DeviceId] = {}
    with faults.gathering():
        placed = check_map(model, device_map, real=links is None)
    out: DeviceId | None = None
    with faults.gathering():
        out = _output(output_device)
    faults.check()

    devices = tuple(dict.fromkeys(placed.values()))
    spec, _ = read_model(model)
    of_blocks = spec.devices_of(placed)
    first, last = of_blocks[0], of_blocks[-1] if spec.head is None else device_of(placed, spec.head)
    before_head = None if spec.head is None else device_of(placed, spec.order[spec.order.index(spec.head) - 1])
    if main_device is not None and parse_device(main_device, "main_device") != first:
        why = f"inputs go where the input embedding is, on {first}"
        raise config_error("main-device", "main_device", main_device, why, "Leave it out, or map the embedding there")

    if links is None:
        _check_plain(model, placed)
    used = GpuLinks() if links is None else links
    detach(list(model.modules()), (*_OURS, AlignDevicesHook))
    for name, tensor in _tensors(model):
        used.place(tensor, used.device(device_of(placed, name)))
    if links is None:
        check_placement(model, placed)
    if len(devices) > 1 or force_hooks:
        order = sorted(devices, key=of_blocks.index)
        target = first if output_device == "first" else out
        ends = (first, last if before_head is None else before_head, last)
        _attach_hooks(model, placed, used, _skipped(model, skip_keys), ends, target, order)
    model.hf_device_map = dict(placed)  # type: ignore[assignment]
    return model


def pipeline_of(model: nn.Module) -> RootHook | None:
    """The root hook of what dispatch_model laid over several devices, in whatever it is wrapped; None of other models."""
    for module in model.modules():
        for hook in hooks_of(module):
            if isinstance(hook, RootHook):
                return hook
    return None


def _check_model(model: nn.Module) -> None:
    """Raises ConfigError for a model that is offloaded or has tensors without data."""
    name = type(model).__name__
    for module in model.modules():
        for hook in hooks_of(module):
            ours = type(hook).__module__ == "verl_shard.runtime.stream_hooks"
            if ours or getattr(hook, "offload", False) or type(hook).__name__ == "CpuOffload":
                fix = "Undo that first: accelerate.hooks.remove_hook_from_module(model, recurse=True)"
                raise config_error("offloaded-before", "model", name, "its weights are offloaded", fix)
    if empty := next((key for key, tensor in _tensors(model) if tensor.device.type == "meta"), None):
        why = f"{empty} has no data (it is on meta)"
        raise config_error("no-data", "model", name, why, "Load its weights first")


def _check_plain(model: nn.Module, placed: Mapping[str, DeviceId]) -> None:
    """Raises ConfigError for a quantized or sharded weight that would have to move: it is more than its data."""
    plain = (torch.Tensor, nn.Parameter, nn.Buffer)
    for name, tensor in _tensors(model):
        if type(tensor) not in plain and tensor.device != torch_device(device_of(placed, name)):
            why = f"{name} is a {type(tensor).__name__} on {tensor.device}, which cannot be moved as plain data"
            raise config_error("not-plain", "model", type(model).__name__, why, "Load it with this device map")


def check_map(model: nn.Module, device_map: Any, *, real: bool) -> dict[str, DeviceId]:
    """The map with devices parsed; its errors are raised, its warnings logged."""
    if not isinstance(device_map, Mapping):
        why = "not a map of names to devices"
        raise config_error("not-a-device-map", "device_map", device_map, why, "Use build_device_map")
    try:
        several = len({parse_device(device) for device in device_map.values()}) > 1
    except ConfigError:
        several = False  # said below, for each name
    findings = check_device_map(model, device_map)
    faults = [f for f in findings if f.level == "error" or (f.code == "offloaded" and several)]
    if faults:
        raise ConfigError(faults)
    for finding in findings:
        if finding.code != "offloaded":
            _log.warning("%s", finding)
    placed = {name: parse_device(device) for name, device in device_map.items()}
    absent = sorted({d for d in placed.values() if isinstance(d, int) and d >= torch.cuda.device_count()})
    if real and absent:
        why = f"it names GPU {', '.join(map(str, absent))}, and torch sees {torch.cuda.device_count()} GPUs here"
        raise config_error("device-missing", "device_map", None, why, "Use GPUs that are there")
    if "disk" in placed.values():
        raise config_error("offloaded", "device_map", "disk", "nothing computes there", "Use offload_model, or GPUs")
    return placed


def _output(output_device: str | int | torch.device) -> DeviceId | None:
    if output_device in ("last", "first"):
        return None
    try:
        return parse_device(output_device, "output_device")
    except ConfigError:
        fix = 'Write "last", "first", or a device such as 1 or "cuda:1"'
        raise config_error("not-a-device", "output_device", output_device, "not a device", fix) from None


def _skipped(model: nn.Module, skip_keys: str | Iterable[str] | None) -> frozenset[str]:
    """By default transformers' own: a cache has the layers' tensors where the layers are."""
    given: Any = getattr(model, "_skip_keys_device_placement", None) if skip_keys is None else skip_keys
    return frozenset([given] if isinstance(given, str) else given or ())


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, one that has several names under the first."""
    seen: set[int] = set()
    for path, _, name, tensor in own_tensors(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"{path}.{name}" if path else name, tensor


def _attach_hooks(
    model: nn.Module,
    placed: Mapping[str, DeviceId],
    links: Links,
    skip: frozenset[str],
    ends: tuple[DeviceId, DeviceId, DeviceId],
    output: DeviceId | None,
    order: list[DeviceId],
) -> None:
    """ends: the devices of the embedding, of what runs before the head, and of the head."""
    travels = Travels(links)
    devices = tuple(links.device(name) for name in order)
    begin, hidden, end = (links.device(device) for device in ends)
    for module, device in _called(model, placed):
        attach(module, StageHook(travels, links.device(device), skip))
    body = getattr(model, getattr(model, "base_model_prefix", "") or "_", None)
    has_body = isinstance(body, nn.Module) and body is not model
    if isinstance(body, nn.Module) and has_body:
        attach(body, PassHook(travels, begin, begin, None, skip, devices))
    # A classifier looks for the last token of each sequence in its inputs, where its scores are.
    pools = has_body and "ForSequenceClassification" in type(model).__name__
    to = None if output is None else links.device(output)
    attach(model, RootHook(travels, end if pools else begin, end, to, skip, devices, hidden))


def _called(model: nn.Module, placed: Mapping[str, DeviceId]) -> Iterator[tuple[nn.Module, DeviceId]]:
    """Modules of the map that are called: of a list its members. The whole model has a hook of its own."""
    named = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = {id(model)}

    def visit(module: nn.Module, device: DeviceId) -> Iterator[tuple[nn.Module, DeviceId]]:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            for child in module.children():
                yield from visit(child, device)
        elif id(module) not in seen:
            seen.add(id(module))
            yield module, device

    for name, device in placed.items():
        if name in named:
            yield from visit(named[name], device)
