"""Requests for scores become batches, and a fault stays with its request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from verl_shard.verl_plugin.reward import batches as module
from verl_shard.verl_plugin.reward.batches import Batches


class Model:
    """Scores a text by its length; refuses "bad". Can be held up."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.free = threading.Event()
        self.free.set()

    def score(self, texts: Sequence[Any]) -> list[float]:
        self.batches.append(list(texts))
        assert self.free.wait(10)
        if "bad" in texts:
            raise ValueError(f"{texts.index('bad')} is bad")
        return [float(len(text)) for text in texts]


def test_requests_that_come_together_are_one_batch() -> None:
    model = Model()

    async def ask() -> list[list[float]]:
        made = Batches(model.score)
        return list(
            await asyncio.gather(made.score(["a", "bbb"]), made.score(["cc"]), made.score([]), made.score(["dddd"]))
        )

    assert asyncio.run(ask()) == [[1.0, 3.0], [2.0], [], [4.0]]
    assert model.batches == [["a", "bbb", "cc", "dddd"]]


def test_what_comes_during_a_batch_is_the_next_one() -> None:
    model = Model()

    async def ask() -> list[list[float]]:
        made = Batches(model.score)
        model.free.clear()
        first = asyncio.create_task(made.score(["a"]))
        while not model.batches:
            await asyncio.sleep(0.001)
        more = [asyncio.create_task(made.score([text])) for text in ("bb", "ccc")]
        await asyncio.sleep(0)
        model.free.set()
        await made.settled()
        return [task.result() for task in (first, *more)]

    assert asyncio.run(ask()) == [[1.0], [2.0], [3.0]]
    assert model.batches == [["a"], ["bb", "ccc"]]


def test_enough_requests_wait_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_S", 3600.0)
    monkeypatch.setattr(module, "ENOUGH", 2)

    async def ask() -> list[float]:
        return await asyncio.wait_for(Batches(Model().score).score(["a", "bb"]), 10)

    assert asyncio.run(ask()) == [1.0, 2.0]


def test_a_request_fails_alone() -> None:
    model = Model()

    async def ask() -> list[Any]:
        made = Batches(model.score)
        asked = made.score(["a"]), made.score(["cc", "bad"]), made.score(["ddd"])
        return list(await asyncio.gather(*asked, return_exceptions=True))

    one, failed, three = asyncio.run(ask())
    assert (one, three) == ([1.0], [3.0])
    # Said of its place in the request, not in the batch.
    assert str(failed) == "1 is bad"
    assert model.batches == [["a", "cc", "bad", "ddd"], ["a"], ["cc", "bad"], ["ddd"]]
