"""check_device_map: what is wrong with a map that somebody wrote by hand, all of it at once."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, Finding, Level
from verl_shard.common.units import format_bytes
from verl_shard.mapping.costs import inference_cost
from verl_shard.mapping.devices import DeviceId, device_label, fault_of_count, parse_device
from verl_shard.mapping.partition import partition
from verl_shard.models.read import read_model
from verl_shard.models.spec import ModelSpec, device_of

_BUILD = "Use build_device_map"
_UNEVEN = 1.25
"""From how much over the fullest GPU of the best map a map is called uneven."""


def check_device_map(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module | ModelSpec,
    device_map: Mapping[str, Any],
    *,
    trainable: bool = False,
    n_gpus: int | None = None,
    task: str | None = None,
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Every fault of a device map; an empty list is a map that loads and runs.

    Errors: something is not a device, a GPU that does not exist, modules without a device, names that the model does
    not have, a key that lies inside another key, a block that is cut in two, tied weights on different devices, and for
    a trainable model entries on the CPU or on disk, which would not be trained. Warnings: such entries on a model that
    is only scored with, which is slow; a path through the model that comes back to a GPU it has left; and a GPU that
    holds more than a quarter more than the fullest GPU of an even map. Each says what it costs, in bytes where it can.

    n_gpus: how many GPUs there are; by default those that torch sees here, and on a machine without any nothing is said
        of numbers.
    model, task, trust_remote_code: as for build_device_map; a model that cannot be read raises ConfigError.
    """
    spec, hidden = _read(model, task, trust_remote_code)
    findings, devices = _parsed(device_map)
    findings += _not_there(devices, n_gpus)
    findings += _unknown(spec, devices)
    findings += _overlapping(devices)
    findings += _missing(spec, devices)
    findings += _cut_blocks(spec, devices)
    findings += _split_ties(spec, devices)
    findings += _offloaded(spec, devices, trainable)
    findings += _back_and_forth(spec, devices, hidden)
    if not any(finding.level == "error" for finding in findings):
        findings += _uneven(spec, devices)
    return findings


def _read(model: Any, task: str | None, trust_remote_code: bool) -> tuple[ModelSpec, int | None]:
    """The spec, and the hidden size where the model says it."""
    if isinstance(model, ModelSpec):
        return model, None
    spec, module = read_model(model, task=task, trust_remote_code=trust_remote_code)
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if isinstance(config, PretrainedConfig) else None
    return spec, getattr(text, "hidden_size", None)


def _finding(code: str, given: object, why: str, fix: str, level: Level = "error") -> Finding:
    return Finding(level, code, "device_map", str(given), why, fix)


def _parsed(device_map: Mapping[str, Any]) -> tuple[list[Finding], dict[str, DeviceId]]:
    findings: list[Finding] = []
    devices: dict[str, DeviceId] = {}
    for name, device in device_map.items():
        try:
            devices[name] = parse_device(device, f"device_map[{name!r}]")
        except ConfigError as error:
            findings.extend(error.findings)
    return findings, devices


def _not_there(devices: Mapping[str, DeviceId], n_gpus: int | None) -> Iterator[Finding]:
    if (fault := fault_of_count(n_gpus, "a map")) is not None:
        raise ConfigError(fault)
    count = torch.cuda.device_count() if n_gpus is None else n_gpus
    if n_gpus is None and count == 0:
        return
    gone = sorted({device for device in devices.values() if isinstance(device, int) and device >= count})
    if gone:
        there = f"{count} GPUs" if count != 1 else "1 GPU"
        known = "0" if count == 1 else f"0 to {count - 1}"
        why = f"there {'is' if count == 1 else 'are'} {there}, numbered {known}; loading would end in an invalid device ordinal"
        yield _finding("no-such-gpu", ", ".join(map(str, gone)), why, f"Use numbers up to {count - 1}. {_BUILD}")


