"""torch's CUDA caching allocator, replayed: what it gives out for each request, and what it takes from the driver for it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings (no expandable segments, no limit on
splitting). One stream; cached blocks are never given back, which torch does only when it runs out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MIN_BLOCK = 512
"""Requests are rounded up to multiples of this (kMinBlockSize)."""
SMALL_SIZE = 2**20
"""Requests up to this come from small segments (kSmallSize)."""
SMALL_BUFFER = 2 * 2**20
LARGE_BUFFER = 20 * 2**20
MIN_LARGE = 10 * 2**20
"""Requests from here on get a segment of their own size (kMinLargeAlloc), rounded up to ROUND_LARGE."""
ROUND_LARGE = 2 * 2**20


@dataclass(slots=True)
class _Block:
    """A part of a segment. Neighbours in the segment are linked, so that free ones can be joined."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Bytes given out (`allocated`) and taken from the driver (`reserved`), now and at most so far."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """By pool, (size, address) of the free blocks in order: the best fit is the first that is large enough."""
        self._at: dict[int, _Block] = {}
        self._next_address = 0

    def reset_peak(self) -> None:
        """As torch.cuda.reset_peak_memory_stats."""
        self.peak_allocated = self.allocated

    def allocate(self, size: int) -> int:
        """An address for `size` bytes."""
        size = max(-(-size // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)
        small = size <= SMALL_SIZE
        pool = self._free[small]
        index = bisect_left(pool, (size, -1))
        block = self._at[pool.pop(index)[1]] if index < len(pool) else self._segment(size, small)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:
            tail = _Block(block.address + size, rest, small, True, block, block.after)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            self._at[tail.address] = tail
            insort(pool, (tail.size, tail.address))
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def release(self, address: int) -> None:
        """Gives a block back to its pool, joined with free neighbours."""
        block = self._at[address]
        assert not block.free, "a block is released once"
        self.allocated -= block.size
        for beside in (block.before, block.after):
            if beside is not None and beside.free:
                self._take_out(beside)
                first, second = (beside, block) if beside is block.before else (block, beside)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                del self._at[second.address]
                block = first
        block.free = True
        insort(self._free[block.small], (block.size, block.address))

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            taken = SMALL_BUFFER
        elif size < MIN_LARGE:
            taken = LARGE_BUFFER
        else:
            taken = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += taken
        block = _Block(self._next_address, taken, small)
        self._next_address += taken + 1  # never adjacent to another segment
        self._at[block.address] = block
        return block

    def _take_out(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]


@dataclass(frozen=True)
class Replay:
    """phase_peaks: the most allocated in each phase of the last step. reserved: at the end. Both with workspaces.

    workspace: bytes of the workspaces, which stay from the first product on that needs one.
    """

    phase_peaks: dict[str, int]
    reserved: int
    workspace: int = 0


@dataclass
class _Workspaces:
    """Those that are there. A library makes its own once in each thread, for the first storage that it fills there.

    A training process multiplies in two: the main one, and in the backward autograd's own.
    wanted: by storage, names and bytes of what its making needs.
    """

    wanted: Mapping[int, Mapping[str, int]]
    made: set[tuple[str, str]] = field(default_factory=set)
    n_bytes: int = 0

    def after(self, storage: int, phase: str, allocator: CachingAllocator) -> None:
        """Where it comes matters: cut out of a free block of the logits' size, that block no longer holds logits."""
        thread = "autograd" if phase == "backward" else "main"
        for name, size in self.wanted.get(storage, {}).items():
            if (thread, name) not in self.made:
                self.made.add((thread, name))
                allocator.allocate(size)
                self.n_bytes += size


def replay(
    before: Iterable[int],
    first_extra: Iterable[int],
    step: Iterable[tuple[str, int, int]],
    *,
    steps: int = 3,
    workspaces: Mapping[int, Mapping[str, int]] | None = None,
) -> Replay:
    """Several steps, one after the other, as a training loop runs them.

    before: sizes of what is there from the start and stays. first_extra: sizes of what the first "optimizer" phase
    makes and keeps, the optimizer's states. step: (phase, storage, size) for an allocation and (phase, storage, -1) for
    a release, in order; what is left at its end is released there, as zero_grad does. workspaces: by storage, the names
    and bytes of the workspaces that the library which fills it needs, each made once a thread.
    """
    allocator = CachingAllocator()
    for size in before:
        if size:  # torch gives nothing out for an empty tensor
            allocator.allocate(size)
    extra = list(first_extra)
    peaks: dict[str, int] = {}
    events = list(step)
    kept = _Workspaces(workspaces or {})
    for _ in range(steps):
        addresses: dict[int, int] = {}
        current, peaks = "", {}
        for phase, storage, size in events:
            if phase != current:
                if current:
                    peaks[current] = allocator.peak_allocated
                current = phase
                allocator.reset_peak()
                if phase == "optimizer" and extra:
                    for state in extra:
                        if state:
                            allocator.allocate(state)
                    extra = []
            if size > 0:
                addresses[storage] = allocator.allocate(size)
                kept.after(storage, phase, allocator)
            elif size < 0 and storage in addresses:
                allocator.release(addresses.pop(storage))
        if current:
            peaks[current] = allocator.peak_allocated
        for address in addresses.values():
            allocator.release(address)
    return Replay(peaks, allocator.reserved, kept.n_bytes)
