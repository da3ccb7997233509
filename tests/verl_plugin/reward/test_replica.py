"""Which GPUs the server of a replica sees; starting one is tested in test_on_ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.verl_plugin.reward import replica as module
from verl_shard.verl_plugin.reward.replica import Seat, launch_reward_server, server_options

N, M = "ab" * 28, "cd" * 28
SEATS = [Seat(N, "5"), Seat(N, "3")]


def test_it_sees_the_gpus_of_its_seats_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = server_options("a", SEATS, cpu=False, placed=False)["runtime_env"]["env_vars"]
    assert env == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "5,3"}


def test_with_devices_by_name_it_sees_what_the_launching_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = server_options("a", SEATS, cpu=False, placed=True)["runtime_env"]["env_vars"]
    assert env == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    env = server_options("a", SEATS, cpu=False, placed=True)["runtime_env"]["env_vars"]
    assert env == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_on_the_cpu_its_environment_is_the_runs_own() -> None:
    options = server_options("a", [Seat(N, None)], cpu=True, placed=False)
    assert (options["name"], options["num_cpus"], "runtime_env" in options) == ("a", 0, False)


def test_a_replica_is_on_one_node() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size = 2: the GPUs of a replica are on several nodes"):
        server_options("a", [Seat(N, "0"), Seat(M, "0")], cpu=False, placed=False)


class Remote:
    """A method of a Ray actor that returns or raises."""

    def __init__(self, result: Any) -> None:
        self.result, self.calls = result, list[Any]()

    async def remote(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def _launch(monkeypatch: pytest.MonkeyPatch, answer: Any) -> tuple[Any, list[Any]]:
    """A replica of two GPUs whose server's launch gives `answer`, and what the server was started with."""
    started: list[Any] = []

    class Actor:
        launch = Remote(answer)

        def options(self, **options: Any) -> Actor:
            started.append(options["name"])
            return self

        def remote(self, *arguments: Any) -> Actor:
            started.append(arguments)
            return self

    monkeypatch.setattr(module.ray, "remote", lambda cls: Actor())  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "get_device_name", lambda: "cuda")
    replica = SimpleNamespace(
        workers=[SimpleNamespace(__ray_call__=Remote(seat)) for seat in SEATS], servers=[], replica_rank=3, name_suffix="_x",
        config=SimpleNamespace(dtype="bfloat16", engine_kwargs={}), model_config=SimpleNamespace(path="some/judge"),
    )  # fmt: skip
    asyncio.run(launch_reward_server(replica))
    return replica, started


def test_a_replica_lays_its_model_over_its_gpus_and_knows_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, started = _launch(monkeypatch, "1.2.3.4:5")
    settings = {"dtype": "bfloat16", "device_map": "balanced", "devices": [0, 1]}
    assert started == ["verl_shard_hf_reward_server_3_x", ("some/judge", settings)]
    assert (replica._server_address, replica.servers) == ("1.2.3.4:5", [replica._server_handle])


def test_what_cannot_be_loaded_is_said_without_rays_words(monkeypatch: pytest.MonkeyPatch) -> None:
    error = config_error("no-score-head", "reward_model", "some/judge", "it has none", "Give another")
    with pytest.raises(ConfigError) as caught:
        _launch(monkeypatch, RayTaskError("launch", "a long traceback", error))
    assert caught.value is error
