"""A resource config on stock verl: pools, and what Ray cannot honour."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.config.resource_config import as_resource_config
from verl_shard.config.resource_pools import pool_overrides

ROLLOUT, REWARD = "actor_rollout_ref.rollout", "reward.reward_model"
ARTICLE: dict[str, Any] = {
    "actor": {"device_type": "cuda", "device_ids": [0, 1], "strategy": "fsdp"},
    "reward": {"device_type": "cuda", "device_ids": [2], "strategy": "none"},
    "rollout": {
        "device_type": "cuda",
        "device_ids": [3],
        "strategy": "vllm",
        "vllm_args": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.85, "enforce_eager": False},
    },
    "comm_backend": "nccl",
    "timeout_seconds": 180,
}
POOLS = {
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "2",
    "actor_rollout_ref.actor.strategy": "fsdp",
    "trainer.v1.trainer_mode": "separate_async",
    "actor_rollout_ref.hybrid_engine": "false",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.nnodes": "1",
    f"{ROLLOUT}.n_gpus_per_node": "1",
    f"{ROLLOUT}.tensor_model_parallel_size": "1",
    f"{ROLLOUT}.gpu_memory_utilization": "0.85",
    f"{ROLLOUT}.enforce_eager": "false",
    f"{ROLLOUT}.checkpoint_engine.backend": "nccl",
    f"{REWARD}.enable": "true",
    f"{REWARD}.enable_resource_pool": "true",
    f"{REWARD}.nnodes": "1",
    f"{REWARD}.n_gpus_per_node": "1",
    f"{REWARD}.rollout.name": "vllm",
    f"{REWARD}.rollout.tensor_model_parallel_size": "1",
    f"{REWARD}.rollout.free_cache_engine": "false",
}


def overrides(given: dict[str, Any], **more: int) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardNotice)
        return dict(line.split("=", 1) for line in pool_overrides(as_resource_config(given), **more))  # type: ignore[arg-type]


def test_the_articles_file_becomes_separate_pools() -> None:
    with pytest.warns(ShardNotice) as said:
        made = pool_overrides(as_resource_config(ARTICLE))
    assert dict(line.split("=", 1) for line in made) == POOLS
    assert [str(warning.message).split(":")[0] for warning in said] == [
        "device_ids = as named", "reward.strategy = none", "timeout_seconds = 180",
    ]  # fmt: skip
    assert "as many of those that Ray sees (actor 2, reward 1, rollout 1)" in str(said[0].message)


@pytest.fixture(scope="module")
def composed() -> Iterator[Callable[..., Any]]:
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        yield lambda *lines: compose("ppo_trainer", overrides=list(lines))
    GlobalHydra.instance().clear()


def test_verl_composes_them_and_its_trainer_takes_them(composed: Callable[..., Any]) -> None:
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

    given = {**ARTICLE, "rollout": {**ARTICLE["rollout"], "vllm_args": {"engine_kwargs": {"a b": 1}}}}
    given["rollout"]["vllm_args"] = {"engine_kwargs": {"compilation_config": {"mode": "it's {odd}"}, "seed": 3}}
    given["actor"] = {**ARTICLE["actor"], "precision": "fp32", "param_offload": True}
    lines = [f"{key}={value}" for key, value in overrides(given, train_batch_size=32, mini_batch_size=8).items()]
    config = composed(*lines, "data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    assert config.trainer.v1.separate_async.parameter_sync_step == 4
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.mode == "it's {odd}"
    assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype == "fp32"
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload is True

    PPOTrainerSeparateAsync(config)  # asserts what it needs, and starts nothing yet
    with pytest.raises(AssertionError, match="parameter_sync_step"):
        PPOTrainerSeparateAsync(
            composed(*lines, "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
        )


def test_roles_together_are_one_pool() -> None:
    made = overrides(
        {
            "actor": {"devices": 8, "strategy": "fsdp2", "precision": "bf16"},
            "critic": {"optimizer_offload": True},
            "rollout": {"strategy": "sglang", "tensor_parallel_size": 4, "devices": 8},
            "reward": {"strategy": "sglang"},
            "nodes": 2,
        }
    )
    assert made == {
        "trainer.nnodes": "2",
        "trainer.n_gpus_per_node": "4",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "critic.strategy": "fsdp2",
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16",
        "critic.fsdp.optimizer_offload": "true",
        f"{ROLLOUT}.name": "sglang",
        f"{ROLLOUT}.tensor_model_parallel_size": "4",
        f"{REWARD}.enable": "true",
        f"{REWARD}.rollout.name": "sglang",
        f"{REWARD}.rollout.tensor_model_parallel_size": "1",
        f"{REWARD}.enable_resource_pool": "false",
    }


def test_pools_over_several_nodes() -> None:
    made = overrides(
        {
            "actor": {"device_ids": "0-7", "strategy": "fsdp"},
            "rollout": {"device_ids": "8-11"},
            "nodes": {"count": 3, "gpus": 4},
        }
    )
    assert (made["trainer.nnodes"], made["trainer.n_gpus_per_node"]) == ("2", "4")
    assert (made[f"{ROLLOUT}.nnodes"], made[f"{ROLLOUT}.n_gpus_per_node"]) == ("1", "4")


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        (
            {"rollout": {"device_ids": [1, 2]}, "reward": {"device_ids": [3]}},
            "rollout.device_ids",
            "two of Ray's pools share no",
        ),
        ({"reward": {"device_ids": [5]}}, "reward.device_ids", "GPU 2, 4 would be among them"),
        (
            {"reward": {"device_ids": [0, 1]}, "rollout": {"device_ids": [2]}},
            "reward.device_ids",
            "wants a reward model",
        ),
        ({"critic": {"device_ids": [4]}}, "critic.device_ids", "verl has it in the actor's pool, GPU 0, 1"),
        ({"actor": {"strategy": "fsdp"}}, "actor.device_ids", "needs to know how many"),
        ({"actor": {"device_ids": [0, 1], "strategy": "device_map"}}, "actor.strategy", "stock verl shards it"),
        ({"reward": {"device_type": "cpu"}}, "reward.device_type", "verl has models on GPUs only"),
        (
            {"reward": {"device_ids": [2, 4], "strategy": "data_parallel"}},
            "reward.strategy",
            "verl serves a reward model",
        ),
        (
            {"actor": {"device_ids": [0, 1], "strategy": "fsdp", "lora_rank": 8}},
            "actor.lora_rank",
            "pools do not say it",
        ),
        ({"comm_backend": "gloo"}, "comm_backend", "has no gloo"),
        ({"rollout": {"device_ids": [3], "strategy": "hf"}}, "rollout.strategy", "verl generates on an engine"),
        (
            {"nodes": {"count": 2, "gpus": 3}, "actor": {"device_ids": [0, 1, 4], "strategy": "fsdp"}},
            "actor.device_ids",
            "unevenly",
        ),
    ],
)
def test_what_ray_and_verl_cannot_honour_is_refused_by_name(change: dict[str, Any], where: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides(ARTICLE | change)
    found = {finding.where: str(finding) for finding in caught.value.findings}
    assert why in found[where]
