"""The exact split of a chain into runs, one a device, by dynamic programming.

The cost of a run is any function of its ends, so that a sum of bytes and a traced peak go through the same code. For n
pieces and d devices it takes n * n / 2 calls of that function and d * n * n / 2 steps.

In a pipeline the cost depends on the run's place too, and a place on how many devices are used. So the chain is split
for each number of them, by d * s * n * n / 2 steps for s of d devices, s * n * n / 2 where all devices are alike; runs
that can no longer be part of a better split are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from verl_shard.memory.in_flight import Stage

Run = tuple[int, int]
"""Pieces first to last - 1 of the chain; first == last is a device that is left empty."""

RunCost = Callable[[int, int], float]
"""(i, j): what pieces i..j-1 cost on one device; asked only for i < j."""

_Table = list[list[tuple[int, float]]]
"""For each first piece, the ends and costs of the runs that may be used."""

_Value = TypeVar("_Value")

_NEVER = float("inf")


@dataclass(frozen=True)
class ByStage:
    """A cost that depends on the place in the pipeline, of which each device with a run is a stage. at: the cost of runs
    at a place; the same function (==) for places that cost the same saves time."""

    at: Callable[[Stage], RunCost]


def partition(
    n_pieces: int,
    cost: RunCost | ByStage,
    caps: Sequence[float | None],
    *,
    stands_alone: Sequence[bool] | None = None,
    then: RunCost | None = None,
) -> list[Run] | None:
    """One run for each of `caps`, in order, such that the largest cost is smallest; None if no split is within caps.

    cost: of a run, wherever it is or by its place. A device that is left empty is no stage.
    caps: the largest cost that each device takes; None is no limit.
    stands_alone: False for a piece that is not worth a device; a run of only such pieces is not used, unless there is
        nothing else.
    then: a second cost, such as time, whose largest is made as small as the first allows.

    Of the splits with the smallest largest cost it takes, in this order: one with the fewest empty devices; one whose
    largest second cost is smallest; one with the smallest sum of squared costs (the most even); the one whose first
    devices have the smaller costs. Devices that no run is left for are the last ones. The same input always gives the
    same split.
    """
    limits = [_NEVER if cap is None else cap for cap in caps]
    best, chain = _best_chain(n_pieces, cost, _alone(n_pieces, stands_alone), limits, [0.0] * len(limits))
    if chain is None:
        return None
    limits = [min(limit, best) for limit in limits]
    if then is not None:
        seconds = [[then(i, j) if i < j else 0 for j in range(n_pieces + 1)] for i in range(n_pieces)]
        largest = _smallest_second(chain, seconds, limits)
        chain = chain.only(lambda i, j, _: seconds[i][j] <= largest)
    return _most_even(chain, limits)


def nearest_misfit(
    n_pieces: int,
    cost: RunCost | ByStage,
    caps: Sequence[float | None],
    *,
    stands_alone: Sequence[bool] | None = None,
) -> tuple[float, list[Run]]:
    """How much more every limited device must take for a split to be within caps, and that split."""
    offsets = [_NEVER if cap is None else cap for cap in caps]
    no_limits = [_NEVER] * len(caps)
    excess, chain = _best_chain(n_pieces, cost, _alone(n_pieces, stands_alone), no_limits, offsets)
    assert chain is not None, "without limits there is always a split"
    return excess, _most_even(chain, [offset + excess for offset in offsets])


def _alone(n_pieces: int, stands_alone: Sequence[bool] | None) -> list[bool]:
    return [True] * n_pieces if stands_alone is None or not any(stands_alone) else list(stands_alone)


@dataclass(frozen=True)
class _Chain:
    """The runs that may be used. tables: of each of n_stages; one for all, where their number is None.

    What is worked out for the devices from one on has a row for each number of stages before them; a single one where that
    does not matter.
    """

    n_pieces: int
    tables: Sequence[_Table]
    n_stages: int | None = None

    def steps(self, device: int, n_devices: int) -> list[tuple[int, int, range]]:
        """(stages before this device, stages with it, pieces that its run may begin with), of what leads to a split."""
        n_stages = self.n_stages
        if n_stages is None:
            return [(0, 0, range(self.n_pieces))]
        before = range(max(0, n_stages - (n_devices - device)), min(device, n_stages - 1) + 1)
        return [(k, k + 1, range(k, self.n_pieces - (n_stages - k) + 1)) for k in before]

    def behind(self, never: _Value, end: _Value) -> list[list[_Value]]:
        """Behind the last device: all pieces and all stages have been."""
        rows = [[never] * (self.n_pieces + 1) for _ in range((self.n_stages or 0) + 1)]
        rows[-1][-1] = end
        return rows

    def only(self, wanted: Callable[[int, int, float], bool]) -> _Chain:
        """With the runs i..j-1 of cost c for which wanted(i, j, c)."""
        made = {
            id(table): [[(j, c) for j, c in row if wanted(i, j, c)] for i, row in enumerate(table)]
            for table in {id(table): table for table in self.tables}.values()
        }
        return replace(self, tables=[made[id(table)] for table in self.tables])


def _best_chain(
    n_pieces: int, cost: RunCost | ByStage, alone: list[bool], limits: list[float], offsets: list[float]
) -> tuple[float, _Chain | None]:
    """min over splits of the max over devices of cost - offset, with cost <= limit, and the runs that such splits are of:
    by stage those of the largest number of stages that has one. None where no split is within limits."""
    if not isinstance(cost, ByStage):
        chain = _Chain(n_pieces, [_table(n_pieces, cost, alone)])
        best = _smallest_maximum(chain, limits, offsets)
        return best, None if best == _NEVER else chain
    tables: dict[RunCost, _Table] = {}
    best, found = _NEVER, None
    limit, offset = max(limits), max(offsets)
    alike = len(set(limits)) == len(set(offsets)) == 1
    for n_stages in range(min(len(limits), sum(alone)), 0, -1):
        costs = [cost.at(Stage(number, n_stages)) for number in range(n_stages)]
        for each in costs:
            if each not in tables:
                tables[each] = _table(n_pieces, each, alone)
        whole = _Chain(n_pieces, [tables[each] for each in costs], n_stages)
        chain = whole.only(lambda i, j, c: c <= limit and c - offset < best)  # noqa: B023 - used at once
        # As if each were the most roomy device: quickly done, and no split over those that there are is better.
        value = _smallest_maximum(chain, [limit] * n_stages, [offset] * n_stages)
        if value < best and not alike:
            value = _smallest_maximum(chain, limits, offsets)
        if value < best:
            best, found = value, chain
    return best, found


def _table(n_pieces: int, cost: RunCost, alone: list[bool]) -> _Table:
    table = []
    for i in range(n_pieces):
        first = next((j + 1 for j in range(i, n_pieces) if alone[j]), n_pieces + 1)
        table.append([(j, cost(i, j)) for j in range(first, n_pieces + 1)])
    return table


def _smallest_maximum(chain: _Chain, limits: list[float], offsets: list[float]) -> float:
    """min over splits of the max over devices of cost - offset, with cost <= limit."""
    after = chain.behind(_NEVER, -_NEVER)
    for device in reversed(range(len(limits))):
        limit, offset = limits[device], offsets[device]
        here = list(after)
        for before, following, firsts in chain.steps(device, len(limits)):
            row = list(after[before])  # this device left empty
            rests = after[following]
            for i in firsts:
                lowest = row[i]
                for j, c in chain.tables[before][i]:
                    if c <= limit:
                        rest = rests[j]
                        value = c - offset
                        if rest > value:
                            value = rest
                        if value < lowest:
                            lowest = value
                row[i] = lowest
            here[before] = row
        after = here
    return after[0][0]


def _smallest_second(chain: _Chain, seconds: list[list[float]], limits: list[float]) -> float:
    """The smallest largest second cost of the splits within `limits` that have the fewest empty devices."""
    never = (len(limits) + 1, _NEVER)
    after: list[list[tuple[int, float]]] = chain.behind(never, (0, -_NEVER))
    for device in reversed(range(len(limits))):
        here = [[(empty + 1, largest) for empty, largest in row] for row in after]
        for before, following, firsts in chain.steps(device, len(limits)):
            row, rests = here[before], after[following]
            for i in firsts:
                lowest = row[i]
                for j, c in chain.tables[before][i]:
                    if c <= limits[device] and rests[j] != never:
                        lowest = min(lowest, (rests[j][0], max(rests[j][1], seconds[i][j])))
                row[i] = lowest
        after = here
    return after[0][0][1]


def _most_even(chain: _Chain, limits: list[float]) -> list[Run]:
    """The split within `limits` with the fewest empty devices, then the smallest sum of squares."""
    never = (len(limits) + 1, _NEVER)
    done: list[list[list[tuple[int, float]]]] = [chain.behind(never, (0, 0))]
    for device in reversed(range(len(limits))):
        after = done[-1]
        here = [[(empty + 1, squares) for empty, squares in row] for row in after]
        for before, following, firsts in chain.steps(device, len(limits)):
            row, rests = here[before], after[following]
            for i in firsts:
                lowest = row[i]
                for j, c in chain.tables[before][i]:
                    if c <= limits[device] and rests[j] != never:
                        empty, squares = rests[j]
                        lowest = min(lowest, (empty, squares + c * c))
                row[i] = lowest
        done.append(here)
    done.reverse()

    runs: list[Run] = []
    at = before = 0
    for device, limit in enumerate(limits):
        ways = {k: (following, firsts) for k, following, firsts in chain.steps(device, len(limits))}
        following, firsts = ways.get(before, (before, range(0)))
        best, rests = done[device][before][at], done[device + 1][following]
        choices = [
            (c, j)
            for j, c in (chain.tables[before][at] if at in firsts else [])
            if c <= limit and (rests[j][0], rests[j][1] + c * c) == best
        ]
        if choices:
            before = following
        end = min(choices)[1] if choices else at
        runs.append((at, end))
        at = end
    assert at == chain.n_pieces, "limits come from a split that exists"
    return runs
