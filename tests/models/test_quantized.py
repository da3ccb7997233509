"""Sizes of quantized weights, against what the libraries that pack them make, counted by hand from their layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_shard import build_device_map
from verl_shard.models.read import read_spec
from verl_shard.models.spec import ModelSpec

_FIELDS = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 2}


def _spec(small_config: Callable[..., Any], **quantization: Any) -> ModelSpec:
    return read_spec(small_config("llama", **_FIELDS, quantization_config=quantization))


def _bytes(spec: ModelSpec, name: str) -> int:
    return next(tensor.n_bytes for tensor in spec.tensors if tensor.name == name)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        # 512 x 256 weights: half a byte each, 2,048 blocks of 64 with an fp32 absmax, a table of 16 fp32.
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 65_536 + 8_192 + 64),
        # nested: a byte a block, an fp32 for 256 blocks, a table of 256 fp32, the offset, the table of 16.
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            65_536 + 2_048 + 32 + 1_024 + 4 + 64,
        ),
        # a byte each, an fp32 a row.
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 131_072 + 2_048),
        # half a byte each; two groups of 128 columns with an fp16 scale and half a byte of zero point a row; g_idx.
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 65_536 + 2_048 + 512 + 1_024),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 65_536 + 2_048 + 512),
        # a byte each, an fp32 for a block of 128 x 128.
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 131_072 + 4 * 4 * 2),
    ],
)
def test_a_packed_weight(quantization: dict[str, Any], expected: int, small_config: Callable[..., Any]) -> None:
    spec = _spec(small_config, **quantization)
    assert _bytes(spec, "model.layers.0.mlp.gate_proj.weight") == expected
    assert not spec.sizes_before_quantizing


def test_the_head_the_embedding_and_what_is_named_stay(small_config: Callable[..., Any]) -> None:
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    spec = _spec(small_config, **quantization)
    assert _bytes(spec, "lm_head.weight") == _bytes(spec, "model.embed_tokens.weight") == 1024 * 256 * 2
    kept = _spec(small_config, **quantization, llm_int8_skip_modules=["lm_head", "gate_proj"])
    assert _bytes(kept, "model.layers.0.mlp.gate_proj.weight") == 512 * 256 * 2
    assert _bytes(kept, "model.layers.0.mlp.up_proj.weight") < 512 * 256


def test_blocks_and_maps_go_by_the_packed_sizes(small_config: Callable[..., Any]) -> None:
    spec = _spec(small_config, quant_method="bitsandbytes", load_in_4bit=True)
    assert spec.n_bytes == sum(tensor.n_bytes for tensor in spec.tensors if not tensor.is_alias)
    packed = build_device_map(spec, 2)
    assert sum(packed.loads.values()) == spec.n_bytes
    whole = read_spec(small_config("llama", **_FIELDS))
    assert spec.blocks[1].n_bytes < 0.3 * whole.blocks[1].n_bytes
    assert spec.n_params == whole.n_params


def test_gpt2s_own_linear_layers(small_config: Callable[..., Any]) -> None:
    """bitsandbytes packs transformers' Conv1D as well; 32 x 96 weights of the first attention."""
    config = small_config("gpt2", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert _bytes(read_spec(config), "transformer.h.0.attn.c_attn.weight") == 1_536 + 4 * 48 + 64
    grouped = small_config("gpt2", quantization_config={"quant_method": "gptq", "bits": 4})
    assert _bytes(read_spec(grouped), "transformer.h.0.attn.c_attn.weight") == 32 * 96 * 2
