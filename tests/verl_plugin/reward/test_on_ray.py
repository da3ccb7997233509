"""One copy of a reward model on a node, and one behind verl's router: on a real Ray of this test's own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
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
from verl.experimental.reward_loop.reward_model import RewardModelManager

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.verl_plugin.reward.actor import NodeModel, actor_name
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


# verl's router, a fork of this process, uses what FastAPI would not have used any more.
@pytest.mark.filterwarnings("ignore:\\s*on_event is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("_cluster")
def test_replicas_behind_verls_router(folder: Path) -> None:
    said = {
        "enable_resource_pool": "true", "n_gpus_per_node": 2, "nnodes": 1, "model_path": folder, "rollout.name": "hf",
        "rollout.dtype": "float32", "rollout.tensor_model_parallel_size": 1, "+rollout.engine_kwargs.hf.empty_response": "stop",
    }  # fmt: skip
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        overrides = [
            f"{'+' * key.startswith('+')}reward.reward_model.{key.lstrip('+')}={value}" for key, value in said.items()
        ]
        model = hydra.compose("ppo_trainer", overrides=overrides).reward.reward_model
    before = set(multiprocessing.active_children())
    manager = RewardModelManager(model)
    router = set(multiprocessing.active_children()) - before
    try:
        assert len(manager.server_handles) == 2
        # Both were put to sleep, and verl wakes a model with a pool of its own never again.
        found = asyncio.run(_ask_all(manager.get_router_address(), CONVERSATIONS))
        assert found == pytest.approx([alone(folder, c) for c in CONVERSATIONS], abs=1e-5)
        manager.sleep()
        manager.wake_up()
        empty = [{"role": "user", "content": "w10"}, {"role": "assistant", "content": ""}]
        with pytest.raises(RunError, match=r"response 0 \(''\) is empty"):
            asyncio.run(_ask_all(manager.get_router_address(), [empty]))
    finally:
        for process in router:
            process.terminate()
            process.join()
        for server in manager.server_handles:
            ray.kill(server)


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
