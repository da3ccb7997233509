"""The exact split of a chain into runs, one a device, by dynamic programming.

The cost of a run is any function of its ends, so that a sum of bytes and a traced peak go through the same code. For n
pieces and d devices it takes n * n / 2 calls of that function and d * n * n / 2 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Run = tuple[int, int]
"""Pieces first to last - 1 of the chain; first == last is a device that is left empty."""

_NEVER = float("inf")


def partition(
    n_pieces: int,
    cost: Callable[[int, int], float],
    caps: Sequence[float | None],
    *,
    stands_alone: Sequence[bool] | None = None,
    then: Callable[[int, int], float] | None = None,
) -> list[Run] | None:
    """One run for each of `caps`, in order, such that the largest cost is smallest; None if no split is within caps.

    cost(i, j): what pieces i..j-1 cost on one device; asked only for i < j.
    caps: the largest cost that each device takes; None is no limit.
    stands_alone: False for a piece that is not worth a device; a run of only such pieces is not used, unless there is
        nothing else.
    then: a second cost, such as time, whose largest is made as small as the first allows.

    Of the splits with the smallest largest cost it takes, in this order: one with the fewest empty devices; one whose
    largest second cost is smallest; one with the smallest sum of squared costs (the most even); the one whose first
    devices have the smaller costs. Devices that no run is left for are the last ones. The same input always gives the
    same split.
    """
    alone = [True] * n_pieces if stands_alone is None or not any(stands_alone) else list(stands_alone)
    costs = _table(n_pieces, cost, alone)
    limits = [_NEVER if cap is None else cap for cap in caps]
    best = _smallest_maximum(n_pieces, costs, limits, [0.0] * len(limits))
    if best == _NEVER:
        return None
    limits = [min(limit, best) for limit in limits]
    if then is not None:
        seconds = [[then(i, j) for j, _ in row] for i, row in enumerate(costs)]
        largest = _smallest_second(n_pieces, costs, seconds, limits)
        costs = [
            [run for run, second in zip(row, others, strict=True) if second <= largest]
            for row, others in zip(costs, seconds, strict=True)
        ]
    return _most_even(n_pieces, costs, limits)


def nearest_misfit(
    n_pieces: int,
    cost: Callable[[int, int], float],
    caps: Sequence[float | None],
    *,
    stands_alone: Sequence[bool] | None = None,
) -> tuple[float, list[Run]]:
    """How much more every limited device must take for a split to be within caps, and that split."""
    alone = [True] * n_pieces if stands_alone is None or not any(stands_alone) else list(stands_alone)
    costs = _table(n_pieces, cost, alone)
    offsets = [_NEVER if cap is None else cap for cap in caps]
    excess = _smallest_maximum(n_pieces, costs, [_NEVER] * len(caps), offsets)
    runs = _most_even(n_pieces, costs, [offset + excess for offset in offsets])
    return excess, runs


def _table(n_pieces: int, cost: Callable[[int, int], float], alone: list[bool]) -> list[list[tuple[int, float]]]:
    """For each first piece, the ends and costs of the runs that may be used."""
    table = []
    for i in range(n_pieces):
        first = next((j + 1 for j in range(i, n_pieces) if alone[j]), n_pieces + 1)
        table.append([(j, cost(i, j)) for j in range(first, n_pieces + 1)])
    return table


def _smallest_maximum(
    n_pieces: int, costs: list[list[tuple[int, float]]], limits: list[float], offsets: list[float]
) -> float:
    """min over splits of the max over devices of cost - offset, with cost <= limit."""
    after = [_NEVER] * n_pieces + [-_NEVER]
    for limit, offset in zip(reversed(limits), reversed(offsets), strict=True):
        here = list(after)  # this device left empty
        for i in range(n_pieces):
            lowest = here[i]
            for j, c in costs[i]:
                if c <= limit:
                    rest = after[j]
                    value = c - offset
                    if rest > value:
                        value = rest
                    if value < lowest:
                        lowest = value
            here[i] = lowest
        after = here
    return after[0]


def _smallest_second(
    n_pieces: int, costs: list[list[tuple[int, float]]], seconds: list[list[float]], limits: list[float]
) -> float:
    """The smallest largest second cost of the splits within `limits` that have the fewest empty devices."""
    never = (len(limits) + 1, _NEVER)
    after: list[tuple[int, float]] = [never] * n_pieces + [(0, -_NEVER)]
    for limit in reversed(limits):
        here = [(empty + 1, largest) for empty, largest in after]
        for i in range(n_pieces):
            lowest = here[i]
            for (j, c), second in zip(costs[i], seconds[i], strict=True):
                if c <= limit and after[j] != never:
                    lowest = min(lowest, (after[j][0], max(after[j][1], second)))
            here[i] = lowest
        after = here
    return after[0][1]


def _most_even(n_pieces: int, costs: list[list[tuple[int, float]]], limits: list[float]) -> list[Run]:
    """The split within `limits` with the fewest empty devices, then the smallest sum of squares."""
    never = (len(limits) + 1, _NEVER)
    tables: list[list[tuple[int, float]]] = [[never] * n_pieces + [(0, 0)]]
    for limit in reversed(limits):
        after = tables[-1]
        here = [(empty + 1, squares) for empty, squares in after]
        for i in range(n_pieces):
            lowest = here[i]
            for j, c in costs[i]:
                if c <= limit and after[j] != never:
                    empty, squares = after[j]
                    lowest = min(lowest, (empty, squares + c * c))
            here[i] = lowest
        tables.append(here)
    tables.reverse()

    runs: list[Run] = []
    at = 0
    for device, limit in enumerate(limits):
        here, after = tables[device], tables[device + 1]
        choices = [
            (c, j)
            for j, c in (costs[at] if at < n_pieces else [])
            if c <= limit and (after[j][0], after[j][1] + c * c) == here[at]
        ]
        end = min(choices)[1] if choices else at
        runs.append((at, end))
        at = end
    assert at == n_pieces, "limits come from a split that exists"
    return runs
