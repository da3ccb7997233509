"""What a placement may be: which roles may share GPUs, on how many, and what each such set costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.planning.placement_exact import Column, fewest_gpus

STAGES: Mapping[str, tuple[str, ...]] = {
    "generation": ("generate",),
    "preparation": ("reward", "old_log_prob", "ref_log_prob", "values"),
    "training": ("update_critic", "update_actor"),
    "weight_sync": ("weight_sync",),
}
"""The phases of each stage of a step. Stages follow each other: one begins when the one before is done everywhere."""
_PHASES = {phase for phases in STAGES.values() for phase in phases}

Group = tuple[str, ...]
"""Roles that are never parted."""


@dataclass(frozen=True)
class RoleCost:
    """What a role takes on some number of GPUs.

    seconds: of each phase that the role has a part in, see STAGES.
    resident: bytes on each of its GPUs while others work. peak: the most bytes there while it works itself, resident ones
        among them. Where its GPUs differ, those of the fullest.
    """

    seconds: Mapping[str, float]
    resident: int
    peak: int

    def __post_init__(self) -> None:
        assert set(self.seconds) <= _PHASES, f"phases are some of {', '.join(sorted(_PHASES))}"
        assert all(isfinite(s) and s >= 0 for s in self.seconds.values()), "seconds are finite and not negative"
        assert 0 <= self.resident <= self.peak, "what is resident is there at the peak"


CostOf = Callable[[str, int], RoleCost | None]
"""The cost of a role on a number of GPUs; None where it cannot use that many."""


def gpu_counts(nodes: Sequence[int], n_pinned: int = 0) -> tuple[int, ...]:
    """The numbers of GPUs that a set may get: all up to 8, then powers of two, multiples of the largest node's GPUs,
    all that are not pinned, and all."""
    n_gpus, node = sum(nodes), max(nodes)
    counts = {*range(1, 9), *(2**i for i in range(3, n_gpus.bit_length())), *range(node, n_gpus + 1, node)}
    return tuple(sorted(count for count in counts | {n_gpus - n_pinned, n_gpus} if 0 < count <= n_gpus))


def groups_of(roles: Sequence[str], pairs: Collection[tuple[str, str]]) -> tuple[Group, ...]:
    """The roles that `pairs` put together, directly or by way of others, in the order of roles."""
    group = {role: {role} for role in roles}
    for one, other in pairs:
        joined = group[one] | group[other]
        group.update(dict.fromkeys(joined, joined))
    return tuple(dict.fromkeys(tuple(role for role in roles if role in group[first]) for first in roles))


def same_pins(pinned: Mapping[str, Sequence[int]]) -> list[tuple[str, str]]:
    """Pairs of roles that are on the same GPUs by their ids."""
    first: dict[frozenset[int], str] = {}
    return [(first.setdefault(frozenset(ids), role), role) for role, ids in pinned.items()]


def peak_of(costs: Mapping[str, RoleCost]) -> tuple[int, str]:
    """Bytes on each GPU of a set with these roles when it is fullest, and the role that works then (the first such)."""
    resident = sum(cost.resident for cost in costs.values())
    peaks = {role: resident - cost.resident + cost.peak for role, cost in costs.items()}
    fullest = max(peaks, key=lambda role: peaks[role])
    return peaks[fullest], fullest


@dataclass(frozen=True)
class Rules:
    """What search_placement was given; see there."""

    cost_of: CostOf
    roles: tuple[str, ...]
    groups: tuple[Group, ...]
    nodes: tuple[int, ...]
    memory: int | None
    apart: tuple[tuple[str, str], ...]
    pinned: Mapping[str, tuple[int, ...]]
    transfers: Mapping[tuple[str, str], float]
    allowed: tuple[int, ...] = ()
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def n_gpus(self) -> int:
        return sum(self.nodes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return self.allowed or gpu_counts(self.nodes, len({gpu for ids in self.pinned.values() for gpu in ids}))

    @cached_property
    def costs(self) -> Mapping[tuple[str, int], RoleCost]:
        """By role and number of GPUs, of those that the role can use."""
        counts = {*self.counts, *map(len, self.pinned.values())}
        asked = {(role, count): self.cost_of(role, count) for role in self.roles for count in sorted(counts)}
        return {key: cost for key, cost in asked.items() if cost is not None}

    def columns(self) -> list[Column]:
        """Each set that the rules allow, on each number of GPUs that all its roles can use."""
        return [
            column
            for members in range(1, 1 << len(self.groups))
            if self._may_share(self.roles_of(members))
            for count in self._counts_of(self.roles_of(members))
            if (column := self._column(members, count)) is not None
        ]

    def roles_of(self, members: int) -> tuple[str, ...]:
        """The roles of a Column's members, in their order."""
        inside = {role for i, group in enumerate(self.groups) if members >> i & 1 for role in group}
        return tuple(role for role in self.roles if role in inside)

    def pinned_to(self, roles: Collection[str]) -> tuple[int, ...] | None:
        """The GPU ids of a set with these roles, where one of them has some."""
        return next((self.pinned[role] for role in roles if role in self.pinned), None)

    def seconds(self, roles: Collection[str], count: int) -> dict[str, float]:
        """By stage, of these roles one after the other. Weights that leave the set are copied in weight_sync."""
        seconds = {
            stage: float(sum(self.costs[role, count].seconds.get(phase, 0.0) for role in roles for phase in phases))
            for stage, phases in STAGES.items()
        }
        seconds["weight_sync"] += sum(
            s for (one, other), s in self.transfers.items() if one in roles and other not in roles
        )
        return seconds

    def seconds_beside(self, stage: str) -> float:
        """Of a stage, what the roles without GPUs take, one after the other; no placement makes it shorter."""
        return float(sum(own.get(phase, 0.0) for own in self.beside.values() for phase in STAGES[stage]))

    def peak(self, roles: Collection[str], count: int) -> tuple[int, str]:
        """See peak_of."""
        return peak_of({role: self.costs[role, count] for role in roles})

    def overrun(self, peak: int) -> int:
        """The bytes that a GPU lacks."""
        return 0 if self.memory is None else max(0, peak - self.memory)

    def _may_share(self, roles: Collection[str]) -> bool:
        pins = {frozenset(self.pinned[role]) for role in roles if role in self.pinned}
        return len(pins) <= 1 and not any(one in roles and other in roles for one, other in self.apart)

    def _counts_of(self, roles: Collection[str]) -> tuple[int, ...]:
        ids = self.pinned_to(roles)
        return self.counts if ids is None else (len(ids),)

    def _column(self, members: int, count: int) -> Column | None:
        roles = self.roles_of(members)
        if any((role, count) not in self.costs for role in roles):
            return None
        return Column(
            members,
            count,
            # The slowest of sets that are no faster than what is beside them is the slowest of all.
            seconds=tuple(max(s, self.seconds_beside(stage)) for stage, s in self.seconds(roles, count).items()),
            overrun=self.overrun(self.peak(roles, count)[0]),
            position=count * sum(self.roles.index(role) for role in roles),
        )

    def check(self) -> None:
        """Raises ConfigError for rules that no placement can keep."""
        faults = [*self._bad_ids(), *self._partly_shared(), *self._contradictions()]
        faults = faults or list(self._unusable())  # costs are asked for only where the counts make sense
        if faults:
            raise ConfigError(faults)

    def too_few(self) -> ConfigError:
        """The error for when every placement needs more GPUs than there are."""
        choice = fewest_gpus(self.columns(), (1 << len(self.groups)) - 1)
        assert choice is not None, "each group can be on its own"
        needed = " + ".join(f"{column.n_gpus} ({', '.join(self.roles_of(column.members))})" for column in choice)
        why = f"the fewest that a placement needs are {needed} = {sum(column.n_gpus for column in choice)}"
        return config_error("too-few-gpus", "gpus", self.n_gpus, why, "Plan for more GPUs, or let roles share them")

    def _bad_ids(self) -> Iterator[Finding]:
        for role, ids in self.pinned.items():
            assert len(set(ids)) == len(ids), "RoleConfig refuses ids that are named twice"
            if not ids:
                yield _fault("no-gpu", f"{role}.devices", ids, "it names no GPU", "Name some, or leave it out")
            if strange := [gpu for gpu in ids if not 0 <= gpu < self.n_gpus]:
                why = f"ids go from 0 to {self.n_gpus - 1}, so that there is no {', '.join(map(str, strange))}"
                yield _fault("no-such-gpu", f"{role}.devices", ids, why, "Name GPUs that there are, or plan for more")

    def _partly_shared(self) -> Iterator[Finding]:
        for i, (role, ids) in enumerate(self.pinned.items()):
            for other, others in list(self.pinned.items())[:i]:
                shared = sorted(set(ids) & set(others))
                if shared and set(ids) != set(others):
                    why = (
                        f"the {other} is on {list(others)}: {', '.join(map(str, shared))} would be shared, the rest not"
                    )
                    fix = "Roles share all of their GPUs or none: name the same ids for both, or none of the other's"
                    yield _fault("partly-shared", f"{role}.devices", ids, why, fix)

    def _contradictions(self) -> Iterator[Finding]:
        for group in self.groups:
            pins = {frozenset(self.pinned[role]): role for role in group if role in self.pinned}
            for role in list(pins.values())[1:]:
                first = next(iter(pins.values()))
                why = f"{', '.join(group)} share their GPUs, and the {first} is on {list(self.pinned[first])}"
                fix = "Name the same ids for all of them, or for one of them only"
                yield _fault("pinned-apart", f"{role}.devices", self.pinned[role], why, fix)
            for one, other in self.apart:
                if one in group and other in group:
                    why = f"they must not share GPUs, and yet {', '.join(group)} do, by their ids or by another rule"
                    fix = "Give them different GPU ids, or none"
                    yield Finding("error", "together-and-apart", f"{one}, {other}", "", why, fix)

    def _unusable(self) -> Iterator[Finding]:
        for group in self.groups:
            wanted = self._counts_of(group)
            if any(all((role, count) in self.costs for role in group) for count in wanted):
                continue
            counts = {role: [count for count in wanted if (role, count) in self.costs] for role in group}
            usable = "; ".join(f"the {role} can use {_shortly(own)}" for role, own in counts.items())
            why = f"of {_shortly(wanted)} GPUs {usable}" + (": there is no number for all" if len(group) > 1 else "")
            fix = "Name another number of GPUs for it, or plan for another number in all"
            yield Finding("error", "no-usable-count", ", ".join(group), "", why, fix)


def _shortly(counts: Sequence[int]) -> str:
    shown = [str(count) for count in counts]
    return ", ".join(shown if len(shown) < 12 else [*shown[:9], "...", shown[-1]]) or "none"


def _fault(code: str, where: str, ids: Sequence[int], why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(list(ids)), why, fix)
