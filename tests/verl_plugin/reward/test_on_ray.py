"""One copy of a reward model on a node, and several behind our router: on a real Ray of this test's own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import psutil
import pytest
import ray
import verl
from judges import CONVERSATIONS, WORDS, alone, save_judge
from transformers import AutoConfig

from verl_shard.common.errors import ConfigError, DoesNotFitError, RunError
from verl_shard.verl_plugin.reward.actor import NodeModel, actor_name
from verl_shard.verl_plugin.reward.replicas import ROUTER, ServedReplicas
from verl_shard.verl_plugin.reward.served import ask

SETTINGS = {"device_map": "cpu", "dtype": "float32"}
LOOK_S = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=WORDS,
        num_labels=1, max_position_embeddings=64,
    )  # fmt: skip
    return save_judge(tmp_path_factory.mktemp("models") / "judge", config)


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    # A worker has no such module to import.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    paths = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(__file__).parents[2])])
    ray.init(
        num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VERL_PLATFORM": "cpu"}},
    )  # fmt: skip
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


class Worker:
    """Stands for a reward worker of verl: asks for scores from a thread, as verl's does."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._model = NodeModel(folder, settings, look_s=LOOK_S)

    async def score(self, conversations: list[Any]) -> list[float]:
        return await asyncio.to_thread(self._model.score, conversations)

    async def model(self) -> tuple[int, int]:
        def find() -> tuple[int, int]:
            found: tuple[int, int] = ray.get(self._model.actor.__ray_call__.remote(_process_and_users))
            return found

        return await asyncio.to_thread(find)


def _process_and_users(actor: Any) -> tuple[int, int]:
    return os.getpid(), len(actor._users)


def _workers(folder: Path, count: int, **settings: Any) -> list[Any]:
    cls = ray.remote(Worker)
    return [cls.options(num_cpus=0).remote(str(folder), {**SETTINGS, **settings}) for _ in range(count)]


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("_cluster")
def test_the_workers_of_a_node_share_one_process(
    folder: Path,
) -> None:
    workers = _workers(folder, 2)
    asked = [
        worker.score.remote([conversation]) for worker, conversation in zip(workers * 3, CONVERSATIONS, strict=True)
    ]
    expected = [alone(folder, conversation) for conversation in CONVERSATIONS]
    assert [score for scores in ray.get(asked) for score in scores] == pytest.approx(expected, abs=1e-5)
    seen = ray.get([worker.model.remote() for worker in workers])
    assert len({pid for pid, _ in seen}) == 1
    # A fault reaches who asked, and nobody whose request came with it.
    empty = [CONVERSATIONS[0], [{"role": "user", "content": "w10"}, {"role": "assistant", "content": ""}]]
    wrong, right = workers[0].score.remote(empty), workers[1].score.remote(CONVERSATIONS[:1])
    assert ray.get(right) == pytest.approx(expected[:1], abs=1e-5)
    with pytest.raises(RunError, match=r"response 1 \(''\) is empty"):
        ray.get(wrong)
    # It goes on without one that may have made it, and is gone soon after the last.
    ray.kill(workers[0])
    _until(lambda: ray.get(workers[1].model.remote()) == (seen[0][0], 1))
    assert ray.get(workers[1].score.remote(CONVERSATIONS)) == pytest.approx(expected, abs=1e-5)
    ray.kill(workers[1])
    _until(lambda: _ended(seen[0][0]))


@pytest.mark.usefixtures("_cluster")
def test_a_driver_may_ask_and_hears_what_cannot_be_loaded(folder: Path) -> None:
    broken = NodeModel(str(folder), {**SETTINGS, "too_long": "cut"})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^too_long = cut: no such choice"):
            broken.score(CONVERSATIONS[:1])
    ray.kill(broken.actor)
    with pytest.raises(RunError, match=r"the process that scores with .*judge ended"):
        broken.score(CONVERSATIONS[:1])


@pytest.mark.usefixtures("_cluster")
def test_replicas_behind_one_address_come_and_go(folder: Path) -> None:
    said = {
        "enable_resource_pool": "true", "n_gpus_per_node": 1, "nnodes": 1, "model_path": folder, "rollout.name": "hf",
        "rollout.dtype": "float32", "rollout.tensor_model_parallel_size": 1, "+rollout.engine_kwargs.hf.empty_response": "stop",
    }  # fmt: skip
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        overrides = [
            f"{'+' * key.startswith('+')}reward.reward_model.{key.lstrip('+')}={value}" for key, value in said.items()
        ]
        model = hydra.compose("ppo_trainer", overrides=overrides).reward.reward_model
    manager = ServedReplicas(model)
    address, expected = manager.get_router_address(), [alone(folder, c) for c in CONVERSATIONS]

    def scores() -> list[float]:
        return asyncio.run(_ask_all(address, CONVERSATIONS))

    try:
        (first,) = manager.server_addresses
        # It was put to sleep, and verl wakes a model with a pool of its own never again.
        assert scores() == pytest.approx(expected, abs=1e-5)
        added = manager.add_replica()
        assert manager.server_addresses == [first, added]
        assert ray.get(ray.get_actor(ROUTER).addresses.remote()) == {first: 0, added: 0}
        assert scores() == pytest.approx(expected, abs=1e-5)
        with pytest.raises(DoesNotFitError, match="another replica takes 1 GPUs, and 0 of the cluster's are not taken"):
            manager.add_replica()
        # One that died is left out, and its GPU is free for another.
        ray.kill(manager.server_handles[0])
        _until(lambda: _refuses(first))
        assert scores() == pytest.approx(expected, abs=1e-5)
        manager.sleep()
        manager.wake_up()
        assert manager.server_addresses == [added]
        with pytest.raises(RunError, match=f"the replica at {added} is the last one"):
            manager.remove_replica(added)
        _until(lambda: ray.available_resources().get("GPU", 0) == 1)
        with socket.create_server(("127.0.0.1", 0)) as listening:  # stands for a server that somebody else started
            other = f"127.0.0.1:{listening.getsockname()[1]}"
            assert manager.add_replica(other) == other
            assert ray.get(manager.router.addresses.remote()) == {added: 0, other: 0}
            manager.remove_replica(other)
        assert ray.get(manager.router.addresses.remote()) == {added: 0}
        with pytest.raises(RunError, match=f"no reward server takes a connection at {other}"):
            manager.add_replica(other)
        empty = [{"role": "user", "content": "w10"}, {"role": "assistant", "content": ""}]
        with pytest.raises(RunError, match=r"response 0 \(''\) is empty"):
            asyncio.run(_ask_all(address, [empty]))
    finally:
        ray.kill(manager.router)
        for server in manager.server_handles:
            ray.kill(server)


def _refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) != 0


async def _ask_all(address: str, conversations: Any) -> list[float]:
    return list(await asyncio.gather(*[ask(address, conversation) for conversation in conversations]))


def test_names_tell_models_settings_runs_and_nodes_apart() -> None:
    names = {
        actor_name(path, settings, node, run)
        for path in ("a", "b")
        for settings in ({}, {"dtype": "float32"})
        for node in ("n1", "n2")
        for run in (None, Path("runs/1"))
    }
    assert len(names) == 16
    assert actor_name("a", {"x": 1, "y": 2}, "n", None) == actor_name("a", {"y": 2, "x": 1}, "n", None)
