"""What was run short and unfolded comes in the order of the whole: the allocator's packing depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shapes import small_qwen2
from transformers import AutoConfig

from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import Recording
from verl_shard.memory.run_pass import record
from verl_shard.models.read import spec_of_config


def _order(recording: Recording) -> list[int]:
    """Bytes of each event in order, those of releases negative."""
    numbers = abs(recording.events) - 1
    signed: list[int] = (recording.sizes[numbers] * (2 * (recording.events > 0) - 1)).tolist()
    return signed


@pytest.mark.parametrize("fields", [{}, {"phase": "forward"}, {"optimizer": "sgd", "gradient_checkpointing": True}])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_in_the_order_of_the_whole(kind: str, fields: dict[str, Any]) -> None:
    config: Any = (
        small_qwen2(num_hidden_layers=9)
        if kind == "qwen2"
        else AutoConfig.for_model(
            kind,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=14,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=512,
            sliding_window=16,
        )
    )
    spec, module = spec_of_config(config, name="model", task="causal-lm", dtype=torch.float32)
    wanted = PassSpec(batch_size=2, seq_len=32, **fields)
    short, whole = (record(spec, module, wanted, fold=fold) for fold in (True, False))
    assert short.n_static == whole.n_static
    assert _order(short)[: short.n_static] == _order(whole)[: whole.n_static]
    step = next((at for name, at in whole.marks if name == "optimizer"), len(whole.events))
    assert _order(short)[step:] == _order(whole)[step:]
    assert (short.of_product == whole.of_product).mean() > 0.5
    assert sorted(short.of_product) == sorted(whole.of_product)
