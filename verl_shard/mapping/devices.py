"""Devices as people name them, and what was asked for of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import parse_bytes
from verl_shard.models.devices import DeviceId, device_label, parse_device, torch_device

__all__ = ["DeviceId", "choose_devices", "device_label", "parse_caps", "parse_device", "torch_device"]


def choose_devices(n_gpus: int | None, devices: Iterable[object] | str | None) -> tuple[DeviceId, ...]:
    """The devices to map over: `devices` in their order, or the first `n_gpus`, or all GPUs that torch sees.

    "process" is this process's share of them under torchrun or accelerate launch.

    Raises ConfigError with every fault: no GPU, a count below one, a device named twice, a mix of GPUs and the CPU,
    and a count and a list that contradict each other.
    """
    faults: list[Finding] = []
    if (fault := fault_of_count(n_gpus, "a model")) is not None:
        faults.append(fault)
        n_gpus = None
        if devices is None:
            raise ConfigError(faults)
    if devices is None:
        visible = torch.cuda.device_count() if n_gpus is None else n_gpus
        if visible == 0:
            fix = 'Say how many to plan for, such as n_gpus=4; or map to the CPU with devices=["cpu"]'
            raise ConfigError(_fault("no-gpu", "n_gpus", None, "torch sees no GPU on this machine", fix))
        return tuple(range(visible))
    if devices == "process":
        return _share_of_process(n_gpus)

    listed = [devices] if isinstance(devices, str) else list(devices)
    chosen: list[DeviceId] = []
    for device in listed:
        try:
            chosen.append(parse_device(device))
        except ConfigError as error:
            faults.extend(error.findings)
    shown = f"[{', '.join(map(str, listed))}]"
    if not listed:
        faults.append(
            _fault("no-devices", "devices", shown, "the list is empty", "Name at least one GPU, or leave it out")
        )
    if len(set(chosen)) != len(chosen):
        twice = ", ".join(str(device) for device in dict.fromkeys(chosen) if chosen.count(device) > 1)
        faults.append(
            _fault("device-twice", "devices", shown, f"{twice} is named more than once", "Name each GPU once")
        )
    if "disk" in chosen or ("cpu" in chosen and len(chosen) > 1):
        why = "what is mapped to the CPU or to disk beside GPUs would be offloaded, and never trained"
        faults.append(_fault("offload", "devices", shown, why, 'Name GPUs only, or ["cpu"] alone'))
    if n_gpus is not None and listed and n_gpus != len(listed):
        why = f"n_gpus is {n_gpus} and {len(listed)} devices are named"
        faults.append(_fault("n-gpus-and-devices", "devices", shown, why, "Leave n_gpus out"))
    if faults:
        raise ConfigError(faults)
    return tuple(chosen)


def fault_of_count(n_gpus: object, of: str) -> Finding | None:
    """What is wrong with a number of GPUs; None of them is all that there are. of: what needs them, "a model"."""
    if n_gpus is None:
        return None
    if isinstance(n_gpus, bool) or not isinstance(n_gpus, int):
        why = f"it is no whole number but of the type {type(n_gpus).__name__}"
        return _fault("n-gpus", "n_gpus", repr(n_gpus), why, "Give a whole number, such as 4, or leave it out")
    if n_gpus < 1:
        return _fault("n-gpus", "n_gpus", n_gpus, f"{of} needs at least one GPU", "Give 1 or more, or leave it out")
    return None


def _share_of_process(n_gpus: int | None) -> tuple[DeviceId, ...]:
    """The GPUs of this process: those of the machine in equal runs, by LOCAL_RANK and LOCAL_WORLD_SIZE.

    Without a launcher it is one process, which has all. Raises ConfigError when there are fewer GPUs than processes,
    and when they cannot be shared out evenly: the processes would not have the same map.
    """
    visible = torch.cuda.device_count() if n_gpus is None else n_gpus
    where = 'devices="process"'
    texts = {name: os.environ.get(name, default) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))}
    if wrong := [f"{name}={text}" for name, text in texts.items() if not text.isdecimal()]:
        fix = "Start with torchrun or accelerate launch, or unset both"
        raise ConfigError(_fault("launcher-environment", where, ", ".join(wrong), "not a number", fix))
    rank, processes = int(texts["LOCAL_RANK"]), int(texts["LOCAL_WORLD_SIZE"])
    given = f"{visible} GPUs, {processes} processes, this is number {rank}"
    if rank >= processes:
        fix = "LOCAL_RANK counts from 0; start with torchrun or accelerate launch, which set both"
        raise ConfigError(_fault("launcher-environment", where, given, "LOCAL_RANK is not below LOCAL_WORLD_SIZE", fix))
    share, rest = divmod(visible, processes)
    if share == 0:
        why = "each process needs a GPU of its own" if visible else "torch sees no GPU on this machine"
        raise ConfigError(_fault("gpus-per-process", where, given, why, f"Start {max(visible, 1)} or fewer processes"))
    if rest:
        fits = [n for n in range(1, visible + 1) if visible % n == 0]
        why = f"{visible} is not a multiple of {processes}"
        fix = f"Start {', '.join(map(str, fits))} processes, or hide {rest} with CUDA_VISIBLE_DEVICES"
        raise ConfigError(_fault("gpus-per-process", where, given, why, fix))
    return tuple(range(rank * share, (rank + 1) * share))


def parse_caps(max_memory: Mapping[Any, int | str] | None, devices: tuple[DeviceId, ...]) -> tuple[int | None, ...]:
    """The bytes that each of `devices` may hold; None is no limit, and so is a device that `max_memory` leaves out.

    Raises ConfigError for a size that is none, for a device that is not mapped over, and for "cpu" or "disk" beside
    GPUs: nothing is ever offloaded by a map.
    """
    faults: list[Finding] = []
    caps: dict[DeviceId, int] = {}
    for key, size in (max_memory or {}).items():
        where = f"max_memory[{key!r}]"
        try:
            device = parse_device(key, where)
            caps[device] = parse_bytes(size, where)
        except ConfigError as error:
            faults.extend(error.findings)
            continue
        if device not in devices:
            named = ", ".join(map(str, devices))
            offload = isinstance(device, str)
            why = "a map never offloads" if offload else f"the map is made over {named}"
            faults.append(
                _fault(
                    "cap-without-device",
                    where,
                    size,
                    why,
                    "Leave it out" if offload else "Add it to devices, or leave it out",
                )
            )
    if faults:
        raise ConfigError(faults)
    return tuple(caps.get(device) for device in devices)


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, "" if given is None else str(given), why, fix)
