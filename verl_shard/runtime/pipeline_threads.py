"""Threads that stay, for passes of a pipeline: libraries keep what they prepared by thread, and would prepare it in each new one.

cuDNN plans its attention anew for each shape that a thread has not seen, which took the host 90 to 110 ms for a forward and a
backward on an H200 (torch 2.11), and cuBLAS makes a handle. With a new thread for each micro-batch that cost more than a
pipeline gains.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Literal, get_args


class Failure:
    """What was raised in a thread, to be raised where it is waited for: the first, once."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def keep(self, error: BaseException) -> None:
        self._error = self._error or error

    def forget(self) -> None:
        self._error = None

    def raise_it(self) -> None:
        """Nothing, when nothing was raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # which has this frame, and what is in it would wait for the garbage collector


class _Worker:
    """A thread that does what it is given, one thing after the other. idle: where it is when it has nothing to do."""

    def __init__(self, kind: str, idle: list[_Worker]) -> None:
        self._idle = idle
        self._given: queue.SimpleQueue[tuple[Callable[[], object], Callable[[], object]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"verl_shard {kind}", daemon=True).start()

    def give(self, call: Callable[[], object], then: Callable[[], object]) -> None:
        self._given.put((call, then))

    def _work(self) -> None:
        while True:
            call, then = self._given.get()
            call()
            del call  # and with it what it holds
            self._idle.append(self)  # before anybody who waits for `then` can ask for a thread
            then()
            del then


Kind = Literal["forward", "backward"]
_IDLE: dict[Kind, list[_Worker]] = {kind: [] for kind in get_args(Kind)}


def _forget() -> None:
    for idle in _IDLE.values():
        idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # threads are not forked


def in_a_thread(kind: Kind, call: Callable[[], object], then: Callable[[], object]) -> None:
    """Calls one and the other in a thread of that kind that has nothing else to do, the last that had, or a new one; they
    raise nothing.

    then: says that it is done. From then on the thread is free.
    """
    idle = _IDLE[kind]
    try:
        worker = idle.pop()
    except IndexError:
        worker = _Worker(kind, idle)
    worker.give(call, then)
