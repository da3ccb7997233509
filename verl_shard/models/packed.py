"""Which models take packed rows without a mask of tokens x tokens, where sdpa would have one."""

from __future__ import annotations

from typing import Any

from torch import nn

PACKED = "sdpa_packed"
"""The name under which our engine has sdpa work on packed rows (runtime.packed)."""

_LAYERS = ("full_attention", "sliding_attention")


def why_not_packed(model: nn.Module) -> str | None:
    """Why a model's packed rows need sdpa's own mask, or None where they can do without."""
    config: Any = model.config
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} brings its own attention"
    text = config.get_text_config()
    if odd := sorted(set(getattr(text, "layer_types", None) or ()) - set(_LAYERS)):
        return f"it has layers of {', '.join(odd)}"
    if getattr(text, "attention_chunk_size", None):
        return "its attention works in chunks"
    if getattr(text, "output_router_logits", False):
        return "its loss over routers reads the mask"
    return None
