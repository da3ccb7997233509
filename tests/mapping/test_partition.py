"""The split is the best there is: compared with every split that exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shard.mapping.partition import ByStage, Run, RunCost, nearest_misfit, partition
from verl_shard.memory.in_flight import Stage


def _every_split(n_pieces: int, n_devices: int) -> Iterator[list[Run]]:
    for cuts in combinations_with_replacement(range(n_pieces + 1), n_devices - 1):
        ends = [0, *cuts, n_pieces]
        yield list(pairwise(ends))


def _costs(cost: RunCost | ByStage, runs: list[Run]) -> list[float]:
    """Of each run; its stage is counted by hand."""
    costs: list[float] = []
    n_stages = len([run for run in runs if run[0] < run[1]])
    number = 0
    for i, j in runs:
        if i == j:
            costs.append(0)
            continue
        costs.append((cost.at(Stage(number, n_stages)) if isinstance(cost, ByStage) else cost)(i, j))
        number += 1
    return costs


def _best_of_all(
    n_pieces: int, cost: RunCost | ByStage, caps: Sequence[int | None], alone: Sequence[bool]
) -> list[Run] | None:
    """The documented order of preference, over all splits, by brute force."""

    def rank(runs: list[Run]) -> tuple[object, ...] | None:
        costs = _costs(cost, runs)
        worth = all(i == j or any(alone[i:j]) or not any(alone) for i, j in runs)
        if not worth or any(cap is not None and c > cap for c, cap in zip(costs, caps, strict=True)):
            return None
        empty = [i == j for i, j in runs]
        return (
            max(costs),
            sum(empty),
            sum(c * c for c in costs),
            [(e, c, j) for e, c, (_, j) in zip(empty, costs, runs, strict=True)],
        )

    ranked = [(rank(runs), runs) for runs in _every_split(n_pieces, len(caps))]
    allowed = [(at, runs) for at, runs in ranked if at is not None]
    return min(allowed)[1] if allowed else None


_pieces = st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8)
_caps = st.lists(st.none() | st.integers(0, 150), min_size=1, max_size=4)


@given(_pieces, _caps)
@settings(max_examples=300, deadline=None)
def test_a_sum_of_sizes_is_split_as_by_exhaustive_search(
    pieces: list[tuple[int, bool]], caps: list[int | None]
) -> None:
    sizes, alone = [size for size, _ in pieces], [worth for _, worth in pieces]
    total = list(accumulate(sizes, initial=0))

    def cost(i: int, j: int) -> int:
        return total[j] - total[i]

    found = partition(len(sizes), cost, caps, stands_alone=alone)
    assert found == _best_of_all(len(sizes), cost, caps, alone)
    if found is not None:
        assert [i for i, _ in found] == [0, *(j for _, j in found[:-1])]
        assert found[-1][1] == len(sizes)
    elif None not in caps:
        excess, runs = nearest_misfit(len(sizes), cost, caps, stands_alone=alone)
        assert excess > 0
        more = [cap + int(excess) for cap in caps if cap is not None]
        assert partition(len(sizes), cost, more, stands_alone=alone) is not None
        assert partition(len(sizes), cost, [cap - 1 for cap in more], stands_alone=alone) is None
        assert (
            max(cost(i, j) - cap for (i, j), cap in zip(runs, caps, strict=True) if i < j and cap is not None) <= excess
        )


@given(st.integers(1, 7), st.integers(1, 3), st.data())
@settings(max_examples=150, deadline=None)
def test_any_cost_of_runs_is_split_as_by_exhaustive_search(n_pieces: int, n_devices: int, data: st.DataObject) -> None:
    """A traced peak is no sum, and need not grow with the run."""
    costs = {(i, j): data.draw(st.integers(0, 40)) for j in range(n_pieces + 1) for i in range(j)}
    caps = [None] * n_devices
    found = partition(n_pieces, lambda i, j: costs[i, j], caps)
    best = _best_of_all(n_pieces, lambda i, j: costs[i, j], caps, [True] * n_pieces)
    assert found == best


def _drawn(data: st.DataObject, n_pieces: int, n_devices: int) -> ByStage:
    """A cost of its own for every run at every place; of half of them by the stage's number alone."""
    sizes = st.lists(st.integers(0, 40), min_size=(n_pieces + 1) ** 2, max_size=(n_pieces + 1) ** 2)
    n_tables = data.draw(st.sampled_from([n_devices, n_devices * n_devices]))
    tables = [data.draw(sizes) for _ in range(n_tables)]

    def at(stage: Stage) -> RunCost:
        table = tables[(stage.number + n_devices * (stage.of - 1)) % n_tables]
        return lambda i, j: table[i * (n_pieces + 1) + j]

    return ByStage(at)


