"""The placement search for many GPUs, as a mixed-integer linear program that HiGHS solves.

Variables: x[c], 1 where column c (a set of roles on a count of GPUs) is chosen, and T[j], the seconds of stage j::

    minimize    sum_j T[j]
    such that   sum of x[c] over the columns with role r              = 1         for each role r
                sum of n_gpus[c] x[c]                                 <= GPUs
                T[j] >= sum of seconds[c, j] x[c] over columns with r             for each role r and stage j

The last line holds T[j] above every chosen set. Written per role rather than per set its relaxation is much closer, as
the columns that share a role exclude each other.

Few columns reach the solver: a placement that is found greedily bounds the step from above, and a column is left out
when even the fastest sets that the other roles may be in beside it make a slower step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from verl_shard.planning.placement_exact import (
    TIE,
    Choice,
    Column,
    by_set,
    fewest_gpus,
    in_order,
    partition_of,
    partitions,
    preferred,
    step_seconds,
)

_SMOOTH = 8
"""The power of the norm that stands for a maximum in the greedy search."""
_AHEAD = 16
"""How many larger counts of a set the greedy search compares at a time."""
_GREEDY_PARTITIONS = 64
"""Of how many partitions, those with the fewest sets first, a placement is looked for greedily; five roles have 52."""


def search_milp(
    columns: Sequence[Column], roles: int, n_gpus: int, n_best: int, time_limit_s: float
) -> tuple[list[Choice], float]:
    """The best placement, the best ones of up to `n_best` - 1 other partitions, and the gap that is left for the best.

    There must be a placement. The gap is a share of the best one's seconds: none is faster than (1 - gap) times these. It
    is 0 unless the time ran out, in which case the greedy search's placements are taken for those not solved. Other
    partitions are those of the greedy search, which for more than five roles are not all.
    """
    deadline = time.monotonic() + time_limit_s
    columns = _without_dominated(columns)
    greedy = _greedy_placements(columns, roles, n_gpus)
    sparest = fewest_gpus(columns, roles)
    assert sparest is not None, "the caller has seen that there is a placement"
    best, gap = _fastest(columns, roles, n_gpus, preferred([*greedy, sparest]), deadline)
    best = _leanest(columns, roles, n_gpus, best, deadline)
    return [best, *_others(columns, roles, n_gpus, greedy, partition_of(best), n_best - 1, deadline)], gap


def _others(
    columns: Sequence[Column],
    roles: int,
    n_gpus: int,
    greedy: Sequence[Choice],
    best: tuple[int, ...],
    n_others: int,
    deadline: float,
) -> list[Choice]:
    """The fastest placements of the `n_others` best partitions of those in `greedy`, but for the `best` one."""
    found: list[Choice] = []
    left = sorted((choice for choice in greedy if partition_of(choice) != best), key=step_seconds)
    for n, known in enumerate(left if n_others > 0 else ()):
        # So fast is the last of those wanted at least, by what is known so far.
        steps = sorted(map(step_seconds, [*found, *left[n:]]))
        to_beat = steps[min(n_others, len(steps)) - 1]
        own = _of_partition(columns, known)
        if _promising(own, roles, n_gpus, to_beat)[0]:
            found.append(_fastest(own, roles, n_gpus, known, deadline)[0])
    chosen = in_order(found)[:n_others]
    return in_order([_leanest(_of_partition(columns, choice), roles, n_gpus, choice, deadline) for choice in chosen])


def _of_partition(columns: Sequence[Column], choice: Choice) -> list[Column]:
    sets = partition_of(choice)
    return [column for column in columns if column.members in sets]


def _without_dominated(columns: Sequence[Column]) -> list[Column]:
    """Without those for which fewer GPUs are as fast in each stage."""
    kept: list[Column] = []
    for own in by_set(columns).values():
        seconds = np.array([column.seconds for column in own])
        kept += [column for i, column in enumerate(own) if not (seconds[:i] <= seconds[i]).all(axis=1).any()]
    return kept


def _greedy_placements(columns: Sequence[Column], roles: int, n_gpus: int) -> list[Choice]:
    """A good placement of each partition: from the fewest GPUs, one set after the other is given those that help most."""
    columns_of = by_set(columns)
    seconds_of = {members: np.array([column.seconds for column in own]) for members, own in columns_of.items()}
    counts_of = {members: np.array([column.n_gpus for column in own]) for members, own in columns_of.items()}
    found = []
    for sets in islice(sorted(partitions(roles, columns_of), key=len), _GREEDY_PARTITIONS):
        at = _greedy_counts([seconds_of[s] for s in sets], [counts_of[s] for s in sets], n_gpus)
        if at is not None:
            found.append(tuple(columns_of[members][index] for members, index in zip(sets, at, strict=True)))
    return found


def _greedy_counts(seconds: Sequence[np.ndarray], counts: Sequence[np.ndarray], n_gpus: int) -> list[int] | None:
    """Of each set, which of its counts: seconds (counts, stages) and counts (counts,) of each set, fewest GPUs first.

    The set that saves most for each GPU gets more, until none is left or helps. What it saves is read from a smooth
    maximum, as where two sets hold up a stage more GPUs for one of them save nothing yet.
    """
    at = [0] * len(counts)
    left = n_gpus - sum(int(own[0]) for own in counts)
    if left < 0:
        return None
    fastest, best = np.inf, list(at)
    # Of each set, what it adds to the smooth maximum of each stage on each of its counts.
    scale = np.max([own[0] for own in seconds], axis=0)
    powers = [(own / np.where(scale > 0, scale, 1)) ** _SMOOTH for own in seconds]
    while True:
        step = np.max([own[index] for own, index in zip(seconds, at, strict=True)], axis=0).sum()
        if step < fastest * (1 - TIE):
            fastest, best = step, list(at)
        sums = np.sum([own[index] for own, index in zip(powers, at, strict=True)], axis=0)
        smooth = (sums ** (1 / _SMOOTH) * scale).sum()
        most = (0.0, 0, 0)
        for i, own_counts in enumerate(counts):
            end = int(np.searchsorted(own_counts, own_counts[at[i]] + left, side="right"))
            larger = slice(at[i] + 1, min(end, at[i] + 1 + _AHEAD))
            if at[i] + 1 < end:
                changed = np.maximum(sums - powers[i][at[i]] + powers[i][larger], 0)
                steps = (changed ** (1 / _SMOOTH) * scale).sum(axis=1)
                saved = (smooth - steps) / (own_counts[larger] - own_counts[at[i]])
                most = max(most, (float(saved.max()), i, at[i] + 1 + int(saved.argmax())), key=lambda entry: entry[0])
        gain, i, index = most
        if gain <= TIE * smooth / n_gpus:
            return best
        left -= int(counts[i][index] - counts[i][at[i]])
        at[i] = index


def _fastest(
    columns: Sequence[Column], roles: int, n_gpus: int, known: Choice, deadline: float
) -> tuple[Choice, float]:
    """The placement with the fastest step, and the gap that is left; `known` is a placement."""
    step = step_seconds(known)
    kept, bound = _promising(columns, roles, n_gpus, step)
    found, proven = _Program(kept, roles, n_gpus, step).solve("seconds", deadline)
    best = known if found is None else preferred([found, known])
    step = step_seconds(best)
    bound = step if proven is None else max(bound, proven)
    gap = max(0.0, 1 - bound / step) if step else 0.0
    return best, gap if gap > TIE else 0.0


def _leanest(columns: Sequence[Column], roles: int, n_gpus: int, known: Choice, deadline: float) -> Choice:
    """Of the placements over these columns that are as fast as `known` the one to prefer; `known` is a fastest one."""
    step = step_seconds(known)
    kept, _ = _promising(columns, roles, n_gpus, step)
    program = _Program(kept, roles, n_gpus, step)
    for wanted in ("n_gpus", "position"):
        limits = {"seconds": step * (1 + TIE), "n_gpus": sum(column.n_gpus for column in known)}
        found, _ = program.solve(wanted, deadline, limits)
        known = found or known
    return known


def _promising(columns: Sequence[Column], roles: int, n_gpus: int, at_most: float) -> tuple[list[Column], float]:
    """The columns that a step of `at_most` seconds may be made of, and the least seconds that a step can have."""
    kept = sorted(columns, key=lambda column: column.n_gpus)
    while kept:
        bounds = _least_steps(kept, roles, n_gpus)
        fine = np.isfinite(bounds) & (bounds <= at_most * (1 + TIE))
        if fine.all():
            first = np.array([column.members & 1 for column in kept], dtype=bool)
            return kept, float(bounds[first].min())
        kept = [column for column, good in zip(kept, fine, strict=True) if good]
    return [], 0.0


def _least_steps(columns: Sequence[Column], roles: int, n_gpus: int) -> np.ndarray:
    """(columns,): seconds below which no step with this column is; columns with fewer GPUs first.

    In each stage it is as slow as the column, and as the fastest set for each other role on the GPUs that are left.
    """
    members = np.array([column.members for column in columns])
    counts = np.array([column.n_gpus for column in columns])
    seconds = np.array([column.seconds for column in columns])
    bounds = np.empty(len(columns))
    for own in np.unique(members):
        mine = members == own
        slowest = seconds[mine]
        left = n_gpus - counts[mine]
        for role in range(roles.bit_length()):
            if own >> role & 1:
                continue
            beside = (members & own == 0) & (members >> role & 1 == 1)
            fastest = np.vstack(
                [np.full(seconds.shape[1], np.inf), np.minimum.accumulate(seconds[beside], axis=0)]
            )  # by how many of the columns, those with the fewest GPUs, there are enough GPUs for
            slowest = np.maximum(slowest, fastest[np.searchsorted(counts[beside], left, side="right")])
        bounds[mine] = slowest.sum(axis=1)
    return bounds


class _Program:
    """scipy's milp over these columns, of which a placement of `step` seconds can be made."""

    def __init__(self, columns: Sequence[Column], roles: int, n_gpus: int, step: float) -> None:
        self.columns, self.roles = columns, roles
        # The step is 1 to the solver, whose tolerances are absolute: 1e-6, a tenth of TIE. With larger numbers it repairs
        # what it has rounded, and says so on stdout whatever its options.
        self.scale = 1 / step if step > 0 else 1.0
        seconds = np.array([column.seconds for column in columns]) * self.scale
        self.n_stages = seconds.shape[1]
        members = np.array([column.members for column in columns])
        stages = np.eye(self.n_stages)
        no_column = np.zeros(len(columns))
        self.objectives = {
            "seconds": np.r_[no_column, np.ones(self.n_stages)],
            "n_gpus": self._row([column.n_gpus for column in columns]),
            "position": self._row([column.position for column in columns]),
        }
        self.rows: list[tuple[np.ndarray, float, float]] = [(self.objectives["n_gpus"], -np.inf, n_gpus)]
        for role in range(roles.bit_length()):
            with_role = members >> role & 1
            self.rows.append((self._row(with_role), 1, 1))
            for stage in range(self.n_stages):
                self.rows.append((np.r_[-with_role * seconds[:, stage], stages[stage]], 0, np.inf))

    def _row(self, of_columns: Any) -> np.ndarray:
        return np.concatenate([np.asarray(of_columns, dtype=float), np.zeros(self.n_stages)])

    def solve(
        self, wanted: str, deadline: float, limits: dict[str, float] | None = None
    ) -> tuple[Choice | None, float | None]:
        """The placement with the least of `wanted` within `limits`, None if none was found, and the least it can be.

        The latter is None when the placement, or that there is none, is proven; -inf when nothing is known.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        left = deadline - time.monotonic()
        if left <= 0:
            return None, -np.inf
        rows = list(self.rows)
        for name, most in (limits or {}).items():
            rows.append((self.objectives[name], -np.inf, most * (self.scale if name == "seconds" else 1)))
        matrix, low, high = (np.array(part, dtype=float) for part in zip(*rows, strict=True))
        n = len(self.columns)
        result = milp(
            self.objectives[wanted],
            integrality=np.r_[np.ones(n), np.zeros(self.n_stages)],
            bounds=Bounds(0, np.r_[np.ones(n), np.full(self.n_stages, np.inf)]),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": left, "mip_rel_gap": 0.0},
        )
        proven = None
        if result.status not in (0, 2):  # neither solved nor infeasible
            bound = -np.inf if result.mip_dual_bound is None else result.mip_dual_bound
            proven = bound / (self.scale if wanted == "seconds" else 1)
        if result.x is None:
            return None, proven
        chosen = [column for column, share in zip(self.columns, result.x[:n], strict=True) if share > 0.5]
        chosen.sort(key=lambda column: column.members & -column.members)
        assert sum(column.members for column in chosen) == self.roles, "each role is in one set"
        return tuple(chosen), proven
