"""What was asked for against what is there, after a model is loaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn

from verl_shard.common.errors import RunError
from verl_shard.mapping.devices import DeviceId, device_label, torch_device
from verl_shard.models.spec import device_of


def misplaced(model: nn.Module, device_map: Mapping[str, DeviceId]) -> list[str]:
    """Every parameter and buffer that is not where the map says, is on meta, or is offloaded; one line each."""
    wrong = []
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        try:
            wanted = device_of(device_map, name)
        except KeyError:
            wrong.append(f"{name} is on {tensor.device}, and the map does not name it")
            continue
        if tensor.device.type == "meta":
            wrong.append(f"{name} has no data (it is on meta), and the map says {device_label(wanted)}")
        elif tensor.device != torch_device(wanted):
            wrong.append(f"{name} is on {tensor.device}, and the map says {device_label(wanted)}")
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(part, "offload", False) for part in getattr(hook, "hooks", [hook])):
            wrong.append(f"{name or 'the model'} is offloaded")
    return wrong


def check_placement(model: nn.Module, device_map: Mapping[str, DeviceId]) -> None:
    """Raises RunError that lists what differs from the map; silent when nothing does."""
    if wrong := misplaced(model, device_map):
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        listed = "\n  ".join(wrong[:10])
        raise RunError(f"The device map was not applied to {type(model).__name__}:\n  {listed}{more}")


def check_checkpointing(model: nn.Module) -> None:
    """Raises RunError unless every module that can checkpoint does so, and not in the reentrant way."""
    able = {name: module for name, module in model.named_modules() if hasattr(module, "gradient_checkpointing")}
    off = [name for name, module in able.items() if module.gradient_checkpointing is not True]
    reentrant = [name for name, module in able.items() if name not in off and not _is_non_reentrant(module)]
    if off or reentrant or not able:
        what = f"off in {off[:5]}" if off else f"reentrant in {reentrant[:5]}" if reentrant else "known to no module"
        raise RunError(f"Gradient checkpointing was turned on in {type(model).__name__} and is {what}")


def _is_non_reentrant(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    if not isinstance(function, functools.partial):
        return False
    return function.func is torch.utils.checkpoint.checkpoint and function.keywords.get("use_reentrant") is False
