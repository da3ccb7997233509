"""Where the inputs of a laid-out model go in, and where its outputs are."""

from __future__ import annotations

import torch


def input_device(model: torch.nn.Module) -> torch.device:
    """The device of the input embedding, where token ids belong."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if find is not None else None
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
