"""A module with fake tensors: real operations and dtypes, no memory and nothing computed."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_shard.common.notices import notice
from verl_shard.models.packed import PACKED


def without_memory(module: nn.Module, but: Collection[str] = ()) -> nn.Module:
    """A copy of `module` on the meta device that shares no tensor with it; ties stay ties. Weights are not copied.

    but: submodules that are not copied, each with an empty one in its place.
    """
    memo: dict[int, Any] = {id(module.get_submodule(name)): nn.Identity() for name in but}
    for parameter in module.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def fill_with_fakes(
    module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype, kept: re.Pattern[str] | None = None
) -> None:
    """Gives each parameter and buffer of a module on meta a fake tensor in its place.

    Floating-point parameters are of `dtype`, but for those whose name `kept` finds, which are in fp32.

    Fake tensors pretend to be on the CPU: a build of torch without CUDA refuses to differentiate any other.
    """
    made: dict[int, torch.Tensor] = {}
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                    in_fp32 = kept is not None and kept.search(prefix + name)
                    used = (torch.float32 if in_fp32 else dtype) if is_weight else tensor.dtype
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=used)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = fake
                    made[id(fake)] = fake  # a tie is met again under its new identity
                tensors[name] = made[id(tensor)]


def set_attention(module: nn.Module, implementation: str) -> None:
    """Sets the attention of a transformers model. Other fused kernels have the memory of sdpa and are traced as it.

    A model that has no such attention keeps its own, which is said.
    """
    choose = getattr(module, "set_attn_implementation", None)
    if choose is None:
        return
    wanted = "sdpa" if implementation in ("flash_attention_2", PACKED) else implementation
    why = ""
    if not getattr(module, "_can_set_attn_implementation", lambda: True)():
        why = f"{type(module).__name__} has an attention class for each implementation"
    else:
        try:
            choose(wanted)
        except ValueError as error:
            why = " ".join(str(error).split())[:160]
    if why and wanted != "eager":
        notice("attention-not-traced", "attn_implementation", implementation, why, "eager attention for the estimate")


def set_checkpointing(module: nn.Module, on: bool) -> None:
    """Turns gradient checkpointing on (not reentrant) or off. A model without it keeps its activations, which is said."""
    enable: Any = getattr(module, "gradient_checkpointing_enable", None)
    disable: Any = getattr(module, "gradient_checkpointing_disable", None)
    if enable is None or disable is None:
        if on:
            why = f"{type(module).__name__} has no gradient_checkpointing_enable"
            notice("checkpointing-not-traced", "gradient_checkpointing", True, why, "all activations are kept")
        return
    if not on:
        disable()
        return
    try:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        why = " ".join(str(error).split())[:160]
        notice("checkpointing-not-traced", "gradient_checkpointing", True, why, "all activations are kept")
