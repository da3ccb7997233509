"""The rollout beside its engine: it moves no weights and says which are current."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.verl_plugin.rollout import adapter as module
from verl_shard.verl_plugin.rollout.adapter import HFServerAdapter


class Server:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        async def remote(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, {**dict(enumerate(args)), **kwargs}))  # type: ignore[dict-item]

        return SimpleNamespace(remote=remote)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[HFServerAdapter, Server, Any]:
    """An adapter of rank 2, its server, and the actor's engine."""
    from verl_shard.verl_plugin import engine

    server, actor = Server(), SimpleNamespace(step=0)
    names: list[str] = []
    monkeypatch.setattr(engine, "ENGINES", {"actor": actor})
    monkeypatch.setattr(module.ray, "get_actor", lambda name: names.append(name) or server)
    adapter = object.__new__(HFServerAdapter)
    adapter._rank, adapter._server = 2, None
    assert adapter.server is adapter.server is server
    assert names == ["verl_shard_hf_server_2"]
    return adapter, server, actor


def test_new_weights_are_a_new_step_and_nothing_is_copied(parts: tuple[HFServerAdapter, Server, Any]) -> None:
    adapter, server, actor = parts

    def weights() -> Any:
        raise AssertionError("the weights were read")
        yield

    asyncio.run(adapter.update_weights(weights(), global_steps=4))
    assert server.calls == [("set_global_steps", {0: 4})]
    # Steps after the weights of step 4 are step 5.
    assert actor.step == 5
    asyncio.run(adapter.update_weights(weights()))
    assert len(server.calls) == 1


def test_a_patch_of_weights_is_refused(parts: tuple[HFServerAdapter, Server, Any]) -> None:
    with pytest.raises(RunError, match="no wire format 'delta'"):
        asyncio.run(parts[0].update_weights([], wire_format="delta"))


def test_it_wakes_and_sleeps_with_its_server(parts: tuple[HFServerAdapter, Server, Any]) -> None:
    adapter, server, _ = parts
    asyncio.run(adapter.resume(["weights", "kv_cache"]))
    asyncio.run(adapter.release())
    assert server.calls == [("wake_up", {"tags": ["weights", "kv_cache"]}), ("sleep", {})]


def test_a_pool_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.BaseRollout, "__init__", lambda self, *args: None)
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.name = hf: .*cannot have a pool of its own"):
        HFServerAdapter(None, None, None)


def test_a_replica_that_is_not_the_actors_is_refused() -> None:
    from verl.workers.rollout.replica import RolloutMode

    from verl_shard.verl_plugin.rollout.replica import HFReplica

    for wrong in (
        {"is_teacher_model": True}, {"rollout_mode": RolloutMode.COLOCATED},
        {"rollout_mode": RolloutMode.STANDALONE},
    ):  # fmt: skip
        replica = object.__new__(HFReplica)
        for name, value in {
            "is_reward_model": False, "is_teacher_model": False, "rollout_mode": RolloutMode.HYBRID, **wrong,
        }.items():  # fmt: skip
            setattr(replica, name, value)
        with pytest.raises(ConfigError, match="beside it it serves reward models only"):
            asyncio.run(replica.launch_servers())
