"""Whether a token for each row of a batch can be decoded in a step of fixed shape, which a CUDA graph launches as one."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache

from verl_shard.models.packed import PACKED

GRAPH_STEPS = 64
"""Columns that the hf rollout's cache has room for beyond what it holds, and so the steps that a graph is for; then the
cache is copied, and the graph made anew."""
FEWEST_STEPS = 8
"""That a graph is made for: a step runs beside the stream and once more to be recorded, which takes about what three do."""
SDPA = ("sdpa", PACKED)
"""Attention that is sdpa for rows that are not packed."""
CAPTURED = (*SDPA, "flash_attention_2", "flash_attention_3")
"""Attention in whose place steps of a fixed shape have sdpa's: a cache of fixed length is more than flash attention's masks
can say, and to take rows apart it would ask the GPU."""


def takes_ready_masks(model: Any) -> bool:
    """Whether a transformers model computes with a mask (rows, 1, 1, columns) that is made for it, in one graph.

    transformers' own generate gives such models masks that are made already when a cache is static. Of windows it makes
    several, which are left to the model.
    """
    return bool(
        getattr(model, "_can_compile_fullgraph", False)
        and getattr(model, "_supports_attention_backend", False)
        and not any(layer.is_sliding for layer in DynamicCache(config=model.config).layers)
    )


def attention_of_decoder(model: Any) -> str:
    """The name of the attention implementation that decodes."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def why_it_asks(model: Any) -> str | None:
    """Why a forward of a model waits for the GPU, which none that is captured may; None where it is not known to."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if found := sorted(kinds & {"dynamic", "longrope"}):
        return f"its {found[0]} rope asks how long the longest row is"
    has_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if has_experts and getattr(config, "_experts_implementation", None) == "eager":
        return "its experts ask how many tokens they have (experts_implementation eager)"
    return None
