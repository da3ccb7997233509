"""KV caches by formula, against what transformers' own cache holds after a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from verl_shard import build_device_map
from verl_shard.common.errors import ConfigError
from verl_shard.memory.kv_cache import kv_cache_bytes
from verl_shard.models.meta import build_on_meta


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gemma3_text", "deepseek_v3", "gpt2", "mixtral", "opt"])
def test_against_the_cache_itself(kind: str, small_config: Callable[..., Any]) -> None:
    config = small_config(kind)
    model = build_on_meta(config, dtype=torch.float32).to_empty(device="cpu").eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(3, 7, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert kv_cache_bytes(config, batch_size=3, seq_len=7, itemsize=4) == held


def test_a_window_bounds_it(small_config: Callable[..., Any]) -> None:
    config = small_config("gemma2", sliding_window=16)
    layers = kv_cache_bytes(config, batch_size=1, seq_len=64, itemsize=2)
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    assert any(sliding)
    assert all((size * 4 == max(layers)) == slides for size, slides in zip(layers, sliding, strict=True))


def test_llama_8b_by_hand(published: Callable[[str], Any]) -> None:
    """2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token."""
    layers = kv_cache_bytes(published("llama-3.1-8b"), batch_size=1, seq_len=1, itemsize=2)
    assert sum(layers) == 128 * 2**10


def test_a_map_that_counts_it(published: Callable[[str], Any]) -> None:
    config = published("llama-3.1-8b")
    plain, filled = build_device_map(config, 4), build_device_map(config, 4, batch_size=64, seq_len=8192)
    added = sum(filled.loads.values()) - sum(plain.loads.values())
    assert added == 64 * 8192 * 128 * 2**10
    assert filled.stages[0].cache_bytes > 0
    assert "KV cache (64 x 8192 tokens)" in filled.report()
    held = [stage.n_blocks for stage in filled.stages]
    assert held == [8, 8, 8, 8], "the cache is in the blocks, and outweighs the embedding"


def test_models_without_one(small_config: Callable[..., Any]) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64)
    with pytest.raises(ConfigError, match="Leave out batch_size and seq_len"):
        build_device_map(config, 2, batch_size=1, seq_len=8)
