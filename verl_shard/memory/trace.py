"""Trace: the memory of a pass over time, block by block, from which the peak of any run of blocks is read.

No device is known here. What block b has allocated is on the GPU that holds b, whichever that is; a tensor that one
block makes and another reads is on both GPUs when they differ. So the memory of the GPU that holds blocks i..j-1 is
over time a difference of prefix sums over blocks, plus what crosses in, and its peak the largest value of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import nn

from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import GRADIENTS, KINDS, OPTIMIZER, Recording
from verl_shard.memory.run_pass import record
from verl_shard.models.spec import ModelSpec


def trace(spec: ModelSpec, module: nn.Module, wanted: PassSpec) -> Trace:
    """Runs the pass `wanted` of `module` without memory and returns its Trace.

    module: on meta or with weights; it is not changed and none of its weights is read.
    Raises ConfigError when its forward cannot be traced.
    """
    return Trace.of(record(spec, module, wanted), wanted)


@dataclass(frozen=True)
class _Crossing:
    """A storage that blocks read which did not make it: on their GPU there is a copy of it."""

    owner: int
    size: int
    users: tuple[tuple[int, int], ...]
    """(block, row from which the copy is there), by row."""
    end: int
    """The row from which it is gone."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Bytes that each block holds, at each point in time that can be a peak.

    live: (rows, blocks), bytes. kinds: (rows, blocks, len(KINDS)), the same by what it is.
    phases: the rows at which "forward", "backward" and "optimizer" begin.
    flops: (forward, backward) of each block.
    """

    live: np.ndarray
    kinds: np.ndarray
    phases: Mapping[str, int]
    flops: tuple[tuple[int, int], ...]
    crossings: tuple[_Crossing, ...]
    recording: Recording
    accumulating: bool = False

    @classmethod
    def of(cls, recording: Recording, wanted: PassSpec) -> Trace:
        rows, phase_rows = _rows(recording)
        n_blocks = len(recording.flops)
        events = recording.events
        numbers = np.abs(events) - 1
        deltas = recording.sizes[numbers] * np.sign(events)
        row_of_event = np.searchsorted(rows, np.arange(len(events)), side="right")
        kinds = np.zeros((len(rows), n_blocks, len(KINDS)), dtype=np.int64)
        np.add.at(kinds, (row_of_event, recording.owners[numbers], recording.kinds[numbers]), deltas)
        kinds = kinds.cumsum(axis=0)
        more = max(wanted.in_flight - 2, 0)
        if more:
            # Two were run; each more keeps the same until the backward, whose first part is the peak.
            until = phase_rows.get("optimizer", len(rows))
            kinds[phase_rows["forward"] : until, :, KINDS.index("activations")] += more * recording.kept
        if wanted.accumulating and "optimizer" in phase_rows:
            # Gradients are there from the first micro-batch on; those of another are added to them and gone.
            step = phase_rows["optimizer"]
            kinds[phase_rows["forward"] : step, :, GRADIENTS] = kinds[step - 1, :, GRADIENTS]
        return cls(
            live=kinds.sum(axis=2),
            kinds=kinds,
            phases=phase_rows,
            flops=tuple(zip(recording.flops, recording.flops_in_backward, strict=True)),
            crossings=_crossings(recording, row_of_event, len(rows)),
            recording=recording,
            accumulating=wanted.accumulating,
        )

    @property
    def n_blocks(self) -> int:
        return int(self.live.shape[1])

    @cached_property
    def peaks(self) -> np.ndarray:
        """(blocks, blocks + 1): at [i, j] the peak in bytes of a GPU that holds blocks i..j-1. Zero for j <= i."""
        n_rows, n = self.live.shape
        before = np.zeros((n_rows, n + 1), dtype=np.int64)
        np.cumsum(self.live, axis=1, out=before[:, 1:])
        peaks = np.zeros((n, n + 1), dtype=np.int64)
        read_by: dict[int, list[tuple[int, int]]] = defaultdict(list)
        made_by: dict[int, list[int]] = defaultdict(list)
        for index, crossing in enumerate(self.crossings):
            made_by[crossing.owner].append(index)
            for block, row in crossing.users:
                read_by[block].append((index, row))
        for i in range(n):
            copies = np.zeros(n_rows, dtype=np.int64)
            since: dict[int, int] = {}
            for j in range(i + 1, n + 1):
                block = j - 1
                for index in made_by[block]:
                    if index in since:
                        crossing = self.crossings[index]
                        copies[since.pop(index) : crossing.end] -= crossing.size
                for index, row in read_by[block]:
                    crossing = self.crossings[index]
                    if i <= crossing.owner < j:
                        continue
                    until = since.get(index, crossing.end)
                    if row < until:
                        copies[row:until] += crossing.size
                        since[index] = row
                peaks[i, j] = (before[:, j] - before[:, i] + copies).max()
        return peaks

    def peak(self, i: int, j: int) -> int:
        """The peak, in bytes, of a GPU that holds blocks i..j-1."""
        return int(self.peaks[i, j])

    def kinds_at_peak(self, blocks: Collection[int]) -> list[int]:
        """Bytes of each kind in KINDS when a GPU that holds these blocks is fullest."""
        held = self.kinds[:, list(blocks)].sum(axis=1)
        sizes: list[int] = held[held.sum(axis=1).argmax()].tolist()
        return sizes

    def events_of(self, blocks: Collection[int]) -> tuple[list[int], list[int], list[tuple[str, int, int]]]:
        """What a GPU that holds these blocks allocates and releases: sizes of what is there before, sizes of the
        optimizer's states, and the pass as (phase, storage, size), with size -1 for a release.

        A copy of what another GPU made is a storage of its own, from the first time that it is read here.
        """
        r = self.recording
        mine = np.isin(r.owners, list(blocks))
        before = [int(event) - 1 for event in r.events[: r.n_static] if event > 0 and mine[event - 1]]
        states = [int(r.sizes[number]) for number in before if r.kinds[number] == OPTIMIZER]
        static = [int(r.sizes[number]) for number in before if r.kinds[number] != OPTIMIZER]
        copied: dict[int, list[int]] = defaultdict(list)
        seen: set[int] = set()
        for at, number, block in r.uses:
            if block in blocks and not mine[number] and number not in seen:
                seen.add(number)
                copied[at].append(number)
        names = {at: name for name, at in r.marks}
        events: list[tuple[str, int, int]] = []
        phase = ""
        offset = len(r.sizes)  # copies are numbered after all storages
        for at in range(r.n_static, len(r.events) + 1):
            if at in names:
                phase = names[at]
                events.append((phase, -1, 0))  # a phase that allocates nothing is one too: the fused optimizer's
            if at == len(r.events):
                break
            for number in copied.get(at, ()):
                events.append((phase, offset + number, int(r.sizes[number])))
            event = int(r.events[at])
            number = abs(event) - 1
            if mine[number]:
                events.append((phase, number, int(r.sizes[number]) if event > 0 else -1))
            elif event < 0 and number in seen:
                events.append((phase, offset + number, -1))
        return static, states, self._of_two(events) if self.accumulating else events

    def _of_two(self, events: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """A step of two micro-batches: forward and backward again, in which a gradient is added to the first and gone."""
        n = 2 * len(self.recording.sizes)
        ends = next((at for at, event in enumerate(events) if event[0] == "optimizer"), len(events))
        again: list[tuple[str, int, int]] = []
        for phase, number, size in events[:ends]:
            again.append((phase, number if number < 0 else n + number, size))
            if size > 0 and number < len(self.recording.kinds) and self.recording.kinds[number] == GRADIENTS:
                again.append((phase, n + number, -1))
        return [*events[:ends], *again, *events[ends:]]

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The peak of each phase on one GPU that holds all, what it begins with included."""
        starts = [*sorted(self.phases.items(), key=lambda item: item[1]), ("", len(self.live))]
        total = self.live.sum(axis=1)
        return {name: int(total[max(at - 1, 0) : end].max()) for (name, at), (_, end) in pairwise(starts)}


def _rows(recording: Recording) -> tuple[np.ndarray, dict[str, int]]:
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


def _crossings(recording: Recording, row_of_event: np.ndarray, n_rows: int) -> tuple[_Crossing, ...]:
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
        _Crossing(int(recording.owners[number]), int(recording.sizes[number]), tuple(readers), end.get(number, n_rows))
        for number, readers in users.items()
    )