@given(st.integers(1, 6), _caps, st.data())
@settings(max_examples=150, deadline=None)
def test_costs_by_stage_are_split_as_by_exhaustive_search(
    n_pieces: int, caps: list[int | None], data: st.DataObject
) -> None:
    """Limits leave devices empty, also in the middle, and a split over fewer devices has other stages."""
    cost = _drawn(data, n_pieces, len(caps))
    caps = [None if cap is None else cap // 3 for cap in caps]
    alone = data.draw(st.lists(st.booleans(), min_size=n_pieces, max_size=n_pieces))
    found = partition(n_pieces, cost, caps, stands_alone=alone)
    assert found == _best_of_all(n_pieces, cost, caps, alone)
    if found is None and None not in caps:
        excess, runs = nearest_misfit(n_pieces, cost, caps, stands_alone=alone)
        more = [cap + int(excess) for cap in caps if cap is not None]
        assert _best_of_all(n_pieces, cost, more, alone) is not None
        assert _best_of_all(n_pieces, cost, [cap - 1 for cap in more], alone) is None
        assert all(c <= cap for (i, j), c, cap in zip(runs, _costs(cost, runs), more, strict=True) if i < j)


@given(st.integers(1, 6), st.integers(1, 4), st.data())
@settings(max_examples=80, deadline=None)
def test_of_equal_costs_by_stage_the_smallest_second(n_pieces: int, n_devices: int, data: st.DataObject) -> None:
    cost = _drawn(data, n_pieces, n_devices)
    second = _sum_of(data.draw(st.lists(st.integers(1, 9), min_size=n_pieces, max_size=n_pieces)))
    runs = partition(n_pieces, cost, [None] * n_devices, then=second)
    assert runs is not None

    def value(split: list[Run]) -> tuple[float, int, int]:
        return max(_costs(cost, split)), sum(i == j for i, j in split), max(second(i, j) for i, j in split)

    assert value(runs) == min(map(value, _every_split(n_pieces, n_devices)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), _caps)
@settings(max_examples=100, deadline=None)
def test_a_cost_that_no_stage_changes_is_split_as_without_stages(sizes: list[int], caps: list[int | None]) -> None:
    cost = _sum_of(sizes)
    caps = [None if cap is None else cap // 4 for cap in caps]
    assert partition(len(sizes), ByStage(lambda _: cost), caps) == partition(len(sizes), cost, caps)


def test_the_first_of_a_pipeline_gets_less() -> None:
    """It keeps as many micro-batches as there are devices, the last one a single one; an empty device is no stage."""
    cost = ByStage(lambda stage: lambda i, j: (j - i) * (stage.of - stage.number))
    assert partition(12, cost, [None] * 2) == [(0, 4), (4, 12)]
    assert partition(11, cost, [None] * 3) == [(0, 2), (2, 5), (5, 11)]
    assert partition(12, cost, [None, 0, None]) == [(0, 4), (4, 4), (4, 12)]
    # Over three it is 3 x 1 at least: one device, where nothing waits for another's, is the lowest.
    assert partition(2, ByStage(lambda stage: lambda i, j: stage.of**2 + j - i), [None] * 3) == [(0, 2), (2, 2), (2, 2)]


def _sum_of(sizes: list[int]) -> Callable[[int, int], int]:
    total = list(accumulate(sizes, initial=0))
    return lambda i, j: total[j] - total[i]


@pytest.mark.parametrize(
    ("sizes", "n_devices", "runs"),
    [
        ([5, 1, 1, 1], 2, [(0, 1), (1, 4)]),
        ([1, 1, 1, 1], 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([1, 1, 1], 2, [(0, 1), (1, 3)]),
        ([9, 1, 1, 1, 1], 3, [(0, 1), (1, 3), (3, 5)]),
        ([4, 4], 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        ([0, 0], 2, [(0, 1), (1, 2)]),
    ],
    ids=["one large", "one each", "first less", "most even", "last empty", "nothing"],
)
def test_ties_are_broken_as_documented(sizes: list[int], n_devices: int, runs: list[Run]) -> None:
    assert partition(len(sizes), _sum_of(sizes), [None] * n_devices) == runs


def test_caps_push_work_to_the_larger_device_and_skip_one_that_takes_nothing() -> None:
    assert partition(4, _sum_of([3, 3, 3, 3]), [3, 6, 6]) == [(0, 1), (1, 2), (2, 4)]
    assert partition(2, _sum_of([3, 3]), [0, 3, 3]) == [(0, 0), (0, 1), (1, 2)]
    assert partition(2, _sum_of([3, 3]), [2, 5]) is None


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.lists(st.integers(1, 9), min_size=7, max_size=7),
    st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_of_equal_costs_the_smallest_second(first: list[int], second: list[int], n_devices: int) -> None:
    """Against all splits: among those with the smallest maximum and the fewest empty devices, the smallest second one."""
    n = len(first)

    def total(values: list[int], i: int, j: int) -> int:
        return sum(values[i:j])

    runs = partition(n, lambda i, j: total(first, i, j), [None] * n_devices, then=lambda i, j: total(second, i, j))
    assert runs is not None

    def value(split: list[tuple[int, int]]) -> tuple[int, int, int]:
        costs = [total(first, i, j) for i, j in split]
        return max(costs), sum(i == j for i, j in split), max(total(second, i, j) for i, j in split)

    assert value(runs) == min(map(value, _every_split(n, n_devices)))
