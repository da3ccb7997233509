"""Backward passes in threads of their own, so that one GPU's launches hold up no other GPU.

A GPU takes about a thousand launches ahead of what it runs; then the host waits. A backward of half a 7B model is more than
that, and a thread that gives the first GPU its share would wait while the last one, done with its own, has nothing to do.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from verl_shard.common.notices import notice
from verl_shard.runtime.pipeline_hooks import RootHook
from verl_shard.runtime.pipeline_threads import Failure, in_a_thread

_PATIENCE_S = 30.0
"""For the backward before, which is late where a part of it is behind this one: autograd has a thread for each GPU, which waits
here. That is known of what Travels.apart names; of anything else, order is not worth waiting for ever."""


class Backwards:
    """Backwards of micro-batches 0, 1, ..., each from the last stage to the first, behind the one before.

    Each stage is given its work in one order whatever the threads do: a forward asks `left` before it goes to a stage, and a
    backward goes to a stage once that is open to it and has been given all of the one before.
    """

    def __init__(
        self,
        pipe: RootHook,
        backward: Callable[[int, Any], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pipe, self._backward, self._around = pipe, backward, around
        self._stages = {device: stage for stage, device in enumerate(pipe.devices)}
        self._changed = threading.Condition()
        self._left = [-1] * len(pipe.devices)
        self._open = [-1] * len(pipe.devices)
        self._given = 0
        self._given_up = False
        self._failure = Failure()

    def __enter__(self) -> Backwards:
        self._pipe.travels.watch(self._sent)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Waits for all of them; after an error for those that run."""
        with self._changed:
            if kind is not None:
                self._give_up()
            self._changed.wait_for(lambda: not self._given)
        self._pipe.travels.watch(None)
        if kind is None:
            self._failure.raise_it()
        self._failure.forget()

    def give(self, number: int, made: torch.Tensor, *, apart: bool = False) -> None:
        """The next one. made: what its backward begins with. apart: it begins when the one before has ended on all stages; so
        it does where it begins on another stage than the last, and where Travels.apart says why."""
        first = self._stages.get(self._pipe.links.of(made), 0)
        begins = 0 if apart or self._pipe.travels.apart or first != len(self._left) - 1 else first
        with self._changed:
            self._given += 1
        run = functools.partial(self._run, number, [made], begins, self._around())
        in_a_thread("backward", functools.partial(contextvars.copy_context().run, run), self._end)

    def open(self, number: int, above: int) -> None:
        """Stages above that one have been given what comes before that backward. -1: all of them."""
        with self._changed:
            self._open[above + 1 :] = [number] * len(self._open[above + 1 :])
            self._changed.notify_all()

    def left(self, number: int, stage: int) -> None:
        """Waits until a stage has been given all of that backward; raises what a backward raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._left[stage] >= number or self._given_up)
        self._failure.raise_it()

    def _give_up(self) -> None:
        self._given_up = True
        self._changed.notify_all()

    def _sent(self, number: int, source: Any, target: Any) -> None:
        """A gradient of a micro-batch is on its way from one device to another, whose turn is waited for.

        The first stage's share ends with the whole: a head that is tied to its embedding comes there at the begin too.
        """
        stage, following = self._stages.get(source, 0), self._stages.get(target, 0)
        with self._changed:
            if stage:
                self._left[stage] = max(self._left[stage], number)
                self._changed.notify_all()
            # First: the forwards that open a stage wait for the backward before too.
            done = self._changed.wait_for(
                lambda: self._given_up or self._left[following] >= number - 1, timeout=_PATIENCE_S
            )
            if done:
                self._changed.wait_for(lambda: self._given_up or self._open[following] >= number)
        if not done:
            self._pipe.travels.was_late = self._pipe.travels.apart = True
            why = f"the backward before another one was not done for {_PATIENCE_S:.0f} s, with which that waits in one thread"
            notice(
                "backwards-in-turn",
                "run_micro_batches",
                None,
                why,
                "backwards that begin when the one before has ended",
            )

    def _run(self, number: int, made: list[torch.Tensor], begins: int, around: AbstractContextManager[None]) -> None:
        """made: a list of one, so that nobody else holds it. begins: the stage that must have been given all of the one
        before."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._left[begins] >= number - 1)
            if self._given_up:
                return
        try:
            with around:
                self._backward(number, made.pop())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            with self._changed:
                self._failure.keep(error)
                self._give_up()
            return
        with self._changed:
            self._left = [max(left, number) for left in self._left]
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._given -= 1
            self._changed.notify_all()
