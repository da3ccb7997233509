"""The models of the roles, read once each, and their traced passes, made once each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from verl_shard.config.roles import Role, RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.memory.cached import cached_lora, cached_trace, description_of
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import Trace
from verl_shard.models.packed import PACKED
from verl_shard.models.read import read_model
from verl_shard.models.spec import ModelSpec

PHASES_OF: dict[Role, tuple[str, ...]] = {
    "rollout": ("generate",),
    "reward": ("reward",),
    "actor": ("old_log_prob", "update_actor"),
    "ref": ("ref_log_prob",),
    "critic": ("values", "update_critic"),
}
PHASES = ("generate", "reward", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor")
"""The phases of a step in their order, by verl's names."""
ROLE_OF: dict[str, Role] = {phase: role for role, phases in PHASES_OF.items() for phase in phases}


def pass_of(phase: str, own: RoleConfig, workload: Workload) -> PassSpec:
    """One micro-batch of a phase, at the longest lengths.

    own: the configuration of the role whose phase it is, without blanks.
    """
    common: dict[str, Any] = {
        "precision": own.precision,
        "attn_implementation": own.attn_implementation,
        "batch_size": own.micro_batch_size,
        "lora_rank": own.lora_rank or 0,
    }
    if phase == "generate":
        common |= {"seq_len": workload.prompt_length, "new_tokens": workload.response_length}
        return PassSpec(phase="generate", trainable=True, padded=True, **common)
    packed = workload.remove_padding and phase != "reward"
    # Of a causal model our engine leaves out a mask of padding behind all that counts (verl_plugin/engine_inputs.py).
    common |= {"seq_len": workload.sequence_length, "packed": packed, "padded": phase == "reward"}
    if packed and own.attn_implementation == "sdpa":
        common["attn_implementation"] = PACKED
    taken = "verl-fused" if own.logits == "fused" else "verl-ppo"
    loss = {
        "old_log_prob": taken,
        "ref_log_prob": taken,
        "update_actor": taken,
        "update_critic": "value",
    }.get(phase)
    if loss == "verl-ppo" and own.logits == "responses":
        # Of padded rows there are those behind the shortest prompt.
        behind = workload.sequence_length - workload.shortest_prompt_length
        common["logits_to_keep"] = workload.response_length if packed else behind
    if phase.startswith("update"):
        return PassSpec(
            phase="train",
            loss=loss,  # type: ignore[arg-type]
            optimizer=own.optimizer,  # type: ignore[arg-type]
            gradient_checkpointing=bool(own.gradient_checkpointing),
            in_flight=own.in_flight or 1,
            accumulating=workload.mini_batch_sequences > (own.micro_batch_size or 1) * (own.in_flight or 1),
            **common,
        )
    trainable = phase in ("old_log_prob", "values")
    return PassSpec(phase="forward", loss=loss, trainable=trainable, **common)  # type: ignore[arg-type]


@dataclass
class Models:
    """Reads and traces on demand. one_device: of each role's model there is a whole on one GPU; see PassSpec."""

    trust_remote_code: bool = False
    one_device: bool = False
    _read: dict[Any, tuple[ModelSpec, nn.Module]] = field(default_factory=dict)
    _traced: dict[Any, Trace] = field(default_factory=dict)
    _described: dict[int, tuple[nn.Module, Hashable | None]] = field(default_factory=dict)

    def read(self, own: RoleConfig, dtype: torch.dtype) -> tuple[ModelSpec, nn.Module]:
        """The model of a role, its floating-point weights counted as `dtype`. Raises ConfigError."""
        key = (_key(own.model), own.task, dtype)
        if key not in self._read:
            self._read[key] = read_model(
                own.model, task=own.task, dtype=dtype, trust_remote_code=self.trust_remote_code
            )
        return self._read[key]

    def adapted(self, own: RoleConfig, wanted: PassSpec) -> tuple[ModelSpec, nn.Module]:
        """The same, under its adapters when it has some."""
        spec, module = self.read(own, wanted.weight_dtype)
        if not wanted.lora_rank:
            return spec, module
        key = (_key(own.model), own.task, wanted.weight_dtype, wanted.lora_rank, wanted.gradient_checkpointing)
        if key not in self._read:
            self._read[key] = cached_lora(spec, module, wanted, self._description(module))
        return self._read[key]

    def trace(self, own: RoleConfig, wanted: PassSpec) -> Trace:
        """A pass of the role's model. Raises ConfigError when it cannot be traced."""
        wanted = replace(wanted, one_device=self.one_device)
        key = (_key(own.model), own.task, wanted)
        if key not in self._traced:
            spec, module = self.adapted(own, wanted)
            self._traced[key] = cached_trace(spec, module, wanted, self._description(module))
        return self._traced[key]

    def _description(self, module: nn.Module) -> Hashable | None:
        if id(module) not in self._described:
            self._described[id(module)] = (module, description_of(module))
        return self._described[id(module)][1]


def _key(model: Any) -> Any:
    """What tells models apart: text and paths by value, configurations and modules by identity (they are kept alive)."""
    return str(model) if isinstance(model, str) or hasattr(model, "__fspath__") else id(model)
