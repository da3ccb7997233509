"""How long each phase of a step takes on the device_map engine, at the lengths that responses have on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from verl_shard.config.roles import RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import WEIGHTS
from verl_shard.models.decoding import CAPTURED, GRAPH_STEPS, takes_ready_masks
from verl_shard.planning.layout import travels
from verl_shard.planning.models import Models, pass_of
from verl_shard.planning.rates import Rates
from verl_shard.planning.times import (
    PassTime,
    cpu_seconds,
    generate_seconds,
    host_copy_seconds,
    optimizer_seconds,
    pass_seconds,
)


@dataclass
class StepTimes:
    """Seconds of phases. Lengths other than the longest are taken in proportion: tokens decide all but attention."""

    models: Models
    workload: Workload
    rates: Rates
    _known: dict[Any, PassTime] = field(default_factory=dict)

    def of(self, phase: str, own: RoleConfig, stages: Sequence[tuple[int, int]], *, streamed: bool = False) -> PassTime:
        """One phase of one step, all its micro-batches, mini-batches and epochs.

        own: of the role whose module runs. stages: the Blocks of each of its GPUs, none of a role that scores on the CPU.
        streamed: its blocks come over from the host for each micro-batch, while the one before is worked on: the longer of
        the two counts.
        """
        wanted = pass_of(phase, own, self.workload)
        model = own.model if isinstance(own.model, str) else id(own.model)
        key = (phase, model, wanted, tuple(stages), streamed, own.device_type)
        if key not in self._known:
            self._known[key] = self._made(phase, own, stages, streamed)
        return self._known[key]

    def _made(self, phase: str, own: RoleConfig, stages: Sequence[tuple[int, int]], streamed: bool) -> PassTime:
        w = self.workload
        wanted = pass_of(phase, own, w)
        traced = self.models.trace(own, wanted)
        at_once = wanted.batch_size
        if phase == "generate":
            mean = w.mean_response_length or w.response_length
            made = generate_seconds(
                traced, wanted, self.rates, stages=stages, new_tokens=mean,
                graph_steps=self._graph_steps(own, wanted, len(stages)),
            )  # fmt: skip
            return made * ceil(w.sequences / at_once)
        share = w.mean_sequence_length / w.sequence_length
        n_micro = ceil(w.sequences / at_once)
        if own.device_type == "cpu":
            assert wanted.phase == "forward", "what is trained beside GPUs is on them"
            return cpu_seconds(traced, self.rates, n_micro=n_micro) * share
        epochs = w.ppo_epochs if phase.startswith("update") else 1
        made = pass_seconds(traced, wanted, self.rates, stages=stages, n_micro=n_micro) * (share * epochs)
        if phase.startswith("update"):
            n_steps = epochs * ceil(w.sequences / w.mini_batch_sequences)
            made = made + optimizer_seconds(traced, self.rates, stages=stages) * n_steps
        if streamed:
            blocks = travels(self.models.read(own, wanted.weight_dtype)[0])
            copied = int(traced.kinds[0, blocks, WEIGHTS].sum())
            copy_s = n_micro * host_copy_seconds(copied, self.rates)
            made = replace(made, seconds=max(made.seconds, copy_s), copy_s=made.copy_s + copy_s)
        return made

    def _graph_steps(self, own: RoleConfig, wanted: PassSpec, n_gpus: int) -> int:
        """As runtime.generation_rows: CUDA graphs are of models on one GPU."""
        if n_gpus > 1 or own.device_type == "cpu" or own.attn_implementation not in CAPTURED:
            return 0
        return GRAPH_STEPS if takes_ready_masks(self.models.read(own, wanted.weight_dtype)[1]) else 0
