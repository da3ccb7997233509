"""What a role of stock verl is: its model, how it is sharded, and what it holds between its phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from verl_shard.config.roles import TRAINED, Role, RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.memory.stock import terms
from verl_shard.memory.stock.micro_batch import Entropy, MicroBatch
from verl_shard.memory.stock.timeline import Sharding
from verl_shard.memory.stock.units import ShardedBackend, Units
from verl_shard.models.spec import ModelSpec

CRITIC_TOKENS = 32768
"""critic.ppo_infer_max_token_len_per_gpu: verl batches the critic by tokens only, and ignores its other batch keys."""
_HELD = {"bf16-mixed": 4, "bf16": 2, "fp32": 4}
_STATES = {"adamw": 2, "adamw-fused": 2, "sgd": 0}
_TEMPORARIES = {"adamw": 1, "adamw-fused": 0, "sgd": 1}


@dataclass(frozen=True)
class StockRole:
    """A role that FSDP shards. own: its configuration, with blanks as verl fills them."""

    role: Role
    spec: ModelSpec
    module: nn.Module
    own: RoleConfig
    units: Units
    backend: ShardedBackend
    ranks: int

    @property
    def trained(self) -> bool:
        return self.role in TRAINED

    @property
    def held(self) -> int:
        """Bytes of an element of the sharded weights."""
        return _HELD[self.own.precision or ("bf16-mixed" if self.trained else "bf16")]

    @property
    def gathered(self) -> int:
        """Bytes of an element of a gathered unit."""
        return self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.own.precision == "fp32" else torch.bfloat16

    @property
    def on_host(self) -> bool:
        """A ref always is (CPUOffload, CPUOffloadPolicy); offload_policy puts a trained role there too."""
        return self.role == "ref" or bool(self.own.offload_policy)

    @property
    def sharding(self) -> Sharding:
        return Sharding(
            backend=self.backend, ranks=self.ranks, held=self.held, gathered=self.gathered, on_host=self.on_host
        )

    @property
    def weights(self) -> int:
        """Of the shard, wherever it is."""
        return terms.weights(self.units.n_params, self.ranks, self.held)

    @property
    def gradients(self) -> int:
        return terms.gradients(self.units.n_trained, self.ranks, self.held) if self.trained else 0

    @property
    def states(self) -> int:
        """Of the optimizer, wherever they are."""
        per_gradient = _STATES[self.own.optimizer or "adamw"]
        return per_gradient * terms.gradients(self.units.n_trained, self.ranks, self.held) if self.trained else 0

    @property
    def temporaries(self) -> int:
        """Of the optimizer's step on the GPU."""
        lists = _TEMPORARIES[self.own.optimizer or "adamw"]
        on_gpu = self.trained and not self.on_host
        return lists * terms.foreach(self.units.n_trained, self.ranks, self.held) if on_gpu else 0

    @property
    def weights_stay(self) -> bool:
        """Whether the shard is on the GPU while the role does nothing."""
        return not (self.on_host or self.own.param_offload)

    @property
    def states_stay(self) -> bool:
        return self.trained and not (self.on_host or self.own.optimizer_offload)

    @property
    def views_stay(self) -> bool:
        """Whether weights that leave the GPU are still viewed there: fsdp's on one rank, where bf16 is cast to nothing."""
        return self.backend == "fsdp" and self.ranks == 1 and self.held == self.gathered

    @property
    def idle(self) -> int:
        """Bytes on the GPU between the role's phases, from the second step on."""
        return self.weights * self.weights_stay + self.states * self.states_stay

    @property
    def root_left(self) -> int:
        """What stays gathered after a forward without a backward: fsdp's root on several ranks.

        FSDP1 does not free its root after a forward, and verl reshards it only where fsdp_size > 1 is set
        (transformer_impl.py, EngineEvalModeCtx.__exit__).
        """
        root = self.units.units[self.units.root]
        return self.gathered * root.n_params if self.backend == "fsdp" and self.ranks > 1 else 0

    @property
    def largest_tensor(self) -> int:
        """Elements."""
        return max(n for unit in self.units.units for n in unit.params)

    @property
    def aliases(self) -> int:
        """Elements of tied weights, once for each further name."""
        return sum(t.n_elements for t in self.spec.tensors if t.is_alias and not t.is_buffer)

    @property
    def largest_layer(self) -> int:
        """Elements of the largest unit that is not the root."""
        return max((unit.n_params for unit in self.units.units[:-1]), default=0)


def micro_batch_of(role: StockRole, phase: str, workload: Workload, **settings: Any) -> tuple[MicroBatch, bool]:
    """The micro-batch of a phase at the longest lengths, and whether an optimizer step has more than one.

    settings: flash_attn, temperature, entropy_loss, compiled of `stock_phases`.
    """
    training = phase.startswith("update")
    in_step = workload.mini_batch_sequences if training else workload.sequences
    mine = max(in_step // role.ranks, 1)
    length = workload.sequence_length
    if role.role == "critic" and role.own.micro_batch_size is None:
        wanted = max(CRITIC_TOKENS // length, 1)
    else:
        wanted = role.own.micro_batch_size or 1
    sequences = min(wanted, mine)
    entropy: Entropy = "none"
    if phase == "old_log_prob" or (phase == "update_actor" and settings["entropy_loss"]):
        entropy = "chunked" if role.own.logits == "chunked" else "full"
    attention = role.own.attn_implementation or "flash_attention_2"
    output: Literal["log_probs", "values"] = "values" if role.role == "critic" else "log_probs"
    made = MicroBatch(
        sequences=sequences,
        length=length,
        packed=workload.remove_padding,
        training=training,
        output=output,
        entropy=entropy,
        flash=settings["flash_attn"],
        fused=role.own.logits == "fused" and output == "log_probs",
        temperature=settings["temperature"] if output == "log_probs" else 1.0,
        masked=attention != "flash_attention_2",
        unpads=attention == "flash_attention_2" and not workload.remove_padding,
        compiled=settings["compiled"],
        gradient_checkpointing=training and role.own.gradient_checkpointing is not False,
        attn_implementation=attention,
        dtype=role.dtype,
    )
    return made, training and mine > sequences
