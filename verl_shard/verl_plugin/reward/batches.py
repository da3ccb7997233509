"""Requests for scores, gathered into batches: many ask for one, and the model is quicker with several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GATHER_S = 0.02
"""A batch starts once no request has come for so long: a step's requests come a few milliseconds apart."""
ENOUGH = 256
"""It starts at once with so many conversations."""

Score = Callable[[Sequence[Any]], list[float]]


@dataclass(frozen=True)
class _Request:
    conversations: Sequence[Any]
    answer: asyncio.Future[list[float]]


class Batches:
    """Scores requests in batches, on a thread: `score` blocks, and the event loop hears of more meanwhile.

    A request that cannot be scored fails alone; those it came with are scored without it.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._waiting: list[_Request] = []
        self._last_arrival = 0.0
        self._pump: asyncio.Task[None] | None = None

    async def score(self, conversations: Sequence[Any]) -> list[float]:
        """The scores of one request, in order; raises what the model says of it."""
        loop = asyncio.get_running_loop()
        request = _Request(conversations, loop.create_future())
        self._waiting.append(request)
        self._last_arrival = loop.time()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._answer_all())
        return await request.answer

    async def settled(self) -> None:
        """Returns when no request is unanswered."""
        if self._pump is not None:
            await self._pump

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            while (
                sum(len(request.conversations) for request in self._waiting) < ENOUGH
                and (quiet := loop.time() - self._last_arrival) < GATHER_S
            ):
                await asyncio.sleep(GATHER_S - quiet)
            batch, self._waiting = self._waiting, []
            await self._answer(batch)

    async def _answer(self, batch: Sequence[_Request]) -> None:
        asked = [conversation for request in batch for conversation in request.conversations]
        try:
            scores = await asyncio.to_thread(self._score, asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
            if len(batch) == 1:
                if not batch[0].answer.done():
                    batch[0].answer.set_exception(error)
                return
            for request in batch:
                await self._answer([request])
            return
        at = 0
        for request in batch:
            # One whose caller has given up is done already.
            if not request.answer.done():
                request.answer.set_result(scores[at : at + len(request.conversations)])
            at += len(request.conversations)
