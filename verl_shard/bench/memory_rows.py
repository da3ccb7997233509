"""Passes to estimate and to measure: published models, with lengths, batches and settings drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from verl_shard.bench.maps import zoo
from verl_shard.common.seeds import derive_seed

MODELS = (
    "qwen2-0.5b",
    "qwen3-0.6b",
    "gemma-3-1b",
    "gpt2",
    "gpt2-xl",
    "phi-3-mini",
    "qwen2-7b",
    "llama-3.1-8b",
    "mistral-7b",
)
PACKED = ("qwen2-0.5b", "qwen3-0.6b", "gemma-3-1b", "gpt2", "phi-3-mini", "llama-3.1-8b")

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"zoo": "mixtral-8x7b", "num_hidden_layers": 2},
    "qwen3-30b-a3b": {"zoo": "qwen3-30b-a3b", "num_hidden_layers": 6},
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        **_ROPE,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        **_ROPE,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
        "max_position_embeddings": 8192,
        **_ROPE,
    },
}
"""Mixtures of experts, of their published shapes but for the number of layers: training then fits one large GPU."""


@dataclass(frozen=True)
class Row:
    """One thing that is run. fields: of PassSpec."""

    model: str
    config: dict[str, Any]
    phase: str
    fields: dict[str, Any]

    def words(self) -> str:
        """What it is, in a line."""
        said = {key: value for key, value in self.fields.items() if key not in ("batch_size", "seq_len")}
        return f"{self.phase} {self.fields['batch_size']} x {self.fields['seq_len']}" + "".join(
            f", {value if isinstance(value, str) else key if value is True else f'{key} {value}'}"
            for key, value in said.items()
            if value
        )

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.fields.get("packed"):
            return "packed"
        return "moe" if self.model in MIXTURES else "dense"


def draw(seed: int, n: int, kinds: Sequence[str] = ("dense",)) -> list[Row]:
    """`n` rows, of the kinds in turn. One kind's rows are the same whichever others are drawn."""
    streams = []
    for kind in kinds:
        names = ("bench", "memory") if kind == "dense" else ("bench", "memory", kind)
        chance = random.Random(derive_seed(seed, *names))
        streams.append((KINDS[kind], chance))
    return [one(chance) for one, chance in islice(cycle(streams), n)]


def _zoo_config(name: str) -> dict[str, Any]:
    entry = next(entry for entry in zoo() if entry["name"] == name)
    return {"model_type": entry["model_type"], **entry["kwargs"]}


def _dense(chance: random.Random) -> Row:
    name = chance.choice(MODELS)
    config = _zoo_config(name)
    if config["model_type"] == "gpt2":
        config.update({"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1})
    phase = chance.choice(("train", "train", "train", "forward", "generate"))
    longest = min(4096, config.get("max_position_embeddings") or config.get("n_positions") or 4096)
    length = 64 * chance.randint(2, longest // 64 - 4)
    fields: dict[str, Any] = {"batch_size": chance.choice((1, 2, 3, 4, 6, 8)), "seq_len": length}
    if phase == "train":
        fields["precision"] = chance.choice(("bf16", "bf16-mixed"))
        fields["gradient_checkpointing"] = chance.random() < 0.5
        fields["optimizer"] = chance.choice(("adamw", "adamw", "adamw-fused", "sgd"))
        if length <= 1024 and chance.random() < 0.2:
            fields["attn_implementation"] = "eager"
    elif phase == "generate":
        fields["new_tokens"] = chance.choice((32, 64, 128))
    return Row(name, config, phase, fields)


def _moe(chance: random.Random) -> Row:
    name = chance.choice(list(MIXTURES))
    config = dict(MIXTURES[name])
    if "zoo" in config:
        config = {**_zoo_config(config.pop("zoo")), **config}
    phase = chance.choice(("train", "train", "train", "forward"))
    fields: dict[str, Any] = {"batch_size": chance.choice((1, 2, 4)), "seq_len": 64 * chance.randint(4, 24)}
    if phase == "train":
        fields["precision"] = chance.choice(("bf16", "bf16", "bf16-mixed"))
        fields["gradient_checkpointing"] = chance.random() < 0.5
        fields["optimizer"] = chance.choice(("adamw", "adamw-fused", "sgd"))
    return Row(name, config, phase, fields)


def _packed(chance: random.Random) -> Row:
    name = chance.choice(PACKED)
    phase = chance.choice(("train", "train", "forward"))
    fields: dict[str, Any] = {
        "batch_size": chance.choice((2, 3, 4, 6)),
        "seq_len": 64 * chance.randint(2, 12) + chance.choice((0, 8)),
        "packed": True,
    }
    if phase == "train":
        fields["precision"] = chance.choice(("bf16", "bf16-mixed"))
        fields["gradient_checkpointing"] = chance.random() < 0.5
        fields["optimizer"] = chance.choice(("adamw", "adamw-fused", "sgd"))
    if fields["batch_size"] * fields["seq_len"] <= 1024 and chance.random() < 0.2:
        fields["attn_implementation"] = "eager"
    return Row(name, _zoo_config(name), phase, fields)


KINDS: dict[str, Callable[[random.Random], Row]] = {"dense": _dense, "moe": _moe, "packed": _packed}
"""Kinds of rows: whole sequences, mixtures of experts, several sequences in one row."""
