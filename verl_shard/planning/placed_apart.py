"""Roles side by side on GPUs of their own: the placement search over what roles take on each number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_shard.config.roles import Role
from verl_shard.planning.copies import as_run, has_copies
from verl_shard.planning.layout import holder_of, limit_of
from verl_shard.planning.models import PHASES_OF
from verl_shard.planning.placement import Placement, PlacementSearch, RoleCost, search_placement
from verl_shard.planning.search import key_of
from verl_shard.planning.settings import Settings

if TYPE_CHECKING:
    from verl_shard.planning.ours import OurEngine


def placement_of(engine: OurEngine, settings: Settings) -> PlacementSearch:
    """The placement with the fastest step that fits, and the next best ones. Raises ConfigError for pins that contradict."""
    key = key_of(settings)
    if key not in engine.searched:
        engine.searched[key] = _search(engine, settings)
    return engine.searched[key]


def _search(engine: OurEngine, settings: Settings) -> PlacementSearch:
    apart = ("rollout", *(["ref"] if settings.ref_in_actor else []))
    roles = [role for role, own in settings.roles.items() if role not in apart and own.device_type != "cpu"]
    pinned: dict[str, tuple[int, ...]] = {
        role: own.devices for role, own in settings.roles.items() if role in roles and isinstance(own.devices, tuple)
    }
    return search_placement(
        lambda role, n: _cost(engine, settings, role, n),  # type: ignore[arg-type]
        roles,
        nodes=[len(node.cards) for node in engine.inventory.nodes],
        memory=min(limit_of(gpu.card) for gpu in engine.inventory.gpus),
        pinned=pinned,
        counts=_counts(engine),
        beside={
            role: {phase: engine.seconds_of(phase, settings, None) for phase in _phases(settings, role)}
            for role, own in settings.roles.items()
            if role not in apart and own.device_type == "cpu"
        },
    )


def _counts(engine: OurEngine) -> tuple[int, ...] | None:
    """On several nodes what divides one's GPUs: one process drives a set, and sets of such sizes can be given out so that
    none spans two nodes."""
    nodes = engine.inventory.nodes
    on_node = min(len(node.cards) for node in nodes)
    return tuple(n for n in range(1, on_node + 1) if on_node % n == 0) if len(nodes) > 1 else None


def _cost(engine: OurEngine, settings: Settings, role: Role, n: int) -> RoleCost | None:
    """What a role takes on n GPUs that it has to itself; None for a number other than the one that was set, for one with more
    GPUs than Blocks, and for a single copy where there are to be several."""
    own = settings.roles[role]
    if isinstance(own.devices, int) and own.devices != n:
        return None
    if has_copies(own):
        if n == 1:
            return None
        settings = settings.changed(role, micro_batch_size=as_run(own, n, engine.workload).micro_batch_size)
        own = settings.roles[role]
    elif own.offload != "stream" and n > engine.layouts.n_blocks(role, own):
        return None
    held = engine.layouts.alone(role, own, n)
    if len(held.runs) < n and own.offload != "stream":
        return None
    phases = _phases(settings, role)
    peak = max(engine.layouts.peak_alone(phase, settings, held) for phase in phases)
    seconds = {phase: engine.seconds_of(phase, settings, held) for phase in phases}
    resident = max(held.resident.values())
    return RoleCost(seconds, resident, max(peak, resident))


def _phases(settings: Settings, role: Role) -> list[str]:
    """The phases that run on a role's module: an actor's generation, and with LoRA the reference, among them."""
    return [
        phase
        for other, phases in PHASES_OF.items()
        for phase in phases
        if other in settings.roles and holder_of(phase, settings)[0] == role
    ]


def in_words(placement: Placement) -> str:
    """ "actor, ref on 0-3; critic on 4-7: 12.3 s a step"."""
    from verl_shard.planning.report import ids_in_words

    sets = "; ".join(f"{', '.join(s.roles)} on {ids_in_words(s.gpus)}" for s in placement.sets)
    over = "" if not placement.overrun else ", does not fit"
    return f"{sets}: {placement.step_s:.1f} s a step{over}"
