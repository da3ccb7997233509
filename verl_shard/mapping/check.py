"""check_device_map: what is wrong with a map that somebody wrote by hand, all of it at once."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, Finding, Level
from verl_shard.mapping.devices import DeviceId, device_label, parse_device
from verl_shard.models.read import read_spec
from verl_shard.models.spec import ModelSpec, device_of

_BUILD = "Use build_device_map"


def check_device_map(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module | ModelSpec,
    device_map: Mapping[str, Any],
    *,
    trainable: bool = False,
    task: str | None = None,
    trust_remote_code: bool = False,
) -> list[Finding]:
    """Every fault of a device map; an empty list is a map that loads and runs.

    Errors: something is not a device, modules without one, names that the model does not have, a key that lies inside
    another key, a block that is cut in two, tied weights on different devices, and for a trainable model entries on
    the CPU or on disk, which would not be trained. Warnings: such entries on a model that is only scored with, which is
    slow, and a path through the model that comes back to a GPU it has left.

    model, task, trust_remote_code: as for build_device_map; a model that cannot be read raises ConfigError.
    """
    spec = read_spec(model, task=task, trust_remote_code=trust_remote_code)
    findings, devices = _parsed(device_map)
    findings += _unknown(spec, devices)
    findings += _overlapping(devices)
    findings += _missing(spec, devices)
    findings += _cut_blocks(spec, devices)
    findings += _split_ties(spec, devices)
    findings += _offloaded(devices, trainable)
    findings += _back_and_forth(spec, devices)
    return findings


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
        why = "the map gives no device for part of the model"
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
            why = f"they are one tensor, and the map puts it on {_labels(on)}"
            yield _finding("tie-split", " = ".join(tie), why, "Put all on one device")


def _offloaded(devices: Mapping[str, DeviceId], trainable: bool) -> Iterator[Finding]:
    entries = [name or "the whole model" for name, device in devices.items() if isinstance(device, str)]
    all_on_cpu = set(devices.values()) == {"cpu"}
    if not entries or all_on_cpu:
        return
    if trainable:
        why = "a module on disk, or on the CPU beside GPUs, is offloaded, and training changes none of its weights"
        yield _finding("offloaded-and-trained", _some(entries), why, "Put it on a GPU")
    else:
        why = "a module on disk, or on the CPU beside GPUs, is offloaded: its weights travel in every pass"
        yield _finding("offloaded", _some(entries), why, "Put it on a GPU if one has room", "warning")


def _back_and_forth(spec: ModelSpec, devices: Mapping[str, DeviceId]) -> Iterator[Finding]:
    path: list[DeviceId] = []
    for block in spec.blocks:
        device = _device(devices, block.names[0])
        if device is not None and (not path or path[-1] != device):
            path.append(device)
    if len(path) > len(set(path)):
        n_needed = len(set(path)) - 1
        why = f"a pass changes devices {len(path) - 1} times, where {n_needed} would do; each waits for a copy"
        shown = " > ".join(map(str, path[:8])) + (" ..." if len(path) > 8 else "")
        yield _finding("back-and-forth", shown, why, _BUILD, "warning")


def _device(devices: Mapping[str, DeviceId], name: str) -> DeviceId | None:
    try:
        return device_of(devices, name)
    except KeyError:
        return None


def _labels(devices: Iterable[DeviceId | None]) -> str:
    return " and ".join(sorted(device_label(device) for device in devices if device is not None))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
