"""What the weights of a quantized model take, by the quantization_config of its configuration.

Only linear layers are packed, and with bitsandbytes GPT-2's Conv1D. Their scales, zero points and tables are counted
with them, as they are on the GPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Sizes = dict[str, int]
"""Bytes by name of the weight that is packed, its scales included."""


def quantized_sizes(module: nn.Module, config: Any) -> Sizes | None:
    """Bytes of each weight that loads packed. Empty when nothing is quantized; None for a method that is not known.

    Which layers are packed is asked of transformers: by default all linear ones but the head.
    """
    wanted = getattr(config, "quantization_config", None)
    if not wanted:
        return {}
    wanted = wanted if isinstance(wanted, Mapping) else wanted.to_dict()
    method = str(getattr(wanted.get("quant_method"), "value", wanted.get("quant_method")) or "bitsandbytes")
    size = _size(method, wanted)
    if size is None:
        return None
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skipped = wanted.get("llm_int8_skip_modules") or wanted.get("modules_to_not_convert")
    left = HfQuantizer.get_modules_to_not_convert(module, skipped)
    sizes: Sizes = {}
    for name, child in module.named_modules():
        if not should_convert_module(name, left):
            continue
        if isinstance(child, nn.Linear):
            sizes[f"{name}.weight"] = size(child.out_features, child.in_features)
        elif isinstance(child, Conv1D) and method == "bitsandbytes":
            sizes[f"{name}.weight"] = size(child.nf, child.nx)
    return sizes


def _size(name: str, wanted: Mapping[str, Any]) -> Callable[[int, int], int] | None:
    """Bytes of a linear layer's packed weight by (rows out, columns in)."""
    if name == "bitsandbytes" and wanted.get("load_in_4bit"):
        nested = bool(wanted.get("bnb_4bit_use_double_quant"))
        return lambda out, cols: _bitsandbytes_4bit(out * cols, nested)
    if name == "bitsandbytes" and wanted.get("load_in_8bit"):
        return lambda out, cols: out * cols + 4 * out  # int8, and SCB: one fp32 a row
    if name in ("gptq", "awq"):
        bits, group = int(wanted.get("bits") or 4), int(wanted.get("group_size") or 128)
        return lambda out, cols: _grouped(out, cols, bits, group, order=name == "gptq")
    if name == "fp8":
        rows, columns = wanted.get("weight_block_size") or (128, 128)
        return lambda out, cols: out * cols + 4 * -(-out // rows) * -(-cols // columns)
    return None


def _bitsandbytes_4bit(n: int, nested: bool) -> int:
    """Two weights a byte, one fp32 absmax for 64 of them, a table of 16 fp32 (bitsandbytes/functional.py, quantize_4bit).

    Nested: absmax is a byte, with one fp32 for 256 of those, a table of 256 fp32 and an offset.
    """
    blocks = -(-n // 64)
    scales = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4 if nested else 4 * blocks
    return -(-n // 2) + scales + 4 * 16


def _grouped(out: int, cols: int, bits: int, group: int, *, order: bool) -> int:
    """GPTQ and AWQ: packed weights and zero points in int32, fp16 scales for each group and row; GPTQ also g_idx."""
    groups = -(-cols // group) if group > 0 else 1
    packed = out * cols * bits // 8
    return packed + groups * out * bits // 8 + groups * out * 2 + (4 * cols if order else 0)
