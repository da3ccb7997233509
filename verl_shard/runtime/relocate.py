"""A loaded model to other devices, its optimizer's state with it: as if it had been there from the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.units import format_bytes
from verl_shard.mapping.devices import DeviceId, device_label
from verl_shard.models.spec import device_of
from verl_shard.runtime.ladder import give_memory_back
from verl_shard.runtime.pipeline import check_map, dispatch_model
from verl_shard.runtime.pipeline_links import GpuLinks, Links


def move_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    links: Links | None = None,
) -> None:
    """Lays a model over the devices of another map, in place and as dispatch_model does; weights stay the same objects.

    optimizer: of its weights; its states go where their weights go. To be called between two steps.
    links: for tests: what copies between devices.
    Raises ConfigError for a map that cannot be meant and DoesNotFitError for GPUs that have too little free, before
    anything moves.
    """
    placed = check_map(model, device_map, real=links is None)
    states = dict(_states(model, optimizer, placed))
    if links is None:
        _check_room(model, placed, states)
    used = GpuLinks() if links is None else links
    dispatch_model(model, placed, links=links)
    for tensor, device in states.values():
        used.place(tensor, used.device(device))
    if links is None:
        give_memory_back()


def _states(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, placed: Mapping[str, DeviceId]
) -> Iterator[tuple[int, tuple[torch.Tensor, DeviceId]]]:
    """The optimizer's tensors and where they go. Counts of steps stay on the host, unless kernels read them."""
    if optimizer is None:
        return
    devices = {id(param): device_of(placed, name) for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for param in group["params"]:
            for value in optimizer.state.get(param, {}).values():
                if isinstance(value, torch.Tensor) and (value.dim() > 0 or on_device):
                    yield id(value), (value, devices[id(param)])


def _check_room(
    model: nn.Module, placed: Mapping[str, DeviceId], states: Mapping[int, tuple[torch.Tensor, DeviceId]]
) -> None:
    coming: Counter[int] = Counter()
    own = [(tensor, device_of(placed, name)) for name, tensor in _named_tensors(model)]
    for tensor, device in [*own, *states.values()]:
        gradient = tensor.grad if tensor.is_leaf else None
        for one in (tensor, gradient):
            if one is not None and isinstance(device, int) and one.device != torch.device("cuda", device):
                coming[device] += one.numel() * one.element_size()
    short = []
    for device, needed in sorted(coming.items()):
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if needed > free + cached:
            name = device_label(device)
            short.append(f"{name} has {format_bytes(free + cached)} free for {format_bytes(needed)} that would come")
    if short:
        raise DoesNotFitError(
            f"{type(model).__name__} cannot move: {'; '.join(short)}. Name more GPUs, or move something else away first."
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
