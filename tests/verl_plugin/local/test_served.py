"""Replicas of a served reward model, added and removed from outside: the router is real, Ray is made up."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from verl_shard.common.errors import RunError
from verl_shard.verl_plugin.local import served
from verl_shard.verl_plugin.reward.replicas import ROUTER
from verl_shard.verl_plugin.reward.router import Router


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Router]:
    """The routers of jobs, by namespace; `ray.get` runs what it is given."""
    routers: dict[str, Router] = {}

    def handle(name: str, namespace: str) -> Any:
        assert name == ROUTER
        methods = {method: getattr(routers[namespace], method) for method in ("addresses", "add", "remove")}
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})

    def named(*, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        return [{"name": "another", "namespace": "a"}, *({"name": ROUTER, "namespace": space} for space in routers)]

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", named)
    monkeypatch.setattr(ray, "get_actor", handle)
    monkeypatch.setattr(ray, "get", asyncio.run)
    return routers


def test_replicas_of_the_one_job_come_and_go(jobs: dict[str, Router]) -> None:
    with pytest.raises(RunError, match="no job serves a reward model"):
        served.replicas()
    jobs["b"] = Router(["host:1", "host:2"])
    assert served.replicas() == {"host:1": 0, "host:2": 0}
    served.remove_replica("host:1")
    assert served.replicas() == {"host:2": 0}
    with pytest.raises(RunError, match="add another before"):
        served.remove_replica("host:2")
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1"):
        served.add_replica("127.0.0.1:1")  # nobody listens there
    assert served.replicas() == {"host:2": 0}

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        served.add_replica(address)
    assert served.replicas() == {"host:2": 0, address: 0}
    jobs["c"] = Router(["host:9"])
    with pytest.raises(RunError, match="2 jobs on this cluster serve a reward model"):
        served.replicas()


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunError, match="no Ray cluster runs here: Could not find"):
        served.find_router()
