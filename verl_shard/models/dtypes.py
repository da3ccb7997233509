"""Names of dtypes as people write them."""

from __future__ import annotations

import torch

from verl_shard.common.errors import config_error

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}


def parse_dtype(value: str | torch.dtype, where: str = "dtype") -> torch.dtype:
    """The dtype that `value` names: "bfloat16", "bf16", "torch.bfloat16" or torch.bfloat16, and so for 16 and 32 bits.

    Raises ConfigError for every other text, and for dtypes that weights are not computed in.
    """
    if isinstance(value, torch.dtype) and value in _DTYPES.values():
        return value
    dtype = _DTYPES.get(str(value).removeprefix("torch.").lower()) if isinstance(value, str) else None
    if dtype is None:
        choices = ", ".join(f'"{name}"' for name in _DTYPES)
        raise config_error(
            "unknown-dtype", where, value, "not a dtype that weights are held in", f"Use one of {choices}"
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the package: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
