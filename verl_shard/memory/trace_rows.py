"""From a Recording's events to the rows of a Trace: which points in time are kept, and what is there across them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_shard.memory.recording import GRADIENTS, Recording


@dataclass(frozen=True)
class Crossing:
    """A storage that blocks read which did not make it: on their GPU there is a copy of it."""

    owner: int
    size: int
    users: tuple[tuple[int, int], ...]
    """(block, row from which the copy is there), by row."""
    end: int
    """The row from which it is gone."""


def rows_of(recording: Recording) -> tuple[np.ndarray, dict[str, int]]:
    """The points in time that are kept: events after which a row of the Trace is taken.

    Between two changes of the running block only that block's memory changes much, so its own largest moment, the
    largest moment of all together and the end are all that can be a peak, and, where there are gradients of earlier
    micro-batches, the one at which its largest gradient is there beside them. The optimizer works on all blocks at once;
    there each operation's end is taken.
    """
    start, n = recording.n_static, len(recording.events)
    marks = dict(recording.marks)
    step_begins = marks.get("optimizer", n)
    key = np.where(np.arange(n) < step_begins, recording.actors, recording.steps)
    changes = np.flatnonzero(np.diff(key[start:])) + start + 1
    cuts = np.unique(np.concatenate([[start], changes, [event for _, event in recording.marks], [n]]))
    numbers = np.abs(recording.events) - 1
    deltas = recording.sizes[numbers] * np.sign(recording.events)
    total = deltas.cumsum()
    kept = {start - 1} if start else set()
    for first, end in pairwise(cuts.tolist()):
        kept.add(int(end) - 1)
        if first >= step_begins:
            continue
        kept.add(first + int(total[first:end].argmax()))
        own = np.where(recording.owners[numbers[first:end]] == recording.actors[first:end], deltas[first:end], 0)
        kept.add(first + int(own.cumsum().argmax()))
    made = recording.events[start:step_begins] - 1
    new = np.flatnonzero((made >= 0) & (recording.kinds[np.maximum(made, 0)] == GRADIENTS))
    for owner in np.unique(recording.owners[made[new]]):
        own = new[recording.owners[made[new]] == owner]
        kept.add(start + int(own[recording.sizes[made[own]].argmax()]))
    # Row r is the state after event rows[r] - 1.
    rows = np.array(sorted(event + 1 for event in kept), dtype=np.int64)
    return rows, {name: int(np.searchsorted(rows, event, side="right")) for name, event in recording.marks}


def new_gradients_of(
    recording: Recording, halved: Collection[int], rows: np.ndarray, step: int, n_blocks: int
) -> np.ndarray:
    """(rows, blocks): bytes of gradients that are there beside the sum of earlier micro-batches: each when it is made, and
    one that waits for its other half (`halved`) to the end of the backward.

    step: the row at which the optimizer's begins.
    """
    made = np.zeros((len(rows), n_blocks), dtype=np.int64)
    numbers = recording.events[recording.n_static :] - 1
    for at in np.flatnonzero((numbers >= 0) & (recording.kinds[np.maximum(numbers, 0)] == GRADIENTS)):
        number, event = int(numbers[at]), int(at) + recording.n_static
        row = int(np.searchsorted(rows, event, side="right"))
        if row >= step - 1:
            continue
        if number in halved:
            made[row : step - 1, recording.owners[number]] += recording.sizes[number]
        elif rows[row] == event + 1:
            made[row, recording.owners[number]] += recording.sizes[number]
    return made


def crossings_of(recording: Recording, row_of_event: np.ndarray, n_rows: int) -> tuple[Crossing, ...]:
    """Copies of what one block made and another reads."""
    end: dict[int, int] = {}
    used = {number for _, number, _ in recording.uses}
    for release in np.flatnonzero(recording.events < 0).tolist():
        number = -int(recording.events[release]) - 1
        if number in used:
            end[number] = int(row_of_event[release])
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event, number, block in recording.uses:
        row = int(row_of_event[event]) if event < len(row_of_event) else n_rows
        users[number].append((block, row))
    return tuple(
        Crossing(int(recording.owners[number]), int(recording.sizes[number]), tuple(readers), end.get(number, n_rows))
        for number, readers in users.items()
    )
