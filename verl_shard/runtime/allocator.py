"""ResourceAllocator: before a batch, smaller pieces where its memory is not there, and the larger ones again when it is.

It takes the steps of the same Ladder that are taken after memory ran out, so that most of that never happens: a GPU that
another process fills is a shorter head-room, and no failed batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from verl_shard.common.notices import run_dir
from verl_shard.common.units import format_bytes
from verl_shard.runtime.ladder import Ladder, Pieces

Sizes = Mapping[Any, int]
"""Bytes by device."""
Free = Callable[[], Sizes]
Needed = Callable[[Pieces], Sizes | None]

SLACK = 0.05
"""A remedy is taken when the estimate and so much of it are more than what is free: estimates are good to a few percent,
and of what torch has cached not all can be used."""
MARGIN = 0.25
"""It is taken back when the larger pieces would leave so much of their estimate free. Far enough from SLACK that a GPU
whose head-room wavers by a tenth does not have remedies taken and given back in turns."""
IN_A_ROW = 2
"""For so many batches in a row: what another process gives back for a moment only is not counted on."""
AFTER_OOM, AT_MOST = 8, 64
"""After memory ran out in spite of the estimate: so many batches, twice as many each further time, up to AT_MOST. Trying
again costs a batch that is done twice."""
SPARE = 64 * 2**20
"""Bytes of a GPU that are not counted as free: libraries make their workspaces outside of what is estimated."""


class ResourceAllocator:
    """Takes the remedies of a ladder when what a batch needs is not free, and takes them back.

    ladder: of the phase. needed: bytes by device that a batch takes in such pieces above what is there before it, None
    where it is not known; then nothing is done. free: bytes by device that are there for it; devices that it does not name
    are not looked at. agree: the largest of what all processes that work on the batch together say. slack, margin: shares of
    the estimate that are to be free beside it before nothing is taken, and before a remedy is taken back.

    `before` is called before each batch, whose pieces are then ladder.pieces(asked).
    """

    def __init__(
        self,
        ladder: Ladder,
        needed: Needed,
        *,
        free: Free | None = None,
        agree: Callable[[int], int] = int,
        slack: float = SLACK,
        margin: float = MARGIN,
    ) -> None:
        assert margin >= slack >= 0, "what is taken back would be taken again at once"
        self.ladder, self.needed, self.agree = ladder, needed, agree
        self.free: Free = free or headroom
        self._slack, self._margin = slack, margin
        self._left = ladder.taken
        self._fitted, self._wait = 0, IN_A_ROW
        self._ratio: dict[Any, float] = {}

    def before(self, asked: Pieces) -> Pieces:
        """Takes remedies until the batch fits, or takes one back; returns the pieces to work in, alike in all processes."""
        ladder = self.ladder
        if ladder.taken > self._left:  # memory ran out
            self._wait, self._fitted = min(AT_MOST, max(AFTER_OOM, 2 * self._wait)), 0
        free = self.free()
        wanted, seen = self._wanted(asked, free) if free else (ladder.taken, {})
        wanted = self.agree(wanted)
        if wanted != ladder.taken:
            self._fitted = 0
            compared = "more" if wanted > ladder.taken else "less"
            ladder.take(asked, wanted, f"its estimate is {compared} than what is free", seen=seen)
        self._left = ladder.taken
        return ladder.pieces(asked)

    def after(self, pieces: Pieces, took: Sizes) -> None:
        """What a batch in such pieces took of each device above what was there before: estimates are corrected by the
        largest share of them that any batch took, within half and one and a half of them."""
        for device, size in (self.needed(pieces) or {}).items():
            if size and took.get(device, 0) > 0:
                self._ratio[device] = min(1.5, max(0.5, self._ratio.get(device, 0.0), took[device] / size))

    @contextmanager
    def watching(self, pieces: Pieces) -> Iterator[None]:
        """Around the work on a batch, for `after`. Within a run, where each phase has its own peak (record_memory)."""
        import torch

        gpus = [gpu for gpu in self.free() if isinstance(gpu, int)] if run_dir() and torch.cuda.is_available() else []
        before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
        yield
        if gpus:
            self.after(pieces, {gpu: torch.cuda.max_memory_allocated(gpu) - size for gpu, size in before.items()})

    def _wanted(self, asked: Pieces, free: Sizes) -> tuple[int, dict[str, str]]:
        """How many steps are to be taken of what this process knows, and the sizes that say so."""
        now = wanted = self.ladder.taken
        pieces = self.ladder.pieces(asked)
        first = lack = self._lack(pieces, free, self._slack)
        while lack:
            smaller = pieces.smaller()
            if smaller is None:
                break
            pieces, wanted = smaller, wanted + 1
            lack = self._lack(pieces, free, self._slack)
        if first or not now:
            self._fitted = 0
            return wanted, first
        larger = self.ladder.pieces(asked, now - 1)
        if self._known(larger) in (None, self._known(pieces)):  # of this batch it would change nothing
            return now, {}
        if self._lack(larger, free, self._margin):
            self._fitted = 0
            return now, {}
        self._fitted += 1
        if self._fitted < self._wait:
            return now, {}
        back = now - 1
        # What is larger than all of the batch changes nothing of it either, and a larger batch is looked at anew.
        while back and self._known(self.ladder.pieces(asked, back - 1)) == self._known(larger):
            back -= 1
        return back, self._words(larger, free)

    def _known(self, pieces: Pieces) -> Sizes | None:
        sizes = self.needed(pieces)
        return sizes and {device: int(size * self._ratio.get(device, 1.0)) for device, size in sizes.items()}

    def _lack(self, pieces: Pieces, free: Sizes, more: float) -> dict[str, str]:
        """The sizes on a device that has too little, by "device", "needed" and "free"; empty where all have enough."""
        for device, size in (self._known(pieces) or {}).items():
            if device in free and size * (1 + more) > free[device]:
                return _sizes(device, size, free)
        return {}

    def _words(self, pieces: Pieces, free: Sizes) -> dict[str, str]:
        """The sizes on the device where they are closest."""
        sizes = {device: size for device, size in (self._known(pieces) or {}).items() if device in free}
        if not sizes:
            return {}
        device = max(sizes, key=lambda device: sizes[device] - free[device])
        return _sizes(device, sizes[device], free)


def _sizes(device: Any, size: int, free: Sizes) -> dict[str, str]:
    return {"device": str(device), "needed": format_bytes(size), "free": format_bytes(free[device])}


def headroom() -> dict[Any, int]:
    """Bytes that this process can still allocate on each GPU that it uses, by number: what the driver has free, and what
    torch has cached. Nothing where no GPU is used."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    found: dict[Any, int] = {}
    for gpu in range(torch.cuda.device_count()):
        reserved = torch.cuda.memory_reserved(gpu)
        if reserved:
            cached = reserved - torch.cuda.memory_allocated(gpu)
            found[gpu] = max(0, torch.cuda.mem_get_info(gpu)[0] + cached - SPARE)
    return found
