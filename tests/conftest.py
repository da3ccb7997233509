"""What all tests share: no network, notices that are said anew, and small models of real architectures."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Tests are never timed: a busy machine is no fault of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell starts background jobs with Ctrl-C ignored; the tests of interrupts need it, however they are started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "bloom": {"n_layer": 3, "n_head": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}

# Derived there from other fields, so that it cannot be set.
_NOT_OF_TYPE = {
    "gpt2": ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    "bloom": ("num_hidden_layers", "num_attention_heads"),
    "t5": ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    "falcon": ("head_dim",),
}


@pytest.fixture(autouse=True)
def _forget_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice is said once in a process; a test hears it whatever ran before."""
    monkeypatch.setattr("verl_shard.common.notices._said", set())


@pytest.fixture
def small_config() -> Callable[..., Any]:
    """small_config("qwen3", tie_word_embeddings=True): a configuration of a real architecture with 3 tiny layers."""

    def make(model_type: str, **fields: Any) -> Any:
        from transformers import AutoConfig

        takes = AutoConfig.for_model(model_type)
        small = {key: value for key, value in _SMALL.items() if hasattr(takes, key)}
        for key in _NOT_OF_TYPE.get(model_type, ()):
            small.pop(key, None)
        return AutoConfig.for_model(model_type, **{**small, **_OF_TYPE.get(model_type, {}), **fields})

    return make


@pytest.fixture(scope="session")
def zoo() -> dict[str, dict[str, Any]]:
    """26 published models by name: the fields of their configurations and their published parameter counts."""
    from verl_shard.bench.maps import zoo as read

    return {entry["name"]: entry for entry in read()}


@pytest.fixture
def published(zoo: dict[str, dict[str, Any]]) -> Iterator[Callable[[str], Any]]:
    """published("qwen2-7b"): the configuration of a published model."""

    def make(name: str) -> Any:
        from transformers import AutoConfig

        entry = zoo[name]
        task = {
            "AutoModelForCausalLM": "ForCausalLM",
            "AutoModelForSequenceClassification": "ForSequenceClassification",
        }
        config = AutoConfig.for_model(entry["model_type"], **entry["kwargs"])
        config.architectures = [task.get(entry["auto"], "ForTokenClassification")]
        return config

    return make
