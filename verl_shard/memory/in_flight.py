"""Which micro-batches a GPU of a pipeline has activations of: the order in which they are issued, as numbers alone.

The pipeline's own loop (runtime/pipeline_order.py) asks the same functions how far a forward may go, so that what is
estimated is what is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A GPU's place in a pipeline: number, from 0, of so many. The default is a GPU that has all of a model."""

    number: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.number < self.of, "a stage is one of those that there are"

    def kept(self, in_flight: int) -> int:
        """Micro-batches whose activations are here at most, of so many in flight: all but those that have not come so
        far when an earlier one's backward is given."""
        return min(in_flight, self.of - self.number + max(0, in_flight - self.of))

    def coming(self, in_flight: int) -> int:
        """Micro-batches whose hidden states have been sent here at most, and that have not run here yet."""
        return Stage(self.number - 1, self.of).kept(in_flight) - self.kept(in_flight) if self.number else 0

    def in_flight(self, kept: int) -> int:
        """The largest number in flight of which no more than so many are kept here."""
        return kept + self.number if kept >= self.of - self.number else kept


def last_stage(ahead: int, stages: int, in_flight: int) -> int:
    """The last stage that a micro-batch runs before the backward of the one that is `ahead` before it."""
    return max(0, min(stages - 1, stages - 1 - ahead + max(0, in_flight - stages)))


def issued(n: int, stages: int, in_flight: int) -> Iterator[tuple[int, int | None]]:
    """n micro-batches in the order in which they are issued: (micro-batch, stage) for its forward on one stage,
    (micro-batch, None) for its loss and its backward on all."""
    been = [0] * n
    for at in range(n):
        for ahead in range(min(in_flight, n - at)):
            number, until = at + ahead, last_stage(ahead, stages, min(in_flight, n))
            for stage in range(been[number], until + 1):
                yield number, stage
            been[number] = max(been[number], until + 1)
        yield at, None
