"""One address for all replicas of a served reward model: requests go where the fewest wait, and replicas come and go."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn

from verl_shard.common.errors import RunError
from verl_shard.common.notices import notice

WAIT_S = 60.0
"""So long a request waits for a replica to be added when none is left."""
CONNECT_S = 10.0
"""A replica that takes no connection for so long is gone. There is no limit to how long it may compute."""
_BACKLOG = 2048
ATTEMPTS = 3
"""A request that breaks its connection so often, to replicas that are there, is answered with an error."""
_OF_A_CONNECTION = frozenset(
    ("host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding", "content-encoding")
)
"""Headers of one connection, which are not those of the next."""


@dataclass(eq=False)
class _Replica:
    address: str
    waiting: int = 0
    """Requests that it has not answered."""
    asked: int = 0
    """When it was last asked, as a count of requests."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing waits."""

    def __post_init__(self) -> None:
        self.idle.set()


@dataclass(frozen=True)
class Answered:
    """What a replica said, or we in its place."""

    status: int
    body: bytes
    content_type: str = "application/json"


class Router:
    """Sends each request to the replica with the fewest unanswered ones. All of it on one event loop; a Ray actor, in a run.

    A replica that takes no connection any more is left out, which a notice says once, and its requests go to others: scoring
    one twice changes nothing. Every other answer is handed on as it is, errors too.
    """

    def __init__(self, addresses: Iterable[str] = (), *, wait_s: float = WAIT_S) -> None:
        self._replicas = {address: _Replica(address) for address in addresses}
        self._wait_s = wait_s
        self._count = itertools.count(1)
        self._there = asyncio.Event()
        self._client: aiohttp.ClientSession | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        # As verl's router: the same request goes to the same one of replicas that are equally busy.
        self._by_content = os.environ.get("VERL_FULL_DETERMINISM") == "1"

    async def addresses(self) -> dict[str, int]:
        """The replicas, with the number of requests that each has not answered."""
        return {replica.address: replica.waiting for replica in self._replicas.values()}

    async def add(self, address: str) -> None:
        """Has requests go to the server at `address` too. Raises RunError when none is there; one known already stays."""
        if (error := await _connect_error(address)) is not None:
            raise RunError(f"no reward server takes a connection at {address}: {error}")
        self._replicas.setdefault(address, _Replica(address))
        self._there.set()

    async def remove(self, address: str) -> None:
        """Sends no more requests there; returns when those that it has are answered.

        Raises RunError for an address that is not there, and for the last one.
        """
        if address not in self._replicas:
            raise RunError(f"there is no replica at {address}; there are {', '.join(self._replicas) or 'none'}")
        if len(self._replicas) == 1:
            raise RunError(f"the replica at {address} is the last one: add another before")
        await self._replicas.pop(address).idle.wait()

    async def leave_out(self, address: str, why: str) -> None:
        """Sends no more requests to a replica that is gone, which a notice says; nothing to do when it is known."""
        if self._replicas.pop(address, None) is None:
            return
        left = len(self._replicas)
        used = f"the {left} other{'s' * (left != 1)}" if left else "none: requests wait for another"
        notice("reward-replica-gone", "reward.reward_model", address, f"this replica is gone ({why})", used)

    async def forward(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answered:
        """What a replica answers to a request; 503 when none is left, and 502 for a request that breaks connections."""
        sent = {name: value for name, value in headers.items() if name.lower() not in _OF_A_CONNECTION}
        broken = 0
        while (replica := await self._choose(body)) is not None:
            replica.waiting += 1
            replica.idle.clear()
            try:
                url = f"http://{replica.address}/{path}"
                async with self._session().request(method, url, data=body, headers=sent) as response:
                    return Answered(response.status, await response.read(), response.content_type)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
                if await _connect_error(replica.address) is not None:
                    if self._replicas.get(replica.address) is replica:
                        await self.leave_out(replica.address, why)
                    continue
                broken += 1
                if broken == ATTEMPTS:
                    return _error(502, f"the request broke {ATTEMPTS} connections to replicas that are there: {why}")
            finally:
                replica.waiting -= 1
                if not replica.waiting:
                    replica.idle.set()
        return _error(503, "no replica of the reward model is left; the notices in its log say how each ended")

    async def launch(self, host: str) -> str:
        """Serves on an IP address of this machine from then on; the whole address, which stays."""
        listening = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
        self._server = uvicorn.Server(uvicorn.Config(self.app(), log_level="warning"))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        port = listening.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Ends what was launched, and closes connections to replicas."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._client is not None:
            await self._client.close()

    def app(self) -> Any:
        """Everything that is asked of it goes to a replica."""
        from fastapi import FastAPI, Request, Response

        app = FastAPI(openapi_url=None)

        async def ask(request: Any, path: str) -> Any:
            where = f"{path}?{request.url.query}" if request.url.query else path
            answer = await self.forward(request.method, where, await request.body(), request.headers)
            return Response(answer.body, answer.status, media_type=answer.content_type)

        ask.__annotations__ = {"request": Request, "path": str}
        app.api_route("/{path:path}", methods=["GET", "POST"], response_model=None)(ask)
        return app

    async def _choose(self, body: bytes) -> _Replica | None:
        """The replica to ask next, once there is one; None when none comes."""
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._replicas:
                    self._there.clear()
                    await self._there.wait()
        except TimeoutError:
            return None
        fewest = min(replica.waiting for replica in self._replicas.values())
        free = [replica for replica in self._replicas.values() if replica.waiting == fewest]
        if self._by_content:
            chosen = sorted(free, key=lambda replica: replica.address)[zlib.crc32(body) % len(free)]
        else:
            chosen = min(free, key=lambda replica: replica.asked)
        chosen.asked = next(self._count)
        return chosen

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            # A connection of its own for each request: one that was idle may be closed as it is used, and tells nothing then.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._client = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._client


async def _connect_error(address: str) -> str | None:
    """Why there is no server at an address, None when there is one."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_S)
    except (OSError, ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    writer.close()
    return None


def _error(status: int, why: str) -> Answered:
    return Answered(status, json.dumps({"error": why}).encode())
