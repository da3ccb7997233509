"""Which configurations of verl bench stock runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""The shape of a 1B Llama, with a head of its own."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of verl. model: a name of the zoo's, or "llama-1b"; lengths: of prompts and responses."""

    model: str
    strategy: Literal["fsdp", "fsdp2", "device_map"]
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    packed: bool = False
    gradient_checkpointing: bool = True
    offload: bool = False
    sequences: int = 4
    micro_batch_size: int = 2
    prompt_length: int = 512
    response_length: int = 1536
    compiled: bool = False
    roles: tuple[Literal["actor", "critic", "ref"], ...] = ("actor", "critic", "ref")
    attn_implementation: str = "sdpa"
    logits: str = "full"
    """Of our engine: "responses" or, as stock verl has them, "full"."""
    flash_attn: bool = False
    """Whether flash-attn is installed, whose cross-entropy verl then takes, whatever the attention is."""

    @property
    def words(self) -> str:
        said = [self.strategy, self.model_dtype, "packed" if self.packed else "padded"]
        said += ["gradient checkpointing"] * self.gradient_checkpointing + ["offload"] * self.offload
        said += ["compiled entropy"] * self.compiled + ["logits of responses"] * (self.logits == "responses")
        said += [self.attn_implementation] * (self.attn_implementation != "sdpa")
        return ", ".join(said)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, response) of each sequence: one in two is a little shorter, so that there is padding."""
        return [(self.prompt_length, self.response_length - 4 * (i % 2)) for i in range(self.sequences)]


CELLS = (
    Cell(model="qwen2-0.5b", strategy="fsdp", packed=True),
    Cell(model="qwen2-0.5b", strategy="fsdp2", packed=True),
    Cell(model="qwen2-0.5b", strategy="fsdp2", offload=True),
    Cell(model="qwen2-0.5b", strategy="fsdp", gradient_checkpointing=False),
    Cell(model="qwen3-0.6b", strategy="fsdp2", model_dtype="bf16", packed=True, gradient_checkpointing=False),
    Cell(model="qwen3-0.6b", strategy="fsdp", model_dtype="bf16", offload=True),
    Cell(model="llama-1b", strategy="fsdp", packed=True),
    Cell(model="llama-1b", strategy="fsdp2"),
    Cell(model="llama-1b", strategy="fsdp", offload=True, packed=True),
    Cell(model="qwen2-0.5b", strategy="fsdp2", packed=True, compiled=True),
)
OURS = (
    Cell(
        model="qwen2-0.5b",
        strategy="device_map",
        response_length=256,
        sequences=8,
        micro_batch_size=4,
        logits="responses",
    ),
    Cell(
        model="qwen3-0.6b", strategy="device_map", response_length=256, gradient_checkpointing=False, logits="responses"
    ),
    Cell(model="llama-1b", strategy="device_map", response_length=128, model_dtype="bf16", logits="responses"),
)
"""Our engine, which generates too."""
LARGE = (Cell(model="qwen2-7b", strategy="fsdp2", model_dtype="bf16", packed=True, roles=("actor", "ref")),)
FLASH = (
    Cell(model="qwen2-0.5b", strategy="fsdp", packed=True, attn_implementation="flash_attention_2"),
    Cell(model="llama-1b", strategy="fsdp2", packed=True, attn_implementation="flash_attention_2"),
    Cell(
        model="qwen3-0.6b", strategy="fsdp2", model_dtype="bf16", gradient_checkpointing=False,
        attn_implementation="flash_attention_2",
    ),
    Cell(
        model="qwen2-0.5b", strategy="device_map", packed=True, response_length=256, sequences=8, micro_batch_size=4,
        logits="responses", attn_implementation="flash_attention_2",
    ),
    Cell(
        model="llama-1b", strategy="device_map", response_length=128, model_dtype="bf16", logits="responses",
        attn_implementation="flash_attention_2",
    ),
)  # fmt: skip
"""For a machine on which flash-attn is installed."""


def config_of(name: str) -> Any:
    """The configuration of a cell's model."""
    from transformers import AutoConfig

    from verl_shard.bench.maps import zoo

    if name == "llama-1b":
        fields = dict(_LLAMA_1B)
    else:
        entry = next(entry for entry in zoo() if entry["name"] == name)
        fields = {"model_type": entry["model_type"], **entry["kwargs"]}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    return config