def _unknown(spec: ModelSpec, devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    known: set[str] = set()
    for name in [*spec.order, *(tensor.name for tensor in spec.tensors)]:
        while name and name not in known:
            known.add(name)
            name = name.rpartition(".")[0]
    if unknown := [name for name in devices if name and name not in known]:
        why = f"{spec.architecture} has no module or weight of that name"
        yield _finding("unknown-name", _some(unknown), why, f"Its modules are called {_some(spec.order)}")


def _overlapping(devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    inside = {}
    for name in devices:
        above = name
        while above:
            above = above.rpartition(".")[0]
            if above in devices:
                inside[name] = above
                break
    if inside:
        pairs = _some([f"{name} in {above or 'the whole model'}" for name, above in inside.items()])
        why = "a name lies inside another name, and loaders do not agree which of the two holds"
        yield _finding("overlapping-names", pairs, why, "Name each module once")


def _missing(spec: ModelSpec, devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    without = {tensor.name for tensor in spec.tensors if _device(devices, tensor.name) is None}
    if missing := list(dict.fromkeys(spec.piece_of(name) for name in without)):
        missing.sort(key=spec.order.index)
        size = sum(t.n_bytes for t in spec.tensors if t.name in without and not t.is_alias)
        why = f"the map gives no device for {format_bytes(size)} of the model, which loading needs or fails for"
        yield _finding("missing-modules", _some(missing), why, f"Add {'it' if len(missing) == 1 else 'them'}. {_BUILD}")


def _cut_blocks(spec: ModelSpec, devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    pieces: dict[str, set[DeviceId]] = defaultdict(set)
    before: dict[int, set[DeviceId]] = defaultdict(set)
    for tensor in spec.tensors:
        device, piece, block = _device(devices, tensor.name), spec.piece_of(tensor.name), spec.blocks[tensor.block]
        if device is None:
            continue
        pieces[piece].add(device)
        if block.kind == "embedding" and piece in block.names and not tensor.is_buffer:
            before[tensor.block].add(device)
    if cut := {name: on for name, on in pieces.items() if len(on) > 1}:
        shown = _some([f"{name or 'the model'} on {_labels(on)}" for name, on in cut.items()])
        why = "a piece that runs as one is cut in two; what it adds up lies on both devices, which fails"
        yield _finding("block-cut", shown, why, "Name the block and not what is in it")
    for index, on in before.items():
        if len(on) > 1:
            names = spec.blocks[index].names
            why = "what these compute is added up outside of any module, which fails across devices"
            yield _finding("embedding-cut", f"{_some(names)} on {_labels(on)}", why, "Put them on one device")


def _split_ties(spec: ModelSpec, devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    for tie in spec.ties:
        on = {device for name in tie if (device := _device(devices, name)) is not None}
        if len(on) > 1:
            size = next(t.n_bytes for t in spec.tensors if t.name == tie[0])
            why = (
                f"they are one tensor, and the map puts it on {_labels(on)}: {format_bytes(size)} twice, trained apart"
            )
            yield _finding("tie-split", " = ".join(tie), why, "Put all on one device")


def _offloaded(spec: ModelSpec, devices: Mapping[str, DeviceId], trainable: bool) -> Iterator[Finding]:
    entries = [name or "the whole model" for name, device in devices.items() if isinstance(device, str)]
    all_on_cpu = set(devices.values()) == {"cpu"}
    if not entries or all_on_cpu:
        return
    held = [t for t in spec.tensors if not t.is_alias and isinstance(_device(devices, t.name), str)]
    size = format_bytes(sum(tensor.n_bytes for tensor in held))
    if trainable:
        why = "a module on disk, or on the CPU beside GPUs, is offloaded, and training changes none of its weights"
        yield _finding("offloaded-and-trained", _some(entries), why, "Put it on a GPU")
    else:
        why = f"a module on disk, or on the CPU beside GPUs, is offloaded: {size} of weights travel in every pass"
        yield _finding("offloaded", _some(entries), why, "Put it on a GPU if one has room", "warning")


def _back_and_forth(spec: ModelSpec, devices: Mapping[str, DeviceId], hidden: int | None) -> Iterator[Finding]:
    path: list[DeviceId] = []
    for block in spec.blocks:
        device = _device(devices, block.names[0])
        if device is not None and (not path or path[-1] != device):
            path.append(device)
    if len(path) > len(set(path)):
        n_needed = len(set(path)) - 1
        copied = f" of {format_bytes(1024 * 2 * hidden)} for 1,024 tokens in bf16" if hidden else ""
        why = f"a pass changes devices {len(path) - 1} times, where {n_needed} would do; each waits for a copy{copied}"
        shown = " > ".join(map(str, path[:8])) + (" ..." if len(path) > 8 else "")
        yield _finding("back-and-forth", shown, why, _BUILD, "warning")


def _uneven(spec: ModelSpec, devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    gpus = list(dict.fromkeys(device for device in devices.values() if isinstance(device, int)))
    if len(gpus) < 2 or not spec.n_blocks or len(gpus) < len(set(devices.values())):
        return
    loads = spec.loads(devices)
    fullest = max(gpus, key=lambda gpu: loads[gpu])
    cost = inference_cost(spec, None, None)
    alone = [block.stands_alone for block in spec.blocks]
    runs = partition(len(spec.blocks), cost.of, [None] * len(gpus), stands_alone=alone)
    assert runs is not None, "without limits there is always a split"
    best = max(cost.loads(runs))
    if loads[fullest] > _UNEVEN * best:
        why = f"it holds {format_bytes(loads[fullest])} of weights and buffers, where {format_bytes(best)} would do"
        yield _finding("uneven", device_label(fullest), why, _BUILD, "warning")


def _device(devices: Mapping[str, DeviceId], name: str) -> DeviceId | None:
    try:
        return device_of(devices, name)
    except KeyError:
        return None


def _labels(devices: Iterable[DeviceId | None]) -> str:
    return " and ".join(sorted(device_label(device) for device in devices if device is not None))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
