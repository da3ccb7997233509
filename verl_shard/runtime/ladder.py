"""The live remedies of a pass, in their order, and going on with the next one after a GPU's memory ran out.

The out-of-memory handler and ResourceAllocator take steps of the same ladder: fewer micro-batches in flight, then smaller
ones. Both compute the same but for rounding (planning.remedies says what each saves and costs).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.notices import notice, record_event

Result = TypeVar("Result")
Seen = Mapping[str, str]
"""More that an event says, by name."""

WELL, SHORT, STUCK = 0, 1, 2
"""How a process got on with a batch: it is done, memory ran out, memory ran out and nothing smaller is left."""


@dataclass(frozen=True)
class Pieces:
    """How a batch is worked on.

    in_flight: micro-batches whose activations are held at a time. size: of a micro-batch, in sequences of which `total`
    are there, or (`total` None) in tokens. smallest: the size below which there is nothing: 1, or the longest sequence.
    wording: how such pieces are called where they are no micro-batches, such as "{} responses at once".
    """

    in_flight: int
    size: int
    total: int | None = None
    smallest: int = 1
    wording: str = ""

    def __post_init__(self) -> None:
        assert self.in_flight >= 1, "a micro-batch is in flight while it is worked on"
        assert self.size >= 1, "a micro-batch is not empty"
        assert self.total is None or self.total % self.size == 0, "micro-batches are of one size"

    def smaller(self) -> Pieces | None:
        """After the next remedy: half in flight, then at most half in a micro-batch; None when both are at their least."""
        if self.in_flight > 1:
            return replace(self, in_flight=self.in_flight // 2)
        if self.total is None:
            size = max(self.size // 2, self.smallest)
            return replace(self, size=size) if size < self.size else None
        fitting = (size for size in range(self.size // 2, 0, -1) if self.total % size == 0)
        return next((replace(self, size=size) for size in fitting), None)

    def __str__(self) -> str:
        if self.wording:
            return self.wording.format(self.size)
        unit = "tokens" if self.total is None else "sequences"
        flight = f", {self.in_flight} in flight" if self.in_flight > 1 else ""
        return f"micro-batches of {self.size} {unit}{flight}"


class Ladder:
    """How many steps down a pass is, over the batches of a run.

    where: what is worked on, for messages, such as "actor, train".
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.taken = 0

    def pieces(self, asked: Pieces, taken: int | None = None) -> Pieces:
        """What is used of what was asked: the steps that are taken, as far as there are so many.

        taken: so many steps instead.
        """
        now = asked
        for _ in range(self.taken if taken is None else taken):
            smaller = now.smaller()
            if smaller is None:
                break
            now = smaller
        return now

    def down(
        self, asked: Pieces, why: str, *, below: int | None = None, seen: Seen = MappingProxyType({})
    ) -> Pieces | None:
        """Takes the next remedy, and says it once; None when none is left.

        below: there is no more to work on than this: sizes that would change nothing of it are passed over. seen: more for
        the event.
        """
        now = self.pieces(asked)
        smaller = now.smaller()
        if smaller is None:
            return None
        self.taken += 1
        while below is not None and smaller.size >= below and (next_one := smaller.smaller()) is not None:
            smaller = next_one
            self.taken += 1
        if below is not None and now.size > below:
            now = replace(now, size=below)
        self._say("remedy", why, now, smaller, seen)
        notice("smaller-pieces", self.where, now, why, str(smaller))
        return smaller

    def up(self, asked: Pieces, why: str, *, seen: Seen = MappingProxyType({})) -> Pieces:
        """Takes back the remedy taken last, if one is."""
        return self.take(asked, max(0, self.taken - 1), why, seen=seen)

    def take(self, asked: Pieces, taken: int, why: str, *, seen: Seen = MappingProxyType({})) -> Pieces:
        """Has so many steps taken, and says so once where that is another size."""
        before, more = self.pieces(asked), taken > self.taken
        self.taken = taken
        now = self.pieces(asked)
        if now != before:
            self._say("remedy" if more else "remedy-back", why, before, now, seen)
            if more:
                notice("smaller-pieces", self.where, before, why, str(now))
        return now

    def _say(self, kind: str, why: str, before: Pieces, after: Pieces, seen: Seen) -> None:
        line: dict[str, Any] = {"where": self.where, "taken": self.taken, "why": why, **seen}
        record_event(kind, **line, before=str(before), after=str(after))

    def work(
        self,
        run: Callable[[Pieces], Result],
        asked: Pieces,
        *,
        too_large: Callable[[str], str],
        undo: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        agree: Callable[[int], int] = int,
        below: Callable[[], int | None] = lambda: None,
        draws: bool = True,
    ) -> Result:
        """What run(pieces) gives; after memory ran out, again from the same random state with smaller pieces.

        undo: clears what a failed run leaves, such as gradients. settle: called before it in the process that failed: what
        others wait for. agree: the worst of what all processes that work on the
        batch together say (WELL, SHORT or STUCK), so that all go on alike. too_large: the message when even the smallest
        piece does not fit, from torch's words. below: what there was to work on, as for `down`. draws: whether run takes
        numbers from torch's and Python's generators; others may, at the same time, where it does not.
        Raises DoesNotFitError with that message, in every process.
        """
        restore = keep_random_state() if draws else lambda: None
        while True:
            state, said, result = WELL, "", None
            there = below()
            pieces = self.pieces(asked)
            try:
                result = run(pieces)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Only its words are kept: its frames hold the activations that must go.
                said = one_line(error)
                state = SHORT if pieces.smaller() is not None else STUCK
            if state != WELL:
                give_memory_back()
                settle()
            worst = agree(state)
            if worst == WELL:
                return result  # type: ignore[return-value]
            del result
            undo()
            give_memory_back()
            if worst == STUCK:
                raise DoesNotFitError(
                    too_large(said) if state == STUCK else f"{self.where}: another process ran out of memory"
                )
            if there is not None:  # alike in all processes
                there = agree(there)
            self.down(asked, said or "another process ran out of memory", below=there)
            restore()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory ran out. Libraries that allocate for themselves raise plain RuntimeErrors."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = (
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def one_line(error: BaseException) -> str:
    """The part of torch's message that says what was tried and what was free."""
    text = " ".join(str(error).split())
    return text.split(" Of the allocated memory")[0].split(" If reserved but")[0].rstrip(". ") or type(error).__name__


def keep_random_state() -> Callable[[], None]:
    """Restores Python's and torch's random state, on the CPU and on every GPU, to what it is now."""
    python, cpu = random.getstate(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if _gpus_in_use() else []

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)

    return restore


def _gpus_in_use() -> bool:
    """Whether this process has used a GPU: asking for its state would begin to."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def give_memory_back() -> None:
    """Frees what only cycles or torch's cache still hold."""
    gc.collect()
    if _gpus_in_use():
        torch.cuda.empty_cache()
