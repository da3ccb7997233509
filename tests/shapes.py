"""Shapes that tests of different rooms share."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig


def small_qwen2(**changed: Any) -> Any:
    """The configuration of a Qwen2 of four small blocks."""
    fields = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    return AutoConfig.for_model("qwen2", **{**fields, **changed})
