"""What a backend makes of settings: bytes by phase and GPU, seconds, host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import Role
from verl_shard.config.workload import Workload
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.planning.plan import Check, PlannedPhase
from verl_shard.planning.rates import Rates
from verl_shard.planning.search import Evaluation
from verl_shard.planning.settings import Settings


class Engine(Protocol):
    """One backend, for a workload on an inventory."""

    inventory: Inventory
    workload: Workload

    def completed(self, settings: Settings) -> Settings:
        """Settings with what only the models and the GPUs can tell, in fields that were left blank. Raises ConfigError."""

    def can_run(self, settings: Settings) -> bool:
        """Whether there is such a run at all, whatever its memory."""

    def evaluate(self, settings: Settings) -> Evaluation:
        """Bytes, seconds and host memory of a step."""

    def phases(self, settings: Settings) -> tuple[PlannedPhase, ...]:
        """The same, phase by phase, for the report."""

    def checks(self, settings: Settings) -> list[Check]:
        """What people are told to check by hand."""

    def host_parts(self, settings: Settings) -> Mapping[str, int]:
        """What a node's host memory is made of."""

    def devices_of(self, settings: Settings, role: Role) -> tuple[int, ...]:
        """The GPUs of a role."""

    def map_of(self, settings: Settings, role: Role) -> DeviceMap | None:
        """The device map of a role that has one."""

    def model_of(self, settings: Settings, role: Role) -> tuple[str, int]:
        """The name of a role's model, and its parameters."""

    def other_placements(self, settings: Settings) -> tuple[str, ...]:
        """In words, the next best placements."""

    def over(self, inventory: Inventory) -> Engine:
        """The same on other GPUs; what was traced is kept."""


def engine_for(
    settings: Settings,
    workload: Workload,
    inventory: Inventory,
    rates: Rates | None,
    *,
    side_by_side: bool,
    trust_remote_code: bool,
) -> Engine:
    """The engine of the settings' backend."""
    from verl_shard.planning.models import Models

    models = Models(trust_remote_code)
    if settings.backend == "device_map":
        from verl_shard.planning.ours import OurEngine

        return OurEngine(workload, inventory, models, rates, side_by_side)
    from verl_shard.planning.stock import StockEngine

    return StockEngine(workload, inventory, models, rates)
