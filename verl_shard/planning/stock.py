"""Stock verl as a backend of plans: FSDP or FSDP2 over all GPUs, with a rollout engine, all roles colocated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl_shard.common.errors import config_error
from verl_shard.common.units import format_bytes
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import TRAINED, Role
from verl_shard.config.workload import Workload
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.memory.stock.micro_batch import Traces
from verl_shard.memory.stock.phases import PhaseRow, has_flash_attn, stock_phases
from verl_shard.planning.engine_share import EngineShares
from verl_shard.planning.models import Models
from verl_shard.planning.plan import Check, PlannedPhase
from verl_shard.planning.rates import Rates
from verl_shard.planning.search import Evaluation, key_of
from verl_shard.planning.settings import Settings
from verl_shard.planning.stock_time import phase_seconds

# What is there for a moment before the step or between two phases is no row of its own in a plan.
_SHOWN = (
    "generate",
    "reward",
    "old_log_prob",
    "ref_log_prob",
    "values",
    "update_critic",
    "update_actor",
    "weight_sync",
)


@dataclass
class StockEngine:
    """See Engine."""

    workload: Workload
    inventory: Inventory
    models: Models
    rates: Rates | None = None
    _traces: Traces = field(default_factory=Traces)
    _rows: dict[Any, list[PhaseRow]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {len(node.cards) for node in self.inventory.nodes}
        cards = {gpu.card for gpu in self.inventory.gpus}
        if len(sizes) > 1 or len(cards) > 1:
            why = "verl gives every rank an equal shard, so that GPUs and nodes must be equal"
            raise config_error("unequal-gpus", "gpus", self.inventory.words, why, "Plan for equal ones")

    def completed(self, settings: Settings) -> Settings:
        return self._shares.completed(settings)

    def can_run(self, settings: Settings) -> bool:
        n = len(self.inventory)
        sizes = [own.tensor_parallel_size or 1 for own in settings.roles.values()]
        return all(n % size == 0 for size in sizes) and self._shares.can_start(settings)

    @property
    def _shares(self) -> EngineShares:
        return EngineShares(self.models, self.workload, self.inventory)

    def evaluate(self, settings: Settings) -> Evaluation:
        rows = self._made(settings)
        return Evaluation(
            bytes={(row.phase, 0): row.n_bytes for row in rows},  # ranks and cards are equal: the first stands for all
            limits={gpu.id: gpu.card.memory for gpu in self.inventory.gpus},
            seconds=sum(self._seconds(row, settings) for row in rows),
            host=dict.fromkeys(range(len(self.inventory.nodes)), max(row.host_bytes for row in rows)),
            host_limits={i: node.host_memory for i, node in enumerate(self.inventory.nodes)},
        )

    def phases(self, settings: Settings) -> tuple[PlannedPhase, ...]:
        n = len(self.inventory)
        return tuple(
            PlannedPhase(
                phase=row.phase,
                role=row.role,
                peaks=dict.fromkeys(range(n), row.n_bytes),
                reserved=row.n_bytes,
                seconds=self._seconds(row, settings),
                parts={part.name: part.n_bytes for part in row.parts},
                unmeasured=tuple(part.name for part in row.parts if not part.measured),
            )
            for row in self._made(settings)
            if row.phase in _SHOWN
        )

    def checks(self, settings: Settings) -> list[Check]:
        """The five that people are told to make before they turn param_offload on, and what popular advice has wrong."""
        rows = self._made(settings)
        fullest = max(rows, key=lambda row: row.n_bytes)
        said = ", ".join(
            f"{part.name} {format_bytes(part.n_bytes)}" for part in sorted(fullest.parts, key=lambda p: -p.n_bytes)
        )
        n, w = len(self.inventory), self.workload
        found = [Check("ok", "what fills a GPU", f"{fullest.phase}: {said}")]
        found.append(Check("ok", "shards", f"fsdp_size=-1: one shard group of {n}, which divides the world of {n}"))
        copy = next(
            (part for row in rows if row.phase == "weight_sync" for part in row.parts if part.name == "rollout engine"),
            None,
        )
        if copy is not None:
            found.append(
                Check(
                    "ok",
                    "second copy of the weights",
                    f"the rollout engine's own, {format_bytes(copy.n_bytes)} a GPU, inside its share",
                )
            )
        found += [self._batch(role, settings) for role in settings.roles if role in TRAINED]
        if w.sequences % n:
            why = f"{w.train_batch_size} prompts x {w.n} = {w.sequences} sequences are not shared out evenly over {n} ranks"
            found.append(Check("fault", "batch keys", why))
        host, there = max(row.host_bytes for row in rows), self.inventory.nodes[0].host_memory
        level = "ok" if there is None or host <= there else "fault"
        of = "not given" if there is None else format_bytes(there)
        found.append(
            Check(
                level, "host memory", f"{format_bytes(host)} a node in RAM (there is no disk tier); the node's is {of}"
            )
        )
        found.append(
            Check(
                "ok",
                "param_offload",
                "frees other phases only: the actor's own update needs its weights, gradients and states whatever it says",
            )
        )
        if "ref" in settings.roles and not settings.ref_in_actor:
            found.append(
                Check("ok", "ref.param_offload", "changes nothing: verl always keeps an FSDP reference on the host")
            )
        return found

    def _batch(self, role: Role, settings: Settings) -> Check:
        n, ranks = self.workload.mini_batch_sequences, len(self.inventory)
        micro = settings.roles[role].micro_batch_size or 1
        if n % ranks:
            return Check(
                "fault",
                "batch keys",
                f"{role}: a mini-batch of {n} sequences is not shared out evenly over {ranks} ranks",
            )
        own = n // ranks
        if own % min(micro, own):
            why = f"{role}: {own} sequences a rank are no multiple of micro_batch_size {micro}"
            return Check("fault", "batch keys", why)
        return Check(
            "ok",
            "batch keys",
            f"{role}: {own} sequences a rank and mini-batch = {own // min(micro, own)} x {min(micro, own)}",
        )

    def host_parts(self, settings: Settings) -> dict[str, int]:
        fullest = max(self._made(settings), key=lambda row: row.host_bytes)
        return {part.name: part.n_bytes for part in fullest.host}

    def devices_of(self, settings: Settings, role: Role) -> tuple[int, ...]:
        return tuple(range(len(self.inventory)))

    def map_of(self, settings: Settings, role: Role) -> DeviceMap | None:
        return None

    def model_of(self, settings: Settings, role: Role) -> tuple[str, int]:
        spec, _ = self.models.read(settings.roles[role], torch.bfloat16)
        return spec.name, spec.n_params

    def other_placements(self, settings: Settings) -> tuple[str, ...]:
        return ()

    def over(self, inventory: Inventory) -> StockEngine:
        larger = replace(self, inventory=inventory)
        larger._traces = self._traces
        larger._rows = {}
        return larger

    def _made(self, settings: Settings) -> list[PhaseRow]:
        key = key_of(settings)
        if key not in self._rows:
            roles = {role: own for role, own in settings.roles.items() if role != "reward" or own.device_type != "cpu"}
            self._rows[key] = stock_phases(
                {role: self.models.read(own, torch.bfloat16) for role, own in roles.items() if role != "rollout"},
                roles,
                self.workload,
                backend=settings.backend,  # type: ignore[arg-type]
                n_ranks=len(self.inventory),
                ranks_per_node=len(self.inventory.nodes[0].cards),
                card_memory=self.inventory.gpus[0].card.memory,
                traces=self._traces,
            )
        return self._rows[key]

    def _seconds(self, row: PhaseRow, settings: Settings) -> float:
        flash = has_flash_attn(settings.roles)
        return phase_seconds(row, settings, self.workload, self.inventory, self.models, self.rates, flash_attn=flash)
