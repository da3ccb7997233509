"""Which roles share GPUs, and how many GPUs each set of roles gets: the placement with the fastest step that fits.

The search is what HybridFlow describes in its section 6 (Sheng et al., EuroSys 2025, arXiv 2409.19256) and verl does
not ship. Roles are shared out into sets that have GPUs of their own. In each stage of a step the sets work side by side,
and the roles of one set, which share all of its GPUs, one after the other; a stage begins when the one before is done
everywhere::

    step = sum over stages of  max over sets of  sum over roles of the set of  seconds(role, stage, GPUs of the set)

On each GPU of a set is what all its roles keep there, and what the one that works adds::

    peak of a set = max over its roles r of  ( peak(r) + sum over its other roles of resident )

Nothing here knows a model: seconds and bytes come from a function of the role and its number of GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from verl_shard.planning.placement_exact import Choice, least_overrun, search_exact
from verl_shard.planning.placement_milp import search_milp
from verl_shard.planning.placement_rules import STAGES, CostOf, RoleCost, Rules, gpu_counts, groups_of, same_pins

__all__ = [
    "STAGES", "CostOf", "PlacedSet", "Placement", "PlacementSearch", "RoleCost", "gpu_counts", "search_placement",
]  # fmt: skip

EXACT_GPUS = 8
EXACT_ROLES = 5
"""Up to so many of both every placement is looked at (at most 2,584); beyond, HiGHS solves a program."""
_ALL_ORDERS = 6
"""Up to so many sets GPUs are given out in every order, to find one in which the sets span the fewest nodes."""


@dataclass(frozen=True)
class PlacedSet:
    """Roles that share GPUs.

    seconds: by stage, of all its roles. peak: bytes on each of its GPUs when they are fullest, which is while `fullest`
    works. overrun: by how many bytes that is more than a GPU has; 0 when the set fits.
    """

    roles: tuple[str, ...]
    gpus: tuple[int, ...]
    seconds: Mapping[str, float]
    peak: int
    fullest: str
    overrun: int


@dataclass(frozen=True)
class Placement:
    """Sets of roles on GPUs. stage_s: seconds of each stage. bound_by: the roles of the set, or those without GPUs, that a
    stage waits for."""

    sets: tuple[PlacedSet, ...]
    step_s: float
    stage_s: Mapping[str, float]
    bound_by: Mapping[str, tuple[str, ...]]

    @property
    def n_gpus(self) -> int:
        """The GPUs it uses."""
        return sum(len(placed.gpus) for placed in self.sets)

    @property
    def overrun(self) -> int:
        """The bytes that its fullest GPU lacks; 0 when it fits."""
        return max(placed.overrun for placed in self.sets)

    def set_of(self, role: str) -> PlacedSet:
        """The set that a role is in. Raises KeyError for a role that was not placed."""
        for placed in self.sets:
            if role in placed.roles:
                return placed
        raise KeyError(role)


@dataclass(frozen=True)
class PlacementSearch:
    """What was found.

    best: the fastest of those that fit. When none does, of those whose largest overrun is smallest, then that of the first
        role's set, of the second's and so on.
    runners_up: the best placements with other sets of roles, the best first, none worse in memory. For more than five
        roles that are not always together only the 64 ways to share them out with the fewest sets are compared.
    gap: no placement over the counts has a step faster than best.step_s * (1 - gap). 0 unless the solver
        ran out of time; runners-up are then what was found.
    """

    best: Placement
    runners_up: tuple[Placement, ...]
    method: Literal["exact", "milp"]
    gap: float = 0.0

    @property
    def fits(self) -> bool:
        return self.best.overrun == 0


def search_placement(
    cost_of: CostOf,
    roles: Sequence[str],
    *,
    nodes: Sequence[int],
    memory: int | None,
    together: Collection[tuple[str, str]] = (),
    apart: Collection[tuple[str, str]] = (),
    pinned: Mapping[str, Sequence[int]] | None = None,
    transfers: Mapping[tuple[str, str], float] | None = None,
    counts: Collection[int] | None = None,
    beside: Mapping[str, Mapping[str, float]] | None = None,
    n_runners_up: int = 3,
    method: Literal["auto", "exact", "milp"] = "auto",
    time_limit_s: float = 8.0,
) -> PlacementSearch:
    """The placement with the fastest step; of equally fast ones (within 1 in 100,000) that with the fewest GPUs, then
    that whose earlier roles have more of them (the least sum of a role's position times its GPUs).

    cost_of: asked once for each role and each of `counts`. A role that must have some number of GPUs costs None at
        others.
    roles: in the order in which ties are broken and sets are named.
    nodes: GPUs of each node. GPUs are counted from 0 over the nodes.
    memory: bytes that roles may take on a GPU, of unequal ones on the smallest; None is no limit.
    together, apart: pairs of roles that must, and that must not, be in one set.
    pinned: GPU ids that a role is on, in its order. Its set has these and no others; roles without ids may join.
    counts: the numbers of GPUs that a set without ids may get; by default gpu_counts.
    beside: of roles that have no GPU the seconds of each phase. They are on one CPU, one after the other, and work beside
        all sets.
    transfers: seconds that weight_sync takes longer when the two roles are not in one set, as for copying weights.
    method: "auto" looks at every placement up to EXACT_GPUS GPUs and EXACT_ROLES roles (those that are together count
        once), and beyond solves a program that takes at most about `time_limit_s` seconds.

    That nothing fits is no error: the best placement then says by how much and where, for remedies to be tried.
    Raises ConfigError, with every fault, for rules that contradict each other, GPUs that there are not, a role that
    cannot use any allowed number of GPUs, and when even the fewest GPUs that a placement needs are not there.
    """
    assert 0 < len(roles) == len(set(roles)), "roles, each once"
    assert sum(nodes) > 0, "nodes have GPUs"
    pins = {role: tuple(pinned[role]) for role in roles if role in pinned} if pinned else {}
    moves = dict(transfers or {})
    named = {*(pinned or ()), *(role for pair in (*together, *apart, *moves) for role in pair)}
    assert named <= set(roles), "rules name roles that there are"
    groups = groups_of(roles, [*together, *same_pins(pins)])
    rules = Rules(
        cost_of,
        tuple(roles),
        groups,
        tuple(nodes),
        memory,
        tuple(sorted(apart)),
        pins,
        moves,
        tuple(sorted(counts or ())),
        dict(beside or {}),
    )
    rules.check()
    everyone = (1 << len(groups)) - 1
    columns = least_overrun(rules.columns(), everyone, rules.n_gpus)
    if columns is None:
        raise rules.too_few()
    if method == "auto":
        method = "exact" if rules.n_gpus <= EXACT_GPUS and len(groups) <= EXACT_ROLES else "milp"
    gap = 0.0
    if method == "exact":
        found = search_exact(columns, everyone, rules.n_gpus, 1 + n_runners_up)
    else:
        found, gap = search_milp(columns, everyone, rules.n_gpus, 1 + n_runners_up, time_limit_s)
    best, *others = (_placement(rules, choice) for choice in found)
    return PlacementSearch(best, tuple(others), method, gap)


def _placement(rules: Rules, choice: Choice) -> Placement:
    roles_of = [rules.roles_of(column.members) for column in choice]
    pins = [rules.pinned_to(roles) for roles in roles_of]
    ids = give_out([column.n_gpus for column in choice], pins, rules.nodes)
    sets = []
    for roles, gpus in zip(roles_of, ids, strict=True):
        peak, fullest = rules.peak(roles, len(gpus))
        seconds = rules.seconds(roles, len(gpus))
        sets.append(PlacedSet(roles, gpus, seconds, peak, fullest, rules.overrun(peak)))
    stage_s: dict[str, float] = {}
    bound_by: dict[str, tuple[str, ...]] = {}
    for stage in STAGES:
        slowest = max(sets, key=lambda placed: placed.seconds[stage])
        stage_s[stage] = max(slowest.seconds[stage], rules.seconds_beside(stage))
        if stage_s[stage] > slowest.seconds[stage]:
            bound_by[stage] = tuple(role for role, own in rules.beside.items() if set(own) & set(STAGES[stage]))
        elif stage_s[stage] > 0:
            bound_by[stage] = slowest.roles
    return Placement(tuple(sets), sum(stage_s.values()), stage_s, bound_by)


def give_out(
    counts: Sequence[int], pinned: Sequence[tuple[int, ...] | None], nodes: Sequence[int]
) -> list[tuple[int, ...]]:
    """GPU ids for sets of these sizes; those that are pinned have theirs. Sets span as few nodes as was found possible.

    A set that a node has room for goes where the least room is; a larger one takes the emptiest nodes whole and its rest
    as if it were a set. The order in which sets choose matters: up to six sets all orders are tried, beyond only from
    the largest to the smallest. Of equally good orders it is the first, so that earlier sets have lower ids.
    """
    taken = {gpu for ids in pinned if ids is not None for gpu in ids}
    starts = [sum(nodes[:node]) for node in range(len(nodes))]
    free = [[gpu for gpu in range(a, a + n) if gpu not in taken] for a, n in zip(starts, nodes, strict=True)]
    asking = [i for i, ids in enumerate(pinned) if ids is None]
    orders = permutations(asking) if len(asking) <= _ALL_ORDERS else [sorted(asking, key=lambda i: -counts[i])]
    least = sum(-(-counts[i] // max(nodes)) for i in asking)
    best: tuple[int, dict[int, list[int]]] | None = None
    for order in orders:
        given, spans = _in_order(order, counts, free)
        if best is None or spans < best[0]:
            best = spans, given
        if spans == least:
            break
    assert best is not None, "there is always an order, of no sets too"
    return [tuple(best[1][i]) if ids is None else ids for i, ids in enumerate(pinned)]


def _in_order(
    order: Sequence[int], counts: Sequence[int], free: Sequence[Sequence[int]]
) -> tuple[dict[int, list[int]], int]:
    """The ids of each set when they choose in this order, and the sum of the nodes that they span."""
    left = [list(ids) for ids in free]
    given: dict[int, list[int]] = {}
    spans = 0
    for i in order:
        taken: list[int] = []
        while (rest := counts[i] - len(taken)) > 0:
            roomy = [ids for ids in left if len(ids) >= rest]
            node = min(roomy, key=len) if roomy else max(left, key=len)
            assert node, "the counts are at most what is free"
            taken += node[:rest]
            del node[:rest]
            spans += 1
        given[i] = sorted(taken)
    return given, spans
