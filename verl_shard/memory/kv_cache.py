"""Bytes of a key-value cache, layer by layer, as transformers' DynamicCache holds it."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PretrainedConfig

from verl_shard.common.errors import config_error


def kv_cache_bytes(
    config: PretrainedConfig, *, batch_size: int, seq_len: int, itemsize: int, latent: bool = False
) -> list[int]:
    """One entry for each layer: 2 x batch x tokens x key-value heads x head size x itemsize.

    tokens: seq_len, and no more than its window for a layer with sliding or chunked attention; transformers' own
    DynamicCache says which those are. Models with multi-head latent attention (DeepSeek) are cached expanded, so keys
    count qk_nope_head_dim + qk_rope_head_dim and values v_head_dim, for all heads (modeling_deepseek_v3.py); latent: as vLLM
    has them, kv_lora_rank + qk_rope_head_dim. Layers that share the cache of another have none of their own.
    Raises ConfigError for models whose state is no key-value cache (linear attention, Mamba), and without a decoder.
    """
    text: Any = config.get_text_config(decoder=True)
    if not hasattr(text, "num_attention_heads"):
        why = "it has no attention, and so no keys and values to keep"
        fix = "Leave out batch_size and seq_len, which then counts weights and buffers"
        raise config_error("no-kv-cache", "model", config.model_type, why, fix)
    n_layers = text.num_hidden_layers
    layers = DynamicCache(config=config).layers
    heads, size = text.num_attention_heads, getattr(text, "head_dim", None)
    size = size or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "kv_lora_rank", None):
        expanded = heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
        per_token = text.kv_lora_rank + text.qk_rope_head_dim if latent else expanded
    else:
        per_token = kv_heads * size * 2
    sizes = []
    for layer in layers:
        if not hasattr(layer, "keys"):
            kind = type(layer).__name__
            why = f"its layers keep a {kind}, not keys and values"
            fix = "Leave out batch_size and seq_len, which then counts weights and buffers"
            raise config_error("no-kv-cache", "model", config.model_type, why, fix)
        # A sliding layer keeps one token less than its window between two steps, and has one more during one.
        window = layer.sliding_window if getattr(layer, "is_sliding", False) else seq_len
        sizes.append(batch_size * min(seq_len, window) * per_token * itemsize)
    return sizes + [0] * (n_layers - len(sizes))
