"""PassSpec: one model, one pass over one micro-batch (or several in flight), in the words of estimate_memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, get_args

import torch

from verl_shard.common.choices import BATCH_SIZE, SEQ_LEN, Attention, Loss, Optimizer, Phase, Precision
from verl_shard.common.errors import ConfigError, Finding

__all__ = ["ATTENTIONS", "Loss", "Optimizer", "PassSpec", "Phase", "Precision", "pass_spec", "within_positions"]

ATTENTIONS = get_args(Attention)
"""One of them is models.packed.PACKED."""


@dataclass(frozen=True, kw_only=True)
class PassSpec:
    """What runs. The fields are keywords of `estimate_memory` and `build_device_map`.

    phase: "train" (forward, backward and the optimizer's step), "forward" (scoring, no gradients) or "generate".
    batch_size: sequences in one micro-batch. seq_len: tokens of each.
    precision: "bf16-mixed" (fp32 weights under bf16 autocast), "bf16" or "fp32"; by default the first for training and
        "bf16" otherwise.
    optimizer: "adamw" is torch's default on CUDA, which works on lists of tensors and needs as much as the gradients
        again during its step; "adamw-fused" does without; "sgd" is plain, with no state.
    gradient_checkpointing: activations inside of a block are computed again in the backward.
    attn_implementation: "sdpa" and "flash_attention_2" have the memory of a fused kernel, "eager" holds every score.
    lora_rank: train low-rank adapters of this rank on all linear layers, in fp32, instead of the weights; 0 is none.
    logits_to_keep: compute the logits of so many last positions of each sequence only; None is all.
    new_tokens: for "generate", the tokens that follow the seq_len of the prompt.
    loss: "causal-lm" is transformers' own (logits in fp32); "value" is a clipped value loss; "ppo" takes the
        log-probability of each token and a clipped ratio; "verl-ppo" takes them as our verl engine does, under autocast,
        of padded rows from a copy of the logits that takes their place, and when scoring a trainable model with their
        entropy; "verl-fused" as with use_fused_kernels, which makes logits for 512 tokens at a time; by default by what
        the model computes.
    accumulating: an optimizer step of several micro-batches: gradients of the first are there while the next runs.
    padded: sequences of different lengths in one batch: attention has a mask, which fused kernels take as a bias;
        flash_attention_2 copies out what is no padding instead, and its output back.
    packed: the batch_size sequences of seq_len tokens are one row of batch_size x seq_len, with positions that begin
        anew, as verl's use_remove_padding lays them out. "flash_attention_2" needs no mask for it, nor does
        "sdpa_packed", which is torch's own kernel as our engine uses it; "sdpa" and "eager" keep the sequences apart by
        one of (all tokens x all tokens), which a fused kernel takes as a bias that each layer makes, and keeps for its
        backward. Generation is not packed.
    trainable: for "forward" and "generate": weights are an actor's or critic's between two updates; under autocast they
        are then held in bf16 too, once and for the whole pass.
    one_device: the whole model is on one device. Our verl engine then leaves autocast between forward and loss, and lets go of
        its casts of the weights; over several devices they stay for the next micro-batch. For "verl-ppo" and "value".
    in_flight: micro-batches between the begin of their forward and the end of their backward at a time. Later GPUs of a
        map hold fewer (memory/in_flight.py).

    Raises ConfigError with every fault at once.
    """

    phase: Phase = "train"
    batch_size: int = BATCH_SIZE
    seq_len: int = SEQ_LEN
    precision: Precision | None = None
    optimizer: Optimizer = "adamw"
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"
    lora_rank: int = 0
    logits_to_keep: int | None = None
    new_tokens: int = 0
    loss: Loss | None = None
    in_flight: int = 1
    accumulating: bool = False
    padded: bool = False
    packed: bool = False
    trainable: bool = False
    one_device: bool = False

    def __post_init__(self) -> None:
        faults = [
            _not_one_of(name, getattr(self, name), choices)
            for name, choices in (
                ("phase", get_args(Phase)),
                ("precision", (None, *get_args(Precision))),
                ("optimizer", get_args(Optimizer)),
                ("attn_implementation", ATTENTIONS),
                ("loss", (None, *get_args(Loss))),
            )
        ]
        for name in ("batch_size", "seq_len", "in_flight", "logits_to_keep"):
            value = getattr(self, name)
            if value is None and name == "logits_to_keep":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                faults.append(_fault(name, value, "a whole number of 1 or more is needed", "Give 1 or more"))
        for name in ("lora_rank", "new_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                faults.append(_fault(name, value, "a whole number of 0 or more is needed", "Give 0 or more"))
        for name in ("gradient_checkpointing", "accumulating", "padded", "packed", "trainable", "one_device"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                faults.append(_fault(name, value, "not a bool", "Use True or False"))
        if self.packed is True and self.phase == "generate":
            faults.append(_fault("packed", True, "a sequence that grows has a row of its own", "Leave it out"))
        if self.packed is True and self.padded is True:
            faults.append(_fault("packed", True, "padding is what packing leaves out", "Leave out packed or padded"))
        found = [fault for fault in faults if fault is not None]
        if found:
            raise ConfigError(found)

    @property
    def used_precision(self) -> Precision:
        """The precision that is meant when none is given."""
        return self.precision or ("bf16-mixed" if self.phase == "train" else "bf16")

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype in which weights are held."""
        return torch.bfloat16 if self.used_precision == "bf16" else torch.float32

    @property
    def words(self) -> str:
        """What is run, for people: "4 x 2048 tokens, bf16, adamw, gradient checkpointing"."""
        lengths = f"{self.seq_len}" + (f" + {self.new_tokens}" if self.new_tokens else "")
        words = [f"{self.batch_size} x {lengths} tokens", self.used_precision]
        if self.phase == "train":
            words.append(self.optimizer)
        if self.gradient_checkpointing:
            words.append("gradient checkpointing")
        if self.attn_implementation != "sdpa":
            words.append(self.attn_implementation)
        if self.accumulating:
            words.append("several micro-batches a step")
        if self.padded:
            words.append("padded")
        if self.packed:
            words.append("packed")
        if self.lora_rank:
            words.append(f"LoRA of rank {self.lora_rank}")
        if self.in_flight > 1:
            words.append(f"{self.in_flight} micro-batches in flight")
        return ", ".join(words)

    @property
    def length(self) -> int:
        """Tokens of a sequence at the end of the pass."""
        return self.seq_len + (self.new_tokens if self.phase == "generate" else 0)


def within_positions(wanted: PassSpec, given: Mapping[str, Any], positions: int | None) -> PassSpec:
    """`wanted` with a default seq_len that the model has positions for; a length that was given stays.

    Raises ConfigError for more logits than a sequence of that length has.
    """
    if "seq_len" in given or positions is None:
        return wanted
    made = replace(wanted, seq_len=min(wanted.seq_len, positions))
    _check_logits(made, given)
    return made


_TRAINING_ONLY = ("optimizer", "gradient_checkpointing", "in_flight", "accumulating")
_NO_EFFECT: dict[str, tuple[str, ...]] = {
    "train": ("new_tokens", "trainable"),
    "forward": (*_TRAINING_ONLY, "new_tokens"),
    "generate": (*_TRAINING_ONLY, "logits_to_keep", "loss"),
}
"""Fields that change nothing of a phase."""


def pass_spec(given: dict[str, Any], **fixed: Any) -> PassSpec:
    """A PassSpec of keywords that somebody typed.

    Raises ConfigError that names unknown ones with the nearest known, those that change nothing of the phase, and more
    logits than there are tokens.
    """
    known = {field.name for field in fields(PassSpec)} - set(fixed)
    if unknown := [name for name in given if name not in known]:
        faults = []
        for name in unknown:
            near = get_close_matches(name, known, 1)
            fix = f'Did you mean "{near[0]}"?' if near else f"Use some of {', '.join(sorted(known))}"
            faults.append(Finding("error", "unknown-keyword", name, repr(given[name]), "there is no such setting", fix))
        raise ConfigError(faults)
    made = PassSpec(**given, **fixed)
    if idle := [name for name in given if name in _NO_EFFECT[made.phase]]:
        why, fix = f'it changes nothing of phase="{made.phase}"', "Leave it out"
        raise ConfigError([Finding("error", "no-effect", name, repr(given[name]), why, fix) for name in idle])
    _check_logits(made, given)
    return made


def _check_logits(wanted: PassSpec, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for more logits of a sequence than it has tokens; a PassSpec of our own means all of them then."""
    kept = wanted.logits_to_keep
    if kept is None or kept <= wanted.seq_len:
        return
    by_default = "" if "seq_len" in given else " by default"
    why = f"a sequence has {wanted.seq_len} tokens{by_default} (seq_len), {kept - wanted.seq_len} fewer than {kept}"
    fix = f"Give {wanted.seq_len} or less, or leave it out for the logits of all"
    raise ConfigError(Finding("error", "too-many-logits", "logits_to_keep", str(kept), why, fix))


def _not_one_of(name: str, value: object, choices: tuple[object, ...]) -> Finding | None:
    if value in choices:
        return None
    shown = ", ".join(f'"{choice}"' for choice in choices if choice is not None)
    return _fault(name, value, "not a choice", f"Use one of {shown}")


def _fault(name: str, value: object, why: str, fix: str) -> Finding:
    return Finding("error", name.replace("_", "-"), name, repr(value), why, fix)
