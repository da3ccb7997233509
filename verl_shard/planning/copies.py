"""A scoring role, reward or ref, with a whole copy on each of its GPUs (strategy data_parallel): bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from verl_shard.config.roles import Role, RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.planning.layout import Layouts, Placed
from verl_shard.planning.settings import Settings
from verl_shard.planning.step_time import StepTimes
from verl_shard.planning.times import PassTime


def has_copies(own: RoleConfig) -> bool:
    """Whether each GPU of the role has all of its model."""
    return own.strategy == "data_parallel"


def copied_roles(settings: Settings) -> dict[Role, RoleConfig]:
    """Those roles, but for a reference that is the actor without its adapters."""
    in_actor = ("ref",) if settings.ref_in_actor else ()
    return {role: own for role, own in settings.roles.items() if has_copies(own) and role not in in_actor}


def as_run(own: RoleConfig, n: int, workload: Workload) -> RoleConfig:
    """With the batches that n copies work in: none larger than an n-th of the step, so that all have something to do."""
    most = ceil(workload.sequences / n)
    return replace(own, micro_batch_size=min(own.micro_batch_size or most, most))


@dataclass
class CopiedLayouts(Layouts):
    """Layouts, with roles of which each GPU has a copy."""

    def _cut(self, role: Role, own: RoleConfig, devices: tuple[int, ...], room: Sequence[int]) -> Placed:
        if not has_copies(own):
            return super()._cut(role, own, devices, room)
        one = super()._cut(role, own, devices[:1], room)
        (run,), (held,) = one.runs.values(), one.resident.values()
        return replace(one, runs=dict.fromkeys(devices, run), resident=dict.fromkeys(devices, held))


def copies_seconds(times: StepTimes, phase: str, own: RoleConfig, held: Placed, workload: Workload) -> PassTime:
    """A phase on all copies at once: as long as the one with most batches takes, and no less than the one process needs to
    launch the work of all. own: as run."""
    run, n = next(iter(held.runs.values())), len(held.runs)
    batches = ceil(workload.sequences / (own.micro_batch_size or 1))
    alone = times.of(phase, own, [run], streamed=own.offload == "stream")
    share = alone * (ceil(batches / n) / batches)
    return replace(share, seconds=max(share.seconds, alone.host_s), host_s=alone.host_s)
