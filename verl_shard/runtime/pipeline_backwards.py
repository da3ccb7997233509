"""Backward passes in a thread of their own, so that one GPU's launches hold up no other GPU.

A GPU takes about a thousand launches ahead of what it runs; then the host waits. A backward of half a 7B model is more than
that, and a thread that gives the first GPU its share would wait while the last one, done with its own, has nothing to do.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from verl_shard.runtime.pipeline_hooks import RootHook
from verl_shard.runtime.pipeline_threads import in_a_thread


class Backwards:
    """Backwards of micro-batches 0, 1, ..., one after the other, each from the last stage to the first.

    Each stage is given its work in one order whatever the threads do: a forward asks `left` before it goes to a stage, and a
    backward goes to a stage once that is open to it.
    """

    def __init__(
        self, pipe: RootHook, backward: Callable[[int, Any], None], around: AbstractContextManager[None]
    ) -> None:
        self._pipe, self._backward, self._around = pipe, backward, around
        self._stages = {device: stage for stage, device in enumerate(pipe.devices)}
        self._changed = threading.Condition()
        self._given: deque[tuple[int, Any]] = deque()
        self._left = [-1] * len(pipe.devices)
        self._open = [-1] * len(pipe.devices)
        self._running = -1
        self._closing = self._ended = False
        self._error: BaseException | None = None

    def __enter__(self) -> Backwards:
        in_a_thread(functools.partial(contextvars.copy_context().run, self._work), self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Waits for all of them; after an error for the one that runs."""
        with self._changed:
            self._closing = True
            if kind is not None:
                self._given.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended)
        if kind is None:
            self._raise()

    @property
    def idle(self) -> bool:
        """Whether none runs or waits for its turn."""
        return not self._given and self._running in (-1, self._left[0])

    def give(self, number: int, made: Any) -> None:
        """The next one. made: what its backward begins with."""
        with self._changed:
            self._given.append((number, made))
            self._changed.notify_all()

    def open(self, number: int, above: int) -> None:
        """Stages above that one have been given what comes before that backward. -1: all of them."""
        with self._changed:
            self._open[above + 1 :] = [number] * len(self._open[above + 1 :])
            self._changed.notify_all()

    def left(self, number: int, stage: int) -> None:
        """Waits until a stage has been given all of that backward; raises what a backward raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._left[stage] >= number or self._ended)
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _sent(self, source: Any, target: Any) -> None:
        """A gradient is on its way from one device to another, whose turn is waited for.

        The first stage's share ends with the whole: a head that is tied to its embedding comes there at the begin too.
        """
        stage, following = self._stages.get(source, 0), self._stages.get(target, 0)
        with self._changed:
            if stage:
                self._left[stage] = max(self._left[stage], self._running)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._closing or self._open[following] >= self._running)

    def _work(self) -> None:
        with self._around, self._pipe.travels.sending_back(self._sent):
            while (entry := self._next()) is not None:
                number, made = entry
                entry = None
                try:
                    self._backward(number, made)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    self._error = error
                    return
                del made
                with self._changed:
                    self._left = [number] * len(self._left)
                    self._changed.notify_all()

    def _next(self) -> tuple[int, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._given) or self._closing)
            if not self._given:
                return None
            self._running = self._given[0][0]
            return self._given.popleft()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
