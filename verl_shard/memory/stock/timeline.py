"""FSDP's memory around a recorded micro-batch: gathered units, gradients, buffers of reductions, in their order in time.

Read from torch 2.13 (torch/distributed/fsdp: _flat_param.py and _runtime_utils.py for fsdp, _fully_shard/ for fsdp2).
What torch's allocator counts as allocated depends on the order of calls on the host alone, so it can be laid out exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from verl_shard.memory.recorder import ROUND
from verl_shard.memory.recording import ACTIVATIONS, GRADIENTS, KINDS, LOGITS, Recording
from verl_shard.memory.stock.units import ShardedBackend, Unit, Units

PARTS = ("gathered", "gradients", "reduce", "activations", "logits")
"""What a moment of a pass is made of, besides what is there all the time."""
GATHERED, UNSHARDED, REDUCE, ACTS, HEAD = range(len(PARTS))
REDUCE_ITEMSIZE = 4
"""Gradients are reduced in fp32 (fsdp_config.mixed_precision.reduce_dtype)."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How weights are held and gathered.

    ranks: of the shard group. held: bytes of an element of the sharded weights (fsdp_config.model_dtype); gathered: of
    a gathered one. on_host: weights and gradients are in host memory and come in for each use (a ref, offload_policy).
    """

    backend: ShardedBackend
    ranks: int
    held: int = 4
    gathered: int = 2
    on_host: bool = False

    def shard(self, n_params: int) -> int:
        """Elements on the rank that has most."""
        return -(-n_params // self.ranks)


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a pass: bytes of each of PARTS, and of the whole."""

    parts: dict[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.parts.values())


def peak_of(recording: Recording, units: Units, sharding: Sharding, *, later: bool = False) -> Peak:
    """The fullest moment of a micro-batch.

    later: gradients of an earlier micro-batch of the same optimizer step are there, and are added to.
    """
    line = _Line(recording, units, sharding, later)
    line.lay_out()
    return line.peak()


