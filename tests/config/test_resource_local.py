"""A resource config in the local runner: what PPOTrainer is told, and what is said once of what is not as named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.config.resource_config import as_resource_config
from verl_shard.config.resource_local import for_local
from verl_shard.config.roles import ResourceConfig, RoleConfig

ARTICLE = {
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


def test_the_articles_file_runs_with_our_strategies_said_once() -> None:
    config = as_resource_config(ARTICLE)
    with pytest.warns(ShardNotice) as said:
        assert config.model_config == {"actor": {"devices": [0, 1]}, "reward": {"device": 2}}
    assert [str(warning.message) for warning in said] == [
        "actor.strategy = fsdp: the local runner lays a model over its GPUs by layers and shards no tensor. Using device_map "
        "instead.",
        "rollout.strategy = vllm: the local runner has no engine beside the actor. Using the actor's own module (GPU 3 stays "
        "free: the actor can have it) instead.",
        "comm_backend = nccl: no weights travel to a rollout here: it generates on the actor's own module. Using no transfer "
        "instead.",
        "timeout_seconds = 180: the local runner does not take it. Using its own patience between processes instead.",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert for_local(config) == ResourceConfig(
            actor=RoleConfig(device_type="cuda", devices=(0, 1), strategy="device_map"),
            reward=RoleConfig(device_type="cuda", devices=(2,), strategy="none"),
            rollout=RoleConfig(device_type="cuda", strategy="hf"),
            comm_backend="nccl",
            timeout_seconds=180,
        )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"actor": {"devices": [4, 5], "precision": "bf16"}, "ref": {"attention": "eager", "offload": "stream"}},
            {
                "actor": {"devices": [4, 5], "precision": "bf16"},
                "ref": {"attn_implementation": "eager", "offload": "stream"},
            },
        ),
        (
            {"reward": {"device_ids": [2, 4], "strategy": "data_parallel", "precision": "fp32", "micro_batch_size": 8}},
            {"actor": {}, "reward": {"copies_on": [2, 4], "dtype": "float32", "batch_size": 8}},
        ),
        (
            {"actor": 2, "reward": {"device_type": "cpu", "precision": "bf16"}, "critic": {"devices": 1}},
            {"actor": {"devices": [0, 1]}, "reward": {"device": "cpu", "dtype": "bfloat16"}, "critic": {"device": 2}},
        ),
        ({"actor": {"device_ids": [1]}, "rollout": {"strategy": "hf", "device_ids": [1]}}, {"actor": {"device": 1}}),
        (
            {"ref": {"device_ids": [2, 4], "strategy": "data_parallel", "offload": "stream"}},
            {"actor": {}, "ref": {"copies_on": [2, 4], "offload": "stream"}},
        ),
        (  # what a config leaves to the process
            {
                "actor": {"strategy": "none"},
                "critic": {"strategy": "device_map"},
                "ref": {"strategy": "data_parallel"},
                "reward": {"strategy": "none", "device_type": "cpu"},
            },
            {
                "actor": {"strategy": "none"},
                "critic": {},
                "ref": {"strategy": "data_parallel"},
                "reward": {"device": "cpu"},
            },
        ),
        (
            {"actor": {"device_ids": [1, 2]}, "ref": {"strategy": "none"}, "colocation": [["actor", "ref"]]},
            {"actor": {"devices": [1, 2]}, "ref": {"device": 1}},
        ),
    ],
)
def test_what_ppo_trainer_is_told(given: dict[str, Any], told: dict[str, Any]) -> None:
    given = {**given, "actor": {"devices": 2}, "colocation": "separate"} if given.get("actor") == 2 else given
    assert as_resource_config(given).model_config == told


def test_what_it_takes_elsewhere_or_not_at_all_is_refused_at_once() -> None:
    config = as_resource_config(
        {
            "actor": {"model": "m", "lora_rank": 8, "gradient_checkpointing": True, "micro_batch_size": 2},
            "ref": {"device_ids": [0, 1], "task": "causal-lm"},
            "reward": {"precision": "bf16-mixed"},
            "rollout": {"precision": "bf16", "micro_batch_size": 4},
        }
    )
    with pytest.raises(ConfigError) as caught:
        config.model_config  # noqa: B018
    assert [(finding.where, finding.fix) for finding in caught.value.findings] == [
        ("actor.model", "Give it as actor_model"),
        ("actor.gradient_checkpointing", "Write use_gradient_checkpointing=True"),
        ("actor.micro_batch_size", "Write ppo_config['micro_batch_size']"),
        ("actor.lora_rank", "Write ppo_config['lora_rank']"),
        ("ref.task", "Leave it out"),
        ("reward.precision", "Use bf16 or fp32"),
        ("rollout.precision", "Leave it out, or set the actor's"),
        ("rollout.micro_batch_size", "Write generation_config['batch_size']"),
    ]


def test_a_config_with_faults_is_not_run() -> None:
    with pytest.raises(ConfigError, match="it is for one GPU, and there are 2"):
        ResourceConfig(actor=RoleConfig(devices=(0, 1), strategy="none")).model_config  # noqa: B018


def test_a_served_reward_model_is_in_this_process() -> None:
    config = as_resource_config({"reward": {"strategy": "vllm", "device_ids": [3], "tensor_parallel_size": 1}})
    with pytest.warns(ShardNotice, match=r"reward\.strategy = vllm: the local runner serves no models"):
        assert config.model_config == {"actor": {}, "reward": {"device": 3}}


def test_ppo_trainer_knows_every_key() -> None:
    """What a config tells it is what its table of keys has."""
    from verl_shard.training.article_keys import KEYS

    known = {key.name for key in KEYS if key.section == "model_config"}
    used = {
        "strategy",
        "device",
        "devices",
        "copies_on",
        "precision",
        "dtype",
        "attn_implementation",
        "offload",
        "task",
        "batch_size",
    }
    assert used <= known


def test_ppo_trainer_places_the_articles_components(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from verl_shard.training.placement import read_places

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardNotice)
        places = read_places(as_resource_config(ARTICLE), ("actor", "reward"), lora=False)
    assert {role: place.devices for role, place in places.roles.items()} == {"actor": (0, 1), "reward": (2,)}
    copies = as_resource_config({"reward": {"device_ids": [1, 3], "strategy": "data_parallel"}})
    place = read_places(copies, ("actor", "reward"), lora=False).roles["reward"]
    assert (place.devices, place.copies) == ((1, 3), True)
