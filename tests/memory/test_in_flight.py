"""How many micro-batches each GPU of a pipeline keeps: by a formula, and counted along the order in which they are issued."""

from __future__ import annotations

import pytest

from verl_shard.memory.in_flight import Stage, issued


def counted(n: int, stages: int, in_flight: int) -> list[int]:
    """The most forwards without their backward on each stage, walking along the order."""
    held, most = [0] * stages, [0] * stages
    for _, stage in issued(n, stages, in_flight):
        if stage is None:
            held = [each - 1 for each in held]
        else:
            held[stage] += 1
            most[stage] = max(most[stage], held[stage])
    assert held == [0] * stages
    return most


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_what_is_kept_is_what_is_counted(stages: int) -> None:
    for n in range(1, 9):
        for in_flight in range(1, n + 1):
            assert [Stage(s, stages).kept(in_flight) for s in range(stages)] == counted(n, stages, in_flight)


def test_known_numbers() -> None:
    """1F1B as it is drawn: the first of as many stages as micro-batches keeps all, the last one."""
    assert [Stage(s, 4).kept(4) for s in range(4)] == [4, 3, 2, 1]
    assert [Stage(s, 4).kept(6) for s in range(4)] == [6, 5, 4, 3]
    assert [Stage(s, 4).kept(2) for s in range(4)] == [2, 2, 2, 1]
    assert Stage().kept(5) == 5
    assert list(issued(3, 2, 2)) == [
        (0, 0), (0, 1), (1, 0), (0, None), (1, 1), (2, 0), (1, None), (2, 1), (2, None),
    ]  # fmt: skip


def test_the_largest_number_that_keeps_no_more() -> None:
    for stages in (1, 2, 3, 4):
        for stage in (Stage(number, stages) for number in range(stages)):
            for kept in range(1, 9):
                most = max(n for n in range(1, 40) if stage.kept(n) <= kept)
                # A stage that never keeps more than its share of a short pipeline is no limit until there are more.
                assert stage.in_flight(kept) == most
