"""Models under LoRA adapters, without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import MissingExtraError, config_error
from verl_shard.memory.fake_model import without_memory
from verl_shard.memory.passes import PassSpec
from verl_shard.models.read import spec_of_module
from verl_shard.models.spec import ModelSpec


def with_lora(spec: ModelSpec, module: nn.Module, wanted: PassSpec) -> tuple[ModelSpec, nn.Module]:
    """The model under adapters on all its linear layers, as peft makes them."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingExtraError("lora_rank", "verl", "peft") from error
    base: Any = without_memory(module)
    if not isinstance(getattr(base, "config", None), PretrainedConfig):
        raise config_error(
            "no-lora", "lora_rank", wanted.lora_rank, "adapters go on transformers models", "Leave it out"
        )
    config = LoraConfig(r=wanted.lora_rank, target_modules="all-linear")
    with torch.device("meta"):
        adapted: Any = get_peft_model(base, config, low_cpu_mem_usage=True)
    if wanted.gradient_checkpointing:
        adapted.enable_input_require_grads()
    return spec_of_module(adapted, name=spec.name, task=spec.task, dtype=wanted.weight_dtype), adapted
