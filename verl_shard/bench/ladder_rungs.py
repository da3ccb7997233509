"""The rungs of the ladder: settings of one PPO update, each with one more remedy than the rung before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Dispatch = Literal["none", "accelerate", "ours"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one update, in micro-batches. Every second sequence is half as long as `longest`, in tokens."""

    sequences: int
    micro_batch: int
    longest: int

    def __post_init__(self) -> None:
        assert self.sequences % self.micro_batch == 0, "micro-batches are of one size"
        assert self.micro_batch % 2 == 0, "one in two sequences of a micro-batch is shorter"
        assert self.longest % 4 == 0, "a mean length is a whole number"

    @property
    def n_micro(self) -> int:
        return self.sequences // self.micro_batch

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence of a micro-batch."""
        return [self.longest if i % 2 == 0 else self.longest // 2 for i in range(self.micro_batch)]

    @property
    def mean_length(self) -> int:
        return 3 * self.longest // 4

    @property
    def words(self) -> str:
        return f"{self.sequences} sequences of {self.longest} and {self.longest // 2} tokens in {self.micro_batch}s"


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One set of settings. adds: what it has and the one before has not. gpus: over how many the model is laid out."""

    adds: str
    precision: Literal["fp32", "bf16-mixed"]
    attention: str = "eager"
    checkpointing: bool = False
    fused: bool = False
    packed: bool = False
    gpus: int = 1
    dispatch: Dispatch = "none"
    in_flight: int = 0

    @property
    def mixed(self) -> bool:
        return self.precision == "bf16-mixed"

    def pass_fields(self, batch: Batch) -> dict[str, Any]:
        """Of estimate_memory, for one micro-batch of the update."""
        from verl_shard.models.packed import PACKED

        attention = PACKED if self.packed and self.attention == "sdpa" else self.attention
        shown: dict[str, Any] = {"packed": True} if self.packed else {"padded": True}
        return shown | {
            "batch_size": batch.micro_batch,
            "seq_len": batch.mean_length if self.packed else batch.longest,
            "precision": self.precision,
            "optimizer": "adamw",
            "gradient_checkpointing": self.checkpointing,
            "attn_implementation": attention,
            "loss": "verl-fused" if self.fused else "ppo",
            "accumulating": batch.n_micro > max(self.in_flight, 1),
            "in_flight": max(self.in_flight, 1),
        }


def rungs(batch: Batch, *, gpus: int, flash: bool, packs: bool, fuses: bool) -> Iterator[Rung]:
    """From plain fp32 upwards. flash: flash_attention_2 can run, else sdpa stands in. packs, fuses: the model can."""
    kernel = "flash_attention_2" if flash else "sdpa"
    now = Rung(adds="plain fp32", precision="fp32")
    yield now
    now = replace(now, adds="bf16 autocast", precision="bf16-mixed")
    yield now
    now = replace(now, adds="flash attention" if flash else "sdpa's fused kernel", attention=kernel)
    yield now
    now = replace(now, adds="gradient checkpointing", checkpointing=True)
    yield now
    if fuses:
        now = replace(now, adds="fused logits", fused=True)
        yield now
    if packs:
        now = replace(now, adds="packed rows", packed=True)
        yield now
    if gpus > 1:
        now = replace(now, adds=f"device_map over {gpus} GPUs", gpus=gpus, dispatch="accelerate")
        yield now
        if batch.n_micro > 1:
            now = replace(now, adds="pipelined", dispatch="ours", in_flight=min(gpus, batch.n_micro))
            yield now


def left_out(batch: Batch, *, gpus: int, packs: bool, fuses: bool) -> dict[str, str]:
    """The rungs that cannot be tried here, and why."""
    out = {}
    if not fuses:
        out["fused logits"] = "the model does something to its logits behind the head, or has no lm_head"
    if not packs:
        out["packed rows"] = "its attention cannot keep the sequences of a row apart without a mask"
    if gpus < 2:
        out["device_map over all GPUs, pipelined"] = "there is one GPU" if gpus else "there is no GPU"
    elif batch.n_micro < 2:
        out["pipelined"] = "there is one micro-batch"
    return out
