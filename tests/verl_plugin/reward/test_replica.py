"""Which GPUs the server of a replica sees; starting one is tested in test_on_ray."""

from __future__ import annotations

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.reward.replica import Seat, server_options

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
