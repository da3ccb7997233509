"""Attention of one new token for each row: heads that share keys are computed as several queries, and no key is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl_shard.models.decoding import SDPA

NAME = "verl_shard_one_token"


def one_token_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' sdpa attention; for one query a row whose heads share keys, without repeating those in memory.

    transformers writes keys and values out once for each query head whenever there is a mask. query: (rows, heads, queries,
    size); key, value: (rows, key heads, columns, size).
    """
    rows, heads, n, _ = query.shape
    groups = heads // key.shape[1]
    shared = attention_mask is None or attention_mask.shape[1] == 1
    if n != 1 or groups == 1 or not shared or kwargs.get("position_bias") is not None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], groups, -1),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


@contextmanager
def grouped_decoding(model: Any, among: Sequence[str] = SDPA) -> Iterator[None]:
    """While it is open, a model whose attention is one of these decodes by `one_token_attention`."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if not getattr(model, "_supports_attention_backend", False) or before not in among:
        yield
        return
    AttentionInterface.register(NAME, one_token_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    # Not through the setter, which would go on to other configurations than the decoder's.
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
