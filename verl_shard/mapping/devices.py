"""Devices as people name them, and what was asked for of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.common.units import parse_bytes

DeviceId = int | str
"""An int is a GPU, the ordinal torch sees in this process. "cpu" and "disk" are the only texts."""


def parse_device(value: object, where: str = "devices") -> DeviceId:
    """2, "2", "cuda:2" and torch.device("cuda:2") are 2; "cuda" is 0; "cpu" and "disk" stay. ConfigError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str | torch.device):
        text = str(value).strip().lower()
        if text in ("cpu", "disk"):
            return text
        ordinal = "0" if text == "cuda" else text.removeprefix("cuda:")
        if ordinal.isdecimal():
            return int(ordinal)
    fix = 'Write the number of a GPU as torch counts them, such as 0 or "cuda:0", or "cpu"'
    raise config_error("not-a-device", where, value, "not a device", fix)


def torch_device(device: DeviceId) -> torch.device:
    """What torch calls it."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def device_label(device: DeviceId) -> str:
    """What people call it."""
    return f"GPU {device}" if isinstance(device, int) else device


def choose_devices(n_gpus: int | None, devices: Iterable[object] | str | None) -> tuple[DeviceId, ...]:
    """The devices to map over: `devices` in their order, or the first `n_gpus`, or all GPUs that torch sees.

    Raises ConfigError with every fault: no GPU, a count below one, a device named twice, a mix of GPUs and the CPU,
    and a count and a list that contradict each other.
    """
    faults: list[Finding] = []
    if n_gpus is not None and (isinstance(n_gpus, bool) or not isinstance(n_gpus, int) or n_gpus < 1):
        faults.append(
            _fault("n-gpus", "n_gpus", n_gpus, "a model needs at least one GPU", "Give 1 or more, or leave it out")
        )
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
        fix = "List this process's GPUs, such as devices=[2, 3]"
        raise ConfigError(
            [*faults, _fault("not-built-yet", "devices", devices, "a share for each process is not built yet", fix)]
        )

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
