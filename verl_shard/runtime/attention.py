"""Which attention implementation can run here, and what stands in for one that cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PretrainedConfig

from verl_shard.common.errors import config_error
from verl_shard.common.notices import notice
from verl_shard.mapping.devices import DeviceId
from verl_shard.models.dtypes import dtype_name

FLASH = "flash_attention_2"
IMPLEMENTATIONS = (FLASH, "sdpa", "eager", "flash_attention_3", "flash_attention_4", "flex_attention")

# What https://github.com/Dao-AILab/flash-attention names as supported: Ampere or newer, heads up to 256, fp16 and bf16.
_OLDEST_CARD = (8, 0)
_LARGEST_HEAD = 256


def why_not_flash_attention(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    devices: Iterable[DeviceId],
    autocast_dtype: torch.dtype | None = None,
    model_class: type | None = None,
) -> str | None:
    """The first reason for which flash_attention_2 cannot run a model here, or None when it can.

    dtype: of the weights. autocast_dtype: what the forward pass is autocast to, None for no autocast.
    devices: where the model goes; every GPU among them must be able to run it.
    model_class: the class of the model, whose word on what it supports is asked for.
    """
    if model_class is not None and not getattr(model_class, "_supports_flash_attn", False):
        return f"{model_class.__name__} does not support it"
    if importlib.util.find_spec("flash_attn") is None:
        return 'the package flash_attn is not installed (pip install "verl_shard[flash-attn]")'
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU here"
    on = list(devices)
    if not all(isinstance(device, int) for device in on):
        return "it runs on CUDA GPUs only, and the model is mapped to the CPU"
    for device in on:
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST_CARD:
            name = torch.cuda.get_device_name(device)
            return f"GPU {device} ({name}) has compute capability {capability[0]}.{capability[1]}, and it needs 8.0"
    for key, size in head_sizes(config).items():
        if size > _LARGEST_HEAD:
            return f"heads have {size} dimensions ({key}), and its kernels take at most {_LARGEST_HEAD}"
        if size % 8:
            return f"heads have {size} dimensions ({key}), and its kernels take multiples of 8"
    used = autocast_dtype if dtype == torch.float32 and autocast_dtype is not None else dtype
    if used not in (torch.float16, torch.bfloat16):
        return f"weights are {dtype_name(dtype)} without autocast, and it takes float16 or bfloat16"
    return None


def head_sizes(config: PretrainedConfig) -> dict[str, int]:
    """Sizes of an attention head by the configuration's own names for them."""
    text = config.get_text_config()
    named = {
        key: size
        for key in ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
        if isinstance(size := getattr(text, key, None), int)
    }
    if named:
        return named
    hidden, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    return {"hidden_size / num_attention_heads": hidden // heads} if hidden and heads else {}


def choose_attention(
    asked: str | None,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    devices: Iterable[DeviceId],
    autocast_dtype: torch.dtype | None = None,
    model_class: type | None = None,
    strict: bool = False,
) -> str:
    """The implementation to load with: `asked` if it can run, else "sdpa", else "eager", which one notice says.

    strict: raise ConfigError with the reason instead of taking another one.
    None asks for the best that torch itself brings, without a notice. Names of kernels on the hub ("owner/name") and
    the other flash versions are handed on as they are: transformers checks them. Raises ConfigError for unknown names.
    """
    has_sdpa = model_class is None or bool(getattr(model_class, "_supports_sdpa", False))
    fallback = "sdpa" if has_sdpa else "eager"
    if asked is None:
        return fallback
    if asked not in IMPLEMENTATIONS and "/" not in asked:
        choices = ", ".join(f'"{name}"' for name in IMPLEMENTATIONS)
        raise config_error("unknown-attention", "attn_implementation", asked, "not known", f"Use one of {choices}")
    reason: str | None = None
    if asked == FLASH:
        reason = why_not_flash_attention(
            config, dtype=dtype, devices=devices, autocast_dtype=autocast_dtype, model_class=model_class
        )
    elif asked == "sdpa" and not has_sdpa:
        reason = f"{_name(model_class)} does not support it"
    if reason is None:
        return asked
    if strict:
        fix = f'Ask for attn_implementation="{fallback}", or leave strict out'
        raise config_error("attention-unavailable", "attn_implementation", asked, reason, fix)
    notice("attention-unavailable", "attn_implementation", asked, reason, fallback)
    return fallback


def _name(model_class: Any) -> str:
    return getattr(model_class, "__name__", "the model")
