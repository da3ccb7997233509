"""Trace: the memory of a pass over time, block by block, from which the peak of any run of blocks is read.

No device is known here. What block b has allocated is on the GPU that holds b, whichever that is; a tensor that one
block makes and another reads is on both GPUs when they differ. So the memory of the GPU that holds blocks i..j-1 is
over time a difference of prefix sums over blocks, plus what crosses in, and its peak the largest value of that.

One micro-batch is recorded. Of several in flight those that wait for their backward keep what the one keeps between its
forward and its backward; how many of them a GPU has, its place in the pipeline says (memory/in_flight.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from torch import nn

from verl_shard.memory.in_flight import Stage, issued
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    LOGITS,
    LOSS,
    OPTIMIZER,
    Recording,
    halved_gradients,
)
from verl_shard.memory.run_pass import record
from verl_shard.memory.trace_rows import Crossing, crossings_of, new_gradients_of, rows_of
from verl_shard.models.spec import ModelSpec


def trace(spec: ModelSpec, module: nn.Module, wanted: PassSpec) -> Trace:
    """Runs the pass `wanted` of `module` without memory and returns its Trace.

    module: on meta or with weights; it is not changed and none of its weights is read.
    Raises ConfigError when its forward cannot be traced.
    """
    return Trace.of(record(spec, module, alone(wanted)), wanted)


def alone(wanted: PassSpec) -> PassSpec:
    """The pass that is recorded: of one micro-batch, however many are in flight."""
    return replace(wanted, in_flight=1)


Event = tuple[str, int, int]
"""(phase, storage, size), with size -1 for a release."""


@dataclass(frozen=True)
class _When:
    """others: micro-batches that wait beside the one that works; at_head: where the logits are. gradients_from: the phase
    from which they are all there, None when that is the first micro-batch's. coming: micro-batches of which only what is sent
    here is there."""

    others: int
    at_head: int
    gradients_from: str | None
    coming: int = 0


@dataclass(frozen=True)
class _Highest:
    """(blocks, blocks + 1), of the run that holds blocks i..j-1 and one micro-batch. inside: the most bytes in its forward
    and backward, outside: before and after. copied: what it copies to a GPU that waits with it."""

    inside: np.ndarray
    outside: np.ndarray
    copied: np.ndarray


@dataclass(frozen=True, eq=False)
class Trace:
    """Bytes that each block holds, at each point in time that can be a peak, of one micro-batch after the other.

    live: (rows, blocks), bytes. kinds: (rows, blocks, len(KINDS)), the same by what it is.
    phases: the rows at which "forward", "backward" and "optimizer" begin.
    flops: (forward, backward) of each block.
    in_flight: of the pass. waiting: the row at which a micro-batch waits for its turn, all of its forward done.
    """

    live: np.ndarray
    kinds: np.ndarray
    phases: Mapping[str, int]
    flops: tuple[tuple[int, int], ...]
    crossings: tuple[Crossing, ...]
    recording: Recording
    accumulating: bool = False
    in_flight: int = 1
    waiting: int = 0
    halved: frozenset[int] = frozenset()
    """See halved_gradients."""
    new_gradients: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """(rows, blocks): bytes of gradients beside the sum of earlier micro-batches."""
    _peaks: dict[tuple[_When, ...], np.ndarray] = field(default_factory=dict, repr=False)
    _highest: dict[str | None, _Highest] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, recording: Recording, wanted: PassSpec) -> Trace:
        rows, phase_rows = rows_of(recording)
        n_blocks = len(recording.flops)
        events = recording.events
        numbers = np.abs(events) - 1
        deltas = recording.sizes[numbers] * np.sign(events)
        row_of_event = np.searchsorted(rows, np.arange(len(events)), side="right")
        kinds = np.zeros((len(rows), n_blocks, len(KINDS)), dtype=np.int64)
        np.add.at(kinds, (row_of_event, recording.owners[numbers], recording.kinds[numbers]), deltas)
        kinds = kinds.cumsum(axis=0)
        loss_row = phase_rows.pop(LOSS, phase_rows.get("backward", 1))
        halved = halved_gradients(recording)
        step = phase_rows.get("optimizer", len(rows))
        new_gradients = new_gradients_of(recording, halved, rows, step, n_blocks)
        if wanted.accumulating and "optimizer" in phase_rows:
            # Gradients are there from the first micro-batch on; those of another are added to them and gone.
            kinds[phase_rows["forward"] : step, :, GRADIENTS] = kinds[step - 1, :, GRADIENTS]
            kinds[:step, :, GRADIENTS] += new_gradients[:step]
        return cls(
            live=kinds.sum(axis=2),
            kinds=kinds,
            phases=phase_rows,
            flops=tuple(zip(recording.flops, recording.flops_in_backward, strict=True)),
            crossings=crossings_of(recording, row_of_event, len(rows)),
            recording=recording,
            accumulating=wanted.accumulating,
            halved=halved,
            new_gradients=new_gradients,
            in_flight=wanted.in_flight,
            waiting=loss_row - 1,
        )

    @property
    def n_blocks(self) -> int:
        return int(self.live.shape[1])

    @property
    def peaks(self) -> np.ndarray:
        """(blocks, blocks + 1): at [i, j] the peak in bytes of a GPU that holds blocks i..j-1, and every micro-batch in
        flight. Zero for j <= i."""
        return self.peaks_at(Stage())

    def peaks_at(self, stage: Stage) -> np.ndarray:
        """The same of a GPU with that place in the pipeline; one array for all places that hold as much. Not to be changed."""
        whens = self._whens(stage)
        if whens not in self._peaks:
            made = [self._peaks_when(when) for when in whens]
            self._peaks[whens] = made[0] if len(made) == 1 else np.maximum(*made)
        return self._peaks[whens]

    def _peaks_when(self, when: _When) -> np.ndarray:
        """What waits is there at every row of a micro-batch alike, so that it is added to the highest one."""
        if when.gradients_from not in self._highest:
            self._highest[when.gradients_from] = self._highest_of(self._kinds_when(_When(0, 0, when.gradients_from)))
        highest = self._highest[when.gradients_from]
        if not when.others and not when.at_head and not when.coming:
            one: np.ndarray = np.maximum(highest.inside, highest.outside)
            return one
        kept = self._kept_at(self.waiting)
        before = np.zeros((2, self.n_blocks + 1), dtype=np.int64)
        np.cumsum(kept[:, [ACTIVATIONS, LOGITS]].T, axis=1, out=before[:, 1:])
        activations, logits = before[:, None, :] - before[:, :-1, None]
        others = np.full((self.n_blocks, 1), when.others)
        others[0] = when.at_head  # the first GPU reads only what its head is given
        wait = when.others * activations + when.at_head * logits + (others + when.coming) * highest.copied
        peaks: np.ndarray = np.triu(np.maximum(highest.inside + wait, highest.outside), 1)
        return peaks

    def _highest_of(self, kinds: np.ndarray) -> _Highest:
        live = kinds.sum(axis=2)
        n_rows, n = live.shape
        before = np.zeros((n_rows, n + 1), dtype=np.int64)
        np.cumsum(live, axis=1, out=before[:, 1:])
        inside, outside, copied = np.zeros((3, n, n + 1), dtype=np.int64)
        read_by: dict[int, list[tuple[int, int]]] = defaultdict(list)
        made_by: dict[int, list[int]] = defaultdict(list)
        for index, crossing in enumerate(self.crossings):
            made_by[crossing.owner].append(index)
            for block, row in crossing.users:
                read_by[block].append((index, row))
        start, end = self.phases.get("forward", 0), self.phases.get("optimizer", n_rows)
        for i in range(n):
            copies = np.zeros(n_rows, dtype=np.int64)
            since: dict[int, int] = {}
            wait = 0
            for j in range(i + 1, n + 1):
                block = j - 1
                for index in made_by[block]:
                    if index in since:
                        crossing = self.crossings[index]
                        row = since.pop(index)
                        copies[row : crossing.end] -= crossing.size
                        wait -= self._waits(row, crossing)
                for index, row in read_by[block]:
                    crossing = self.crossings[index]
                    if i <= crossing.owner < j:
                        continue
                    until = since.get(index, crossing.end)
                    if row < until:
                        copies[row:until] += crossing.size
                        waited = self._waits(since[index], crossing) if index in since else 0
                        wait += self._waits(row, crossing) - waited
                        since[index] = row
                held = before[:, j] - before[:, i] + copies
                inside[i, j] = held[start:end].max(initial=0)
                outside[i, j] = max(held[:start].max(initial=0), held[end:].max(initial=0))
                copied[i, j] = wait
        return _Highest(inside, outside, copied)

    def peak(self, i: int, j: int, stage: Stage = Stage()) -> int:  # noqa: B008 - frozen
        """The peak, in bytes, of a GPU that holds blocks i..j-1."""
        return int(self.peaks_at(stage)[i, j])

    def _waits(self, row: int, crossing: Crossing) -> int:
        """Bytes of a copy that is there from `row` on, while its micro-batch waits for its backward."""
        return crossing.size if row <= self.waiting < crossing.end else 0

    def kept(self, blocks: Collection[int], *, with_loss: bool = False) -> int:
        """Bytes that a micro-batch keeps on a GPU with these blocks while it waits for its turn, what was copied there
        included. with_loss: when its loss is made too, and its backward is next."""
        row = self.phases["backward"] - 1 if with_loss else self.waiting
        return int(self._kept_at(row)[list(set(blocks))].sum()) + self.sent(blocks)

    def sent(self, blocks: Collection[int]) -> int:
        """Of those the bytes that were copied there. They come before the micro-batch does (Stage.coming)."""
        mine = set(blocks)
        return sum(
            self._waits(min(row for block, row in crossing.users if block in mine), crossing)
            for crossing in self.crossings
            if crossing.owner not in mine and any(block in mine for block, _ in crossing.users)
        )

    def _kept_at(self, row: int) -> np.ndarray:
        """(blocks, kinds): what a micro-batch has then, without copies."""
        made: np.ndarray = self.kinds[row] - self.kinds[self.phases["forward"] - 1]
        made[:, [kind for kind in range(len(KINDS)) if kind not in (ACTIVATIONS, LOGITS)]] = 0
        return made

    def _whens(self, stage: Stage) -> tuple[_When, ...]:
        """When a GPU may be fullest: as many wait as ever do; or one fewer, and there are gradients."""
        there, n = stage.kept(self.in_flight), self.in_flight
        if n == 1 or "backward" not in self.phases:
            return (_When(0, 0, None),)
        last = Stage(stage.of - 1, stage.of).kept(n)
        if self.accumulating or there < n:  # a backward has been before a forward comes
            return (_When(there - 1, last - 1, "forward", stage.coming(n)),)
        return _When(there - 1, last - 1, None), _When(there - 2, min(last, n - 1) - 1, "backward")

    def _kinds_when(self, when: _When) -> np.ndarray:
        """As `kinds`, with what waits on a GPU."""
        if when == _When(0, 0, None):
            return self.kinds
        kinds, kept = self.kinds.copy(), self._kept_at(self.waiting)
        step = self.phases.get("optimizer", len(kinds))
        rows = slice(self.phases["forward"], step)
        kinds[rows, :, ACTIVATIONS] += when.others * kept[:, ACTIVATIONS]
        kinds[rows, :, LOGITS] += when.at_head * kept[:, LOGITS]
        if when.gradients_from is not None:
            since = slice(self.phases[when.gradients_from], step)
            kinds[since, :, GRADIENTS] = kinds[step - 1, :, GRADIENTS] + self.new_gradients[since]
        return kinds

    def kinds_at_peak(self, blocks: Collection[int], stage: Stage = Stage()) -> list[int]:  # noqa: B008 - frozen
        """Bytes of each kind in KINDS when a GPU that holds these blocks is fullest."""
        held = np.concatenate([self._kinds_when(when)[:, list(blocks)].sum(axis=1) for when in self._whens(stage)])
        sizes: list[int] = held[held.sum(axis=1).argmax()].tolist()
        return sizes

    def events_of(
        self, blocks: Collection[int], stages: Sequence[int] | None = None, *, in_flight: int | None = None
    ) -> tuple[list[int], list[int], list[Event]]:
        """What a GPU that holds these blocks allocates and releases: sizes of what is there before, sizes of the
        optimizer's states, and a step of as many micro-batches as there are in flight, one more when accumulating.

        Those after the first have their number in the name of the phase: "forward 1". A copy of what another GPU made is a
        storage of its own, from the first time that it is read here.

        stages: of each block; by default one GPU has all. in_flight: other than that of the pass.
        """
        r = self.recording
        mine = np.isin(r.owners, list(blocks))
        before = [int(event) - 1 for event in r.events[: r.n_static] if event > 0 and mine[event - 1]]
        states = [int(r.sizes[number]) for number in before if r.kinds[number] == OPTIMIZER]
        static = [int(r.sizes[number]) for number in before if r.kinds[number] != OPTIMIZER]
        parts = self._parts(blocks, mine, [0] * self.n_blocks if stages is None else stages)
        if "backward" not in self.phases:
            return static, states, [event for part in parts.values() for event in part]
        n_stages = 1 if stages is None else max(stages) + 1
        n = self.in_flight if in_flight is None else in_flight
        events: list[Event] = []
        for number, stage in issued(n + self.accumulating, n_stages, n):
            for name in ("backward",) if stage is None else (stage,):
                events += self._of_micro_batch(parts.get(name, []), number)
        return static, states, events + parts.get("optimizer", [])

    def _parts(self, blocks: Collection[int], mine: np.ndarray, stages: Sequence[int]) -> dict[str | int, list[Event]]:
        """Of one micro-batch: its forward by stage, then by phase; its loss is with its backward."""
        r = self.recording
        copied: dict[int, list[tuple[int, int]]] = defaultdict(list)
        seen: set[int] = set()
        for at, number, block in r.uses:
            if block in blocks and not mine[number] and number not in seen:
                seen.add(number)
                copied[at].append((number, block))
        names = {at: name for name, at in r.marks}
        offset = len(r.sizes)  # copies are numbered after all storages
        parts: dict[str | int, list[Event]] = defaultdict(list)
        phase, key, stage = "", "", 0
        for at in range(r.n_static, len(r.events) + 1):
            if at in names:
                key = "backward" if names[at] == LOSS else names[at]
                if names[at] != LOSS:
                    phase, stage = names[at], 0
                    # A phase that allocates nothing is one too: the fused optimizer's.
                    parts[stage if key == "forward" else key].append((phase, -1, 0))
            if at == len(r.events):
                break
            for number, block in copied.get(at, ()):
                # Sent at the end of the stage before. To a GPU that comes again, when it comes.
                sent = max(stages[block] - 1, 0) if stages[block] >= stage else stage
                parts[sent if key == "forward" else key].append((phase, offset + number, int(r.sizes[number])))
                stage = max(stage, stages[block])
            stage = max(stage, stages[int(r.actors[at])])
            event = int(r.events[at])
            number = abs(event) - 1
            if mine[number]:
                entry = (phase, number, int(r.sizes[number]) if event > 0 else -1)
            elif event < 0 and number in seen:
                entry = (phase, offset + number, -1)
            else:
                continue
            parts[stage if key == "forward" else key].append(entry)
        return parts

    def _of_micro_batch(self, part: Sequence[Event], number: int) -> Iterator[Event]:
        """The part of that micro-batch. Its gradients, but for the first one's, are added to those that are there, and gone:
        one of which the other half is to come, at the end."""
        first = 2 * len(self.recording.sizes) * number
        held = []
        for phase, storage, size in part:
            named = f"{phase} {number}" if number else phase
            yield named, storage if storage < 0 else first + storage, size
            of_parameter = storage < len(self.recording.kinds) and self.recording.kinds[storage] == GRADIENTS
            if number and size > 0 and of_parameter:
                if storage in self.halved:
                    held.append((named, first + storage, -1))
                else:
                    yield named, first + storage, -1
        yield from held

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The peak of each phase on one GPU that holds all, what it begins with included."""
        starts = [*sorted(self.phases.items(), key=lambda item: item[1]), ("", len(self.live))]
        total = np.max([self._kinds_when(when).sum(axis=(1, 2)) for when in self._whens(Stage())], axis=0)
        return {name: int(total[max(at - 1, 0) : end].max()) for (name, at), (_, end) in pairwise(starts)}
