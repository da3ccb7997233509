"""Sorting the free keywords of load_sharded: those of from_pretrained, those of the configuration, and mistakes."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.models.source import HUB_KEYS

LOADER_KEYS = (
    *HUB_KEYS,
    "code_revision",
    "disable_mmap",
    "experts_implementation",
    "generation_config",
    "ignore_mismatched_sizes",
    "kernel_config",
    "key_mapping",
    "quantization_config",
    "use_kernels",
    "use_safetensors",
    "variant",
    "weights_only",
)
"""Keywords that go to transformers' from_pretrained as they are."""

_READ_WHEN_SET = ("classifier_dropout",)
"""Fields that transformers' models read from configurations that do not have them by default."""

_INSTEAD = {
    "torch_dtype": "Write dtype=",
    "load_in_4bit": "Give quantization_config=BitsAndBytesConfig(load_in_4bit=True)",
    "load_in_8bit": "Give quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "use_flash_attention_2": 'Write attn_implementation="flash_attention_2"',
    "use_auth_token": "Write token=",
    "low_cpu_mem_usage": "Leave it out: weights are always loaded so",
    "offload_folder": "Leave it out: load_sharded never offloads",
    "offload_buffers": "Leave it out: load_sharded never offloads",
    "offload_state_dict": "Leave it out: load_sharded never offloads",
    "output_loading_info": "Leave it out: load_sharded returns the model and checks that information itself",
    "tp_plan": "Leave it out: a device map and tensor parallelism exclude each other",
    "tp_size": "Leave it out: a device map and tensor parallelism exclude each other",
    "device_mesh": "Leave it out: a device map and tensor parallelism exclude each other",
    "use_gradient_checkpointing": "Write gradient_checkpointing=True",
    "gradient_checkpointing_kwargs": "Leave it out: checkpointing is always non-reentrant",
    "state_dict": "Save the weights with save_pretrained and name that folder",
}


def split_options(options: dict[str, Any], config: PretrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(keywords for from_pretrained, fields to set in the configuration).

    Raises ConfigError that names every keyword that is neither, with what to write instead.
    """
    loader, fields, faults = {}, {}, []
    for key, value in options.items():
        if key in LOADER_KEYS:
            loader[key] = value
        elif key not in _INSTEAD and not key.startswith("_") and (hasattr(config, key) or key in _READ_WHEN_SET):
            fields[key] = value
        else:
            faults.append(_unknown(key, value, config))
    if faults:
        raise ConfigError(faults)
    return loader, fields


def _unknown(key: str, value: object, config: PretrainedConfig) -> Finding:
    fix = _INSTEAD.get(key)
    if fix is None:
        near = difflib.get_close_matches(key, [*LOADER_KEYS, "num_labels", *config.to_dict()], n=1)
        fix = f"Did you mean {near[0]}?" if near else "Leave it out"
    why = f"neither from_pretrained nor {type(config).__name__} takes it"
    return Finding("error", "unknown-option", key, str(value), "not taken here" if key in _INSTEAD else why, fix)
