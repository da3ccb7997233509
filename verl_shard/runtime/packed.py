"""Packed rows under sdpa without a mask of tokens x tokens: each sequence of the row attends to itself alone.

transformers keeps the sequences of a packed row apart with a boolean mask of T x T (268 MB for 16 x 1024 tokens), under which
sdpa cannot use its flash kernel and repeats keys and values for grouped heads. torch has that kernel for packed rows too
(torch.nn.attention.varlen). Here it is an attention implementation of transformers; where the boundaries of sequences would
have to be found on the GPU, the host says them, which spares a wait in each layer - of flash_attention_2 as well.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl_shard.models.packed import PACKED, why_not_packed

# Of torch's flash kernel (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
_OLDEST_CARD = (8, 0)
_LARGEST_HEAD = 256


def packed_inputs(
    lengths: Sequence[int], device: torch.device | str, *, attn_implementation: str | None
) -> dict[str, Any]:
    """Keywords for a model's forward that say where the sequences of its one packed row end.

    lengths: tokens of each sequence, on the host; their sum is the row's length. Empty for an implementation that finds
    the boundaries by itself, from position_ids. Nothing here waits for a GPU.
    """
    if attn_implementation not in (PACKED, "flash_attention_2", "flash_attention_3"):
        return {}
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if torch.device(device).type == "cuda":
        ends = ends.pin_memory().to(device, non_blocking=True)
    longest = max(lengths)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    # A mask of four dimensions is handed to the layers as it is: the boundaries take its place.
    return told | {"attention_mask": ends.view(1, 1, 1, -1)} if attn_implementation == PACKED else told


def use_packed_sdpa(model: nn.Module) -> bool:
    """Lets a model that computes with sdpa take packed rows without a mask; whether it does so now.

    Its implementation is then named PACKED, which is sdpa for inputs that are not packed.
    """
    config: Any = model.config
    if config._attn_implementation != "sdpa" or why_not_packed(model) is not None:
        return False
    _register()
    switch: Any = model
    switch.set_attn_implementation(PACKED)
    return True


def _register() -> None:
    AttentionInterface.register(PACKED, packed_sdpa)
    AttentionMaskInterface.register(PACKED, sdpa_mask)


def packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row, as transformers calls it: (1, heads, T, head size) to (1, T, heads, head size).

    attention_mask: the ends of the sequences, int32, as packed_inputs has them; any other is sdpa's.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        arguments: Any = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
        plain: Any = sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **arguments
        )
        return plain  # type: ignore[no-any-return]
    ends = attention_mask.view(-1)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if (kernel := _kernel()) is not None and dropout == 0.0 and _fits(query, value):
        longest = max_length_q if max_length_q is not None else int(ends.diff().max())
        window = (-1 if sliding_window is None else sliding_window - 1, 0 if causal else -1)
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        return kernel(*rows, ends, ends, longest, longest, scale=scaling, window_size=window)[None], None
    lengths = ends.diff().tolist()
    apart = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    parts = [
        _alone(*one, dropout=dropout, scale=scaling, causal=causal, window=sliding_window)
        for one in zip(*apart, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Attention of one sequence; only one that is longer than the window has a mask."""
    n, mask = query.shape[2], None
    if window is not None and n > window:
        apart = torch.arange(n, device=query.device)[:, None] - torch.arange(n, device=query.device)
        mask = (apart < window) & (apart >= 0 if causal else apart > -window)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=causal and mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and value.shape[-1] == size <= _LARGEST_HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= _OLDEST_CARD
    )


def _kernel() -> Callable[..., torch.Tensor] | None:
    """torch's attention over packed rows; None before torch 2.10."""
    try:
        kernel: Callable[..., torch.Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return None
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return lambda query, key, *rest, **named: kernel(
            query, key, *rest, enable_gqa=query.shape[1] != key.shape[1], **named
        )
    return kernel
