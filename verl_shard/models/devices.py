"""Devices as people name them."""

from __future__ import annotations

import torch

from verl_shard.common.errors import config_error

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
