"""Where the inputs of a laid-out model go in, and where its outputs are."""

from __future__ import annotations

from typing import Any

import torch

from verl_shard.models.devices import torch_device
from verl_shard.models.spec import device_of


def input_device(model: torch.nn.Module) -> torch.device:
    """The device of the input embedding, where token ids belong; of an offloaded model, where it computes."""
    from verl_shard.runtime.offload import is_offloaded

    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    if is_offloaded(model):  # its weights are on the host, or on meta, and visit the device
        applied: Any = model.hf_device_map
        placed = {name: torch_device(device) for name, device in applied.items()}
        path = next((name for name, module in model.named_modules() if module is embedding), None)
        return next(iter(placed.values())) if path is None else device_of(placed, f"{path}.weight")
    weight = next(embedding.parameters()) if embedding is not None else next(model.parameters())
    return weight.device


def keep_outputs_in_place(model: torch.nn.Module) -> None:
    """Leaves the outputs of a model that accelerate dispatched on the device that made them.

    accelerate's root hook copies them back to the inputs' device: tokens x vocabulary logits over the link, and
    a second copy of them on the first GPU, which then also has to hold the loss.
    """
    hook = getattr(model, "_hf_hook", None)
    if hook is not None and hasattr(hook, "io_same_device"):
        hook.io_same_device = False
