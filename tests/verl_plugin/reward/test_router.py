"""The router of a served reward model, over replicas that answer when they are told to, and die when they are told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from verl_shard.common.errors import RunError
from verl_shard.common.notices import ShardNotice
from verl_shard.verl_plugin.reward.router import Router
from verl_shard.verl_plugin.reward.served import ask

JSON = {"Content-Type": "application/json", "Host": "elsewhere", "Content-Length": "3"}


class Replica:
    """A server that reads requests and answers none until `answer`; then at once. Scores are a message's length."""

    def __init__(self) -> None:
        self.arrived: list[dict[str, Any]] = []
        self.status = "200 OK"
        self._open: set[asyncio.StreamWriter] = set()
        self._may = asyncio.Event()
        self._came = asyncio.Condition()
        self._breaks = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
            async with self._came:
                self.arrived.append({"line": head.split(" http")[0], "body": json.loads(body)})
                self._came.notify_all()
            if self._breaks:
                self._breaks -= 1
                return
            await self._may.wait()
            said = json.dumps({"score": float(len(json.loads(body)["messages"][-1]["content"]))}).encode()
            writer.write(
                f"HTTP/1.1 {self.status}\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n\r\n".encode()
            )
            writer.write(said)
            await writer.drain()
        except asyncio.IncompleteReadError:
            pass  # somebody looked whether there is a server
        finally:
            self._open.discard(writer)
            writer.close()

    async def has(self, count: int) -> None:
        """Returns when so many requests have arrived."""
        async with self._came:
            await asyncio.wait_for(self._came.wait_for(lambda: len(self.arrived) >= count), 20)

    def answer(self) -> None:
        self._may.set()

    def break_next(self, count: int) -> None:
        self._breaks = count

    async def die(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()


@asynccontextmanager
async def _replicas(count: int) -> AsyncIterator[list[tuple[str, Replica]]]:
    made = [Replica() for _ in range(count)]
    try:
        yield [(await replica.start(), replica) for replica in made]
    finally:
        for replica in made:
            await replica.die()


@asynccontextmanager
async def _served(router: Router) -> AsyncIterator[str]:
    try:
        yield await router.launch("127.0.0.1")
    finally:
        await router.close()


async def _both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    await one
    await other


async def _none_left(router: Router) -> None:
    while await router.addresses():
        await asyncio.sleep(0.01)


def _run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def _say(length: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * length}]


def _body(length: int) -> bytes:
    return json.dumps({"messages": _say(length)}).encode()


def test_no_request_is_lost_and_order_is_kept_when_one_dies_and_one_is_added() -> None:
    async def test() -> None:
        async with _replicas(3) as [(a, first), (b, second), (c, third)]:
            router = Router([a, b])
            async with _served(router) as address:
                asked = asyncio.gather(*[ask(address, _say(n)) for n in range(20)])
                await first.has(10)
                await second.has(10)
                assert await router.addresses() == {a: 10, b: 10}
                await router.add(c)
                with pytest.warns(
                    ShardNotice, match=rf"{a}: this replica is gone .* Using the 2 others instead"
                ) as said:
                    await _both(first.die(), third.has(10))  # all of the first's: the second has ten already
                assert len(said) == 1
                assert await router.addresses() == {b: 10, c: 10}
                more = asyncio.gather(*[ask(address, _say(n)) for n in range(100, 104)])
                await second.has(12)
                await third.has(12)
                second.answer()
                third.answer()
                assert await asked == [float(n) for n in range(20)]
                assert await more == [100.0, 101.0, 102.0, 103.0]
                assert await router.addresses() == {b: 0, c: 0}

    _run(test())


def test_requests_go_where_the_fewest_wait() -> None:
    async def test() -> None:
        async with _replicas(2) as [(a, first), (b, second)]:
            router = Router([a, b])
            first.answer()
            assert (await router.forward("POST", "score", _body(0), JSON)).body == b'{"score": 0.0}'
            asked = asyncio.create_task(router.forward("POST", "score", _body(1), JSON))  # in turn, where nothing waits
            await second.has(1)
            for n in (2, 3):
                assert json.loads((await router.forward("POST", "score", _body(n), JSON)).body) == {"score": n}
            assert await router.addresses() == {a: 0, b: 1}
            assert [len(replica.arrived) for replica in (first, second)] == [3, 1]
            second.answer()
            assert (await asked).body == b'{"score": 1.0}'
            await router.close()

    _run(test())


