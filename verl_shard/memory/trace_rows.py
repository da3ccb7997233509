"""From a Recording's events to the rows of a Trace: which points in time are kept, and what is there across them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verl_shard.memory.recording import Recording


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
    largest moment of all together and the end are all that can be a peak. The optimizer works on all blocks at once;
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
    # Row r is the state after event rows[r] - 1.
    rows = np.array(sorted(event + 1 for event in kept), dtype=np.int64)
    return rows, {name: int(np.searchsorted(rows, event, side="right")) for name, event in recording.marks}


def halves_of(
    recording: Recording, halved: Collection[int], row_of_event: np.ndarray, step: int, shape: tuple[int, int]
) -> np.ndarray:
    """(rows, blocks): bytes of such gradients, from where their first half is made to the end of the backward."""
    made = np.zeros(shape, dtype=np.int64)
    for at in np.flatnonzero(np.isin(recording.events - 1, list(halved))):
        number = int(recording.events[at]) - 1
        made[row_of_event[at] : step - 1, recording.owners[number]] += recording.sizes[number]
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