@dataclass
class _Line:
    """Collects (event, part, bytes): changes right before an event of the recording."""

    recording: Recording
    units: Units
    sharding: Sharding
    later: bool
    at: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)

    def add(self, event: int, part: int, n_bytes: int) -> None:
        """So many bytes more, or fewer; torch gives out multiples of 512."""
        if n_bytes:
            size = -(-abs(n_bytes) // ROUND) * ROUND
            self.at.append(event)
            self.parts.append(part)
            self.deltas.append(size if n_bytes > 0 else -size)

    # When each unit is used

    def lay_out(self) -> None:
        r = self.recording
        marks = dict(r.marks)
        n = len(r.events)
        loss = marks["loss"]
        of_event = np.array(self.units.of_block)[r.actors]
        root = self.units.root
        forward = _visits(of_event, r.n_static, loss, root)
        if self.sharding.backend == "fsdp2":
            self._forward_fsdp2(forward, r.n_static, loss)
        else:
            self._forward_fsdp(forward, r.n_static, loss, training="backward" in marks)
        if "backward" not in marks:
            return
        start = marks.get("gathered", marks["backward"])
        spans = {unit: (first, last) for unit, first, last in _visits(of_event, start, n, root, merge=True)}
        order = sorted(spans, key=lambda unit: spans[unit][0])
        if self.later:
            self.add(r.n_static, UNSHARDED, self.sharding.held * self.sharding.shard(self.units.n_trained))
        grads = self._unsharded_gradients()
        if self.sharding.backend == "fsdp2":
            self._backward_fsdp2(order, spans, start, n, grads)
        else:
            self._backward_fsdp(order, spans, start, n, grads)

    def _unsharded_gradients(self) -> list[int]:
        """Bytes of the recorded gradients of each unit."""
        r = self.recording
        mine = r.kinds == GRADIENTS
        totals = np.zeros(len(self.units.units), dtype=np.int64)
        np.add.at(totals, np.array(self.units.of_block)[r.owners[mine]], r.sizes[mine])
        return [int(total) for total in totals]

    # fsdp2: _fully_shard/_fsdp_param_group.py and _fsdp_collectives.py

    def _unshard_alone(self, at: int, unit: Unit) -> None:
        """One rank: each parameter is cast to a copy, and that copied into the storage that is computed on."""
        s = self.sharding
        cast = s.gathered if s.held != s.gathered else 0
        before = 0
        for n in unit.params:
            if s.on_host:
                self.add(at, GATHERED, s.held * n)
            self.add(at, GATHERED, cast * n)
            if s.on_host and cast:
                self.add(at, GATHERED, -s.held * n)
            self.add(at, GATHERED, -before)  # the loop's variable is bound anew
            before = cast * n or (s.held * n if s.on_host else 0)
            self.add(at, GATHERED, s.gathered * n)
        self.add(at, GATHERED, -before)

    def _shard_on_device(self, at: int, unit: Unit, sign: int) -> None:
        """The shard in the dtype that is gathered; a transient."""
        s = self.sharding
        if sign > 0 and s.on_host and unit.params:
            largest = s.held * s.shard(max(unit.params))
            self.add(at, GATHERED, largest)
            self.add(at, GATHERED, -largest)
        self.add(at, GATHERED, sign * s.gathered * s.shard(unit.n_params))

    def _forward_fsdp2(self, visits: Sequence[tuple[int, int, int]], start: int, end: int) -> None:
        """A unit's gather buffer stays until the next unit is copied out, so that two copies are there at a time."""
        s = self.sharding
        root = self.units.units[self.units.root]
        held: list[int] = []  # the gather buffer of the unit before

        def unshard(at: int, unit: Unit) -> None:
            if s.ranks == 1:
                self._unshard_alone(at, unit)
                return
            size = s.gathered * unit.n_params
            self._shard_on_device(at, unit, 1)
            self.add(at, GATHERED, size)
            self._shard_on_device(at, unit, -1)
            self.add(at, GATHERED, size)
            if held:  # wait_for_unshard keeps a name for it until it returns
                self.add(at, GATHERED, -held.pop())
            held.append(size)

        unshard(start, root)
        for number, first, last in visits:
            unit = self.units.units[number]
            unshard(first, unit)
            self._free(last, unit)
        self._free(end, root)
        if held:
            self.add(end, GATHERED, -held.pop())

    def _free(self, at: int, unit: Unit) -> None:
        sizes = unit.params if self.sharding.backend == "fsdp2" else (unit.n_params,)
        for n in sizes:
            self.add(at, GATHERED, -self.sharding.gathered * n)

    def _backward_fsdp2(
        self, order: list[int], spans: dict[int, tuple[int, int]], start: int, end: int, grads: list[int]
    ) -> None:
        """Each unit is gathered, the next one's gather buffer with it, and reduced when its last operation is done."""
        s, units, root = self.sharding, self.units.units, self.units.root
        buffered = 0  # input of the last reduction, kept until the next
        prefetched: set[int] = set()

        def gather(at: int, number: int, following: int | None) -> None:
            if s.ranks == 1:
                self._unshard_alone(at, units[number])
                return
            size = s.gathered * units[number].n_params
            if number not in prefetched:
                self._shard_on_device(at, units[number], 1)
                self.add(at, GATHERED, size)
                self._shard_on_device(at, units[number], -1)
            self.add(at, GATHERED, size)
            self.add(at, GATHERED, -size)
            if following is not None:
                prefetched.add(following)
                self._shard_on_device(at, units[following], 1)
                self.add(at, GATHERED, s.gathered * units[following].n_params)
                self._shard_on_device(at, units[following], -1)

        def reduce(at: int, number: int) -> None:
            nonlocal buffered
            unit = units[number]
            self._free(at, unit)
            self.add(at, REDUCE, -buffered)
            buffered = REDUCE_ITEMSIZE * s.shard(unit.n_trained) * s.ranks
            self.add(at, REDUCE, buffered)
            self.add(at, UNSHARDED, -grads[number])
            self._reduced(at, unit)

        gather(start, root, order[0] if order else None)
        for number, following in pairwise([*order, None]):
            assert number is not None
            first, last = spans[number]
            gather(first, number, following)
            if units[number].blocks and 0 not in units[number].blocks:
                reduce(last, number)
        reduce(end, root)
        for number in order:  # what the ids feed has no input with a gradient, and is reduced when all is done
            if 0 in units[number].blocks:
                reduce(end, number)
        self.add(end, REDUCE, -buffered)

    def _reduced(self, at: int, unit: Unit) -> None:
        """The sharded gradient: new, or added to what is there."""
        s = self.sharding
        n = s.shard(unit.n_trained)
        self.add(at, UNSHARDED, REDUCE_ITEMSIZE * n)
        if s.held != REDUCE_ITEMSIZE:
            self.add(at, UNSHARDED, s.held * n)
            self.add(at, UNSHARDED, -REDUCE_ITEMSIZE * n)
        if self.later or s.on_host:
            self.add(at, UNSHARDED, -s.held * n)

    # fsdp: _flat_param.py and _runtime_utils.py

    @property
    def _copies(self) -> bool:
        """Whether a flat parameter is computed on in a copy: several ranks, another dtype, or from the host."""
        s = self.sharding
        return s.ranks > 1 or s.held != s.gathered or s.on_host

    def _unshard_flat(self, at: int, unit: Unit) -> None:
        s = self.sharding
        if not self._copies:
            return
        from_host = s.held * s.shard(unit.n_params) if s.on_host and s.held != s.gathered else 0
        if s.ranks == 1:
            self.add(at, GATHERED, s.gathered * unit.n_params)
            self.add(at, GATHERED, from_host)
            self.add(at, GATHERED, -from_host)
            return
        cast = s.gathered * s.shard(unit.n_params) if s.held != s.gathered or s.on_host else 0
        self.add(at, GATHERED, cast)
        self.add(at, GATHERED, from_host)
        self.add(at, GATHERED, -from_host)
        self.add(at, GATHERED, s.gathered * unit.n_params)
        self.add(at, GATHERED, -cast)

    def _free_flat(self, at: int, unit: Unit) -> None:
        if self._copies:
            self.add(at, GATHERED, -self.sharding.gathered * unit.n_params)

    def _forward_fsdp(self, visits: Sequence[tuple[int, int, int]], start: int, end: int, *, training: bool) -> None:
        """The root stays gathered after the forward where there are several ranks, and where there is one does not."""
        root = self.units.units[self.units.root]
        self._unshard_flat(start, root)
        for number, first, last in visits:
            self._unshard_flat(first, self.units.units[number])
            self._free_flat(last, self.units.units[number])
        if self.sharding.ranks == 1:
            self._free_flat(end, root)

    def _backward_fsdp(
        self, order: list[int], spans: dict[int, tuple[int, int]], start: int, end: int, grads: list[int]
    ) -> None:
        """A unit's pre-backward gathers it and the next (BACKWARD_PRE)."""
        units, root = self.units.units, self.units.root
        if self.sharding.ranks == 1:
            self._unshard_flat(start, units[root])
        gathered: set[int] = set()
        if order:
            self._unshard_flat(start, units[order[0]])
            gathered.add(order[0])
        for number, following in pairwise([*order, None]):
            assert number is not None
            first, last = spans[number]
            if number not in gathered:
                self._unshard_flat(first, units[number])
            if following is not None:
                self._unshard_flat(first, units[following])
                gathered.add(following)
            self._reduce_flat(last, number, grads[number])
        self._reduce_flat(end, root, grads[root])

    def _reduce_flat(self, at: int, number: int, grads: int) -> None:
        """Gradients of the views are joined into a flat one, cast to fp32, and reduced."""
        s, unit = self.sharding, self.units.units[number]
        n = unit.n_trained
        flat = s.gathered * n
        self.add(at, REDUCE, flat)
        self.add(at, UNSHARDED, -grads)
        self._free_flat(at, unit)
        # One rank: autograd adds to the gradient that is there, while the flat one is kept for the hook.
        adds = self.later and s.ranks == 1
        if not adds or s.held != REDUCE_ITEMSIZE:
            self._cast_and_keep(at, unit, adds=adds)
        self.add(at, REDUCE, -flat)

    def _cast_and_keep(self, at: int, unit: Unit, *, adds: bool) -> None:
        s, n = self.sharding, unit.n_trained
        cast = REDUCE_ITEMSIZE * n if (s.held if adds else s.gathered) != REDUCE_ITEMSIZE else 0
        self.add(at, REDUCE, cast)
        if s.ranks > 1:
            self._reduced(at, unit)
            self.add(at, REDUCE, -cast)
        elif s.held == REDUCE_ITEMSIZE:  # what was cast is the gradient
            self.add(at, REDUCE, -cast)
            self.add(at, UNSHARDED, s.held * n)
        else:
            self.add(at, UNSHARDED, s.held * n)
            self.add(at, REDUCE, -cast)
            self.add(at, UNSHARDED, -s.held * n if adds else 0)

    # The fullest moment

    def peak(self) -> Peak:
        r = self.recording
        numbers = np.abs(r.events) - 1
        kinds = r.kinds[numbers]
        part_of_kind = np.full(len(KINDS), -1)
        part_of_kind[[ACTIVATIONS, LOGITS, GRADIENTS]] = ACTS, HEAD, UNSHARDED
        own_parts = part_of_kind[kinds]
        own = own_parts >= 0  # weights are those of the gathered units
        n = len(r.events)
        deltas = np.concatenate([self.deltas, (r.sizes[numbers] * np.sign(r.events))[own]]).astype(np.int64)
        parts = np.concatenate([self.parts, own_parts[own]]).astype(np.int64)
        # Changes that are right before an event come before it, in the order in which they were added.
        when = np.concatenate([2 * np.array(self.at, dtype=np.int64), 2 * np.arange(n)[own] + 1])
        order = np.argsort(when, kind="stable")
        deltas, parts = deltas[order], parts[order]
        fullest = int(deltas.cumsum().argmax()) + 1
        sizes = np.zeros(len(PARTS), dtype=np.int64)
        np.add.at(sizes, parts[:fullest], deltas[:fullest])
        return Peak({name: int(size) for name, size in zip(PARTS, sizes, strict=True)})


def _visits(
    of_event: np.ndarray, start: int, end: int, root: int, *, merge: bool = False
) -> list[tuple[int, int, int]]:
    """(unit, first event, event after its last) of each unit but the root, in order.

    merge: one entry a unit, from its first event to its last, also where others come between.
    """
    found: list[tuple[int, int, int]] = []
    own = of_event[start:end]
    cuts = np.flatnonzero(np.diff(own)) + 1
    for first, last in pairwise([0, *cuts.tolist(), len(own)]):
        if first < last and own[first] != root:
            found.append((int(own[first]), start + first, start + last))
    if not merge:
        return found
    merged: dict[int, tuple[int, int]] = {}
    for unit, first, last in found:
        merged[unit] = (merged.get(unit, (first, last))[0], last)
    return [(unit, first, last) for unit, (first, last) in merged.items()]
