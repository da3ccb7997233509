"""The order in which micro-batches are given to the devices of a pipeline: each stage has its own, from one thread.

A device does what it is given in that order, and a thread that gives it whole forwards and whole backwards in turn gives
all devices the same order. Then a stage waits: the last one has to run the next forward before the next backward, and
that forward waits for the first stage, which waits for the last one's backward. So a forward pass runs in a thread of its
own, stops before each device, and is let go on one device at a time: forward k + d is d devices behind when backward k is
given (1F1B). Only one forward runs at a time; which one is decided here, so that the order is always the same. Backwards have
threads of their own.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from verl_shard.common.notices import notice
from verl_shard.runtime.pipeline_backwards import Backwards
from verl_shard.runtime.pipeline_hooks import RootHook
from verl_shard.runtime.pipeline_threads import Failure, in_a_thread
from verl_shard.runtime.pipeline_window import Window

_TYPES = ("cuda", "cpu")
"""Kinds of devices whose autocast a thread takes over."""


def issue(
    pipe: RootHook | None,
    n: int,
    forward: Callable[[int], Any],
    finish: Callable[[int, Any], Any],
    *,
    window: Window,
    backward: Callable[[int, Any], None] | None = None,
    last_apart: bool = False,
) -> int:
    """Runs n micro-batches, several of them in flight; returns the most that were.

    forward: of a micro-batch's number, its output; over several devices called in other threads, one at a time.
    finish: of number and output, what the backward begins with; called in order, as soon as the forward is issued.
    backward: of number and what finish returned, a tensor; over several devices called in other threads, which end in
        order. Without one nothing is kept for it: forwards go on ahead of what finish waits for, on this thread.
    window: how many may be in flight. last_apart: the last backward begins when all others have ended.
    """
    if pipe is not None and backward is not None and window.most > 1:
        return _staged(pipe, n, forward, finish, backward, window, last_apart)
    flights: deque[_Done] = deque()
    most = 0
    for at in range(n):
        ahead = 0
        while ahead < min(window.number, n - at):
            if ahead == len(flights):
                flights.append(_Done(window, functools.partial(forward, at + ahead)))
            most = max(most, len(flights))
            flights[ahead].run()
            ahead += 1
        made = finish(at, flights.popleft().output())
        if backward is not None:
            backward(at, made)
        del made
    return most


def _staged(
    pipe: RootHook,
    n: int,
    forward: Callable[[int], Any],
    finish: Callable[[int, Any], Any],
    backward: Callable[[int, Any], None],
    window: Window,
    last_apart: bool,
) -> int:
    """Backward k begins when the last stage has been given all that it is given before. What the stages before it are given
    before it reaches them is given meanwhile, to each when it has been given all of backward k - 1.

    Not where forwards draw random numbers and blocks are computed again, with the generators set back to what they were: there
    each backward runs by itself. The first one shows whether blocks are.
    """
    last = len(pipe.devices) - 1
    travels, before, alone = pipe.travels, _random_states(pipe), False
    around = _as_here(pipe)
    flights: deque[_Flight] = deque()
    most = 0
    try:
        with Backwards(pipe, backward, around) as backwards:

            def end(number: int) -> None:
                if flights[0].complete:
                    backwards.left(number - 1, last)  # what a loss keeps is there once
                    made = finish(number, flights[0].output())
                    backwards.give(number, made, apart=last_apart and number == n - 1)

            for at in range(n):
                ahead = 0
                while ahead < min(window.number, n - at):
                    if ahead == len(flights):
                        call = functools.partial(forward, at + ahead)
                        flights.append(_Flight(at + ahead, call, pipe, window, around()))
                    most = max(most, len(flights))
                    flight, until = flights[ahead], window.stage(ahead, n)
                    if until < last and not alone:
                        end(at)
                    backwards.open(at, until)
                    if flight.next <= until:
                        backwards.left(at - 1, flight.next)
                        flight.advance(until)
                    if at == ahead == 0:
                        alone = _random_states(pipe) != before
                    ahead += 1
                end(at)
                backwards.open(at, -1)
                flights.popleft()
                if alone:
                    backwards.left(at, 0)
                    alone = travels.ran_again
                    if alone:
                        why = "forwards draw random numbers, as for dropout, and checkpointed blocks set the generators back"
                        notice("backwards-alone", "in_flight", window.most, why, "backwards that run by themselves")
    finally:
        for flight in flights:
            flight.give_up()
    return most


@contextmanager
def outside_autocast() -> Iterator[None]:
    """For a backward within a caller's autocast, whose casts of weights stay for the next forward."""
    on = [kind for kind in _TYPES if torch.is_autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


class _Done:
    """A forward pass on the caller's thread, all at once."""

    def __init__(self, window: Window, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._window = window
        self._output: Any = None

    def run(self) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            with self._window.counting() as kept:
                self._output = call()
            self._window.learn(kept)

    def output(self) -> Any:
        output, self._output = self._output, None
        return output


class _GivenUp(BaseException):
    """Ends the thread of a forward that is not gone on with."""


class _Flight:
    """A forward pass in a thread of its own for as long as it lasts, which stops before each further device of the pipeline."""

    def __init__(
        self,
        number: int,
        call: Callable[[], Any],
        pipe: RootHook,
        window: Window,
        around: AbstractContextManager[None],
    ) -> None:
        self._number = number
        self._stages = {device: stage for stage, device in enumerate(pipe.devices)}
        self._pipe, self._window, self._around = pipe, window, around
        self._kept: dict[Any, int] = {}
        self._at = self._until = 0
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._call: Callable[[], Any] | None = call
        self._output: Any = None
        self._failure = Failure()
        self._given_up = self._taken = False
        self._ended = threading.Event()
        in_a_thread("forward", functools.partial(contextvars.copy_context().run, self._main), self._end)

    @property
    def next(self) -> int:
        """The stage that it runs next; past the last one at its end."""
        return len(self._stages) if self._ended.is_set() else self._at

    @property
    def complete(self) -> bool:
        """Whether there is an output that nobody has taken."""
        return self._ended.is_set() and not self._taken

    def advance(self, stage: int) -> None:
        """Goes on to the end of that stage; raises what the forward raised. What is kept is counted on the devices of these
        stages, which no backward is given anything meanwhile."""
        if self.next > stage:
            return
        self._until = stage
        with self._window.counting(self._kept, self._pipe.devices[self.next : stage + 1]):
            self._go.release()
            self._stopped.acquire()
        self._landed()

    def _landed(self) -> None:
        """After a stage: an error is raised here, and what was kept is known at the end."""
        self._failure.raise_it()
        if self._ended.is_set():
            self._window.learn(self._kept)

    def output(self) -> Any:
        assert self.complete, "the last stage is reached before a loss is made, and once"
        self._taken = True
        output, self._output = self._output, None
        return output

    def give_up(self) -> None:
        self._given_up = True
        self._go.release()
        self._ended.wait()
        self._output = None
        self._failure.forget()

    def _main(self) -> None:
        self._go.acquire()
        call, self._call = self._call, None
        try:
            if not self._given_up and call is not None:
                with self._around, self._pipe.travels.stopping(self._stop, self._number):
                    self._output = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._failure.keep(error)

    def _end(self) -> None:
        self._ended.set()
        self._stopped.release()

    def _stop(self, device: Any) -> None:
        stage = self._stages.get(device, self._at)
        if stage <= self._at:  # a device that comes again, such as a tied head's, has had its stop
            return
        self._at = stage
        if stage > self._until:
            self._stopped.release()
            self._go.acquire()
            if self._given_up:
                raise _GivenUp


def _random_states(pipe: RootHook) -> list[bytes]:
    """Of the generators that a forward may draw from."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpus = [device for device in pipe.devices if isinstance(device, torch.device) and device.type == "cuda"]
        states += [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    return [state.numpy().tobytes() for state in states]


def _as_here(pipe: RootHook) -> Callable[[], AbstractContextManager[None]]:
    """Makes what other threads enter to compute as this one: its streams, autocast, and whether gradients are wanted."""
    gradients = torch.is_grad_enabled()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _TYPES]
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(links: AbstractContextManager[None]) -> Iterator[None]:
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        # Casts of weights are kept for all threads, until a thread leaves its outermost autocast: here none does, and what
        # is counted down below throws nothing away.
        torch.autocast_increment_nesting()
        try:
            with links, torch.set_grad_enabled(gradients):
                yield
        finally:
            torch.autocast_decrement_nesting()
            for kind, _, _ in autocast:
                torch.set_autocast_enabled(kind, False)

    return lambda: entered(pipe.links.thread(pipe.devices))