def test_what_is_asked_and_answered_is_handed_on_as_it_is() -> None:
    async def test() -> None:
        async with _replicas(1) as [(a, only)]:
            router = Router([a])
            only.answer()
            only.status = "500 Broken"
            answer = await router.forward("POST", "classify?x=1", _body(2), JSON)
            assert (answer.status, answer.body, answer.content_type) == (500, b'{"score": 2.0}', "application/json")
            assert only.arrived == [{"line": "post /classify?x=1", "body": {"messages": _say(2)}}]
            assert await router.addresses() == {a: 0}  # an error is an answer
            await router.close()

    _run(test())


def test_a_request_that_breaks_its_connection_costs_no_replica() -> None:
    async def test() -> None:
        async with _replicas(2) as [(a, first), (b, second)]:
            router = Router([a, b])
            for replica in (first, second):
                replica.answer()
            first.break_next(1)
            assert (await router.forward("POST", "score", _body(3), JSON)).body == b'{"score": 3.0}'
            first.break_next(2)
            second.break_next(2)
            answer = await router.forward("POST", "score", _body(3), JSON)
            assert answer.status == 502
            assert json.loads(answer.body)["error"].startswith(
                "the request broke 3 connections to replicas that are there"
            )
            assert set(await router.addresses()) == {a, b}
            await router.close()

    _run(test())


def test_a_replica_that_is_removed_answers_what_it_has() -> None:
    async def test() -> None:
        async with _replicas(2) as [(a, first), (b, second)]:
            router = Router([a, b])
            asked = asyncio.create_task(router.forward("POST", "score", _body(4), JSON))
            await first.has(1)
            removed = asyncio.create_task(router.remove(a))
            second.answer()
            assert (await router.forward("POST", "score", _body(5), JSON)).body == b'{"score": 5.0}'
            assert not removed.done()
            first.answer()
            assert (await asked).body == b'{"score": 4.0}'
            await removed
            with pytest.raises(RunError, match=f"there is no replica at {a}; there are {b}"):
                await router.remove(a)
            with pytest.raises(RunError, match=f"{b} is the last one: add another before"):
                await router.remove(b)
            await second.die()
            with pytest.raises(RunError, match=f"no reward server takes a connection at {b}"):
                await router.add(b)
            await router.close()

    _run(test())


def test_requests_wait_for_another_when_none_is_left() -> None:
    async def test() -> None:
        async with _replicas(2) as [(a, first), (b, second)]:
            router = Router([a])
            asked = asyncio.create_task(router.forward("POST", "score", _body(6), JSON))
            await first.has(1)
            with pytest.warns(ShardNotice, match="Using none: requests wait for another instead"):
                await _both(first.die(), _none_left(router))
            second.answer()
            await router.add(b)
            assert (await asked).body == b'{"score": 6.0}'
            await router.close()

    _run(test())


def test_it_is_said_that_none_is_left() -> None:
    async def test() -> None:
        async with _served(Router([], wait_s=0.01)) as address:
            with pytest.raises(RunError, match=r"^no replica of the reward model is left"):
                await ask(address, _say(1))

    _run(test())


def test_the_same_request_goes_to_the_same_replica_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with _replicas(2) as [(a, first), (b, second)]:
            router = Router([a, b])
            for replica in (first, second):
                replica.answer()
            for _ in range(2):
                for n in range(8):
                    await router.forward("POST", "score", _body(n), JSON)
            seen = [
                {len(one["body"]["messages"][-1]["content"]) for one in replica.arrived} for replica in (first, second)
            ]
            assert seen[0] | seen[1] == set(range(8))
            assert not seen[0] & seen[1]
            assert seen[0]
            assert seen[1]
            await router.close()

    monkeypatch.setenv("VERL_FULL_DETERMINISM", "1")
    _run(test())
