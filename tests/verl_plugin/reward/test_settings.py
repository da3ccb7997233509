"""verl's configuration with a reward model served by our replica."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import verl
from omegaconf import OmegaConf
from verl.experimental.reward_loop import reward_loop
from verl.experimental.reward_loop.reward_model import RewardModelManager

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.reward.replicas import ServedReplicas
from verl_shard.verl_plugin.reward.settings import prepare_reward_config, read_kwargs, scoring_settings

SERVED = (
    "reward.reward_model.enable=true", "reward.reward_model.rollout.name=hf", "reward.reward_model.model_path=some/judge",
    "reward.reward_model.rollout.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1",
)  # fmt: skip


def _config(*overrides: str) -> Any:
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        return hydra.compose("ppo_trainer", overrides=list(overrides))


@pytest.fixture(autouse=True)
def _verls_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What verl's reward loop makes is verl's own, before and after."""
    monkeypatch.setattr(reward_loop, "RewardModelManager", RewardModelManager)


def test_the_workers_ask_the_served_model() -> None:
    config = _config(*SERVED)
    prepare_reward_config(config)
    assert reward_loop.RewardModelManager is ServedReplicas
    reward = config.reward
    assert (reward.custom_reward_function.path, reward.custom_reward_function.name) == (
        "pkg://verl_shard.verl_plugin.reward.served", "ask",
    )  # fmt: skip
    assert (reward.reward_manager.source, reward.reward_manager.name) == ("importlib", "ServedRewardManager")
    assert reward.reward_manager.module.path == "pkg://verl_shard.verl_plugin.reward.served"

    from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

    from verl_shard.verl_plugin.reward import served

    assert resolve_reward_manager_cls(config).__name__ == "ServedRewardManager"
    assert get_custom_reward_fn(config).args[0].__code__ is served.ask.__code__


@pytest.mark.parametrize(
    "overrides",
    [
        ("reward.reward_model.enable=false",),
        ("reward.reward_model.rollout.name=vllm",),
        ("reward.custom_reward_function.path=my.py",),
    ],
)
def test_what_is_not_ours_is_left_alone(overrides: tuple[str, ...]) -> None:
    config = _config(*SERVED, *overrides)
    before = OmegaConf.to_container(config)
    prepare_reward_config(config)
    assert OmegaConf.to_container(config) == before
    ours = reward_loop.RewardModelManager is ServedReplicas
    assert ours == (config.reward.reward_model.enable and config.reward.reward_model.rollout.name == "hf")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.reward_model.model_path=null",), r"^reward\.reward_model\.model_path = None: no model is named"),
        (
            ("reward.reward_model.rollout.tensor_model_parallel_size=2",),
            r"tensor_model_parallel_size = 2: 2 x 1 x 1 = 2 GPUs for each replica, and trainer has 1: 1 % 2 = 1, not 0",
        ),
        (
            ("reward.reward_model.enable_resource_pool=true",),
            r"reward\.reward_model\.nnodes = 0: nnodes 0 x n_gpus_per_node 8 = 0 GPUs",
        ),
        (
            (
                "reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=2",
                "reward.reward_model.n_gpus_per_node=2", "reward.reward_model.rollout.tensor_model_parallel_size=4",
            ),
            "a replica of 4 GPUs is on several nodes, which have 2 each. Set it to 2 or less",
        ),
        (
            ("+reward.reward_model.rollout.engine_kwargs.hf.ofload=stream",),
            r"engine_kwargs\.hf\.ofload = stream: it is no setting here. Use some of task, device_map",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_anything_starts(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_reward_config(_config(*SERVED, *overrides))


def test_all_faults_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_reward_config(
            _config(
                *SERVED,
                "reward.reward_model.model_path=null",
                "+reward.reward_model.rollout.engine_kwargs.hf.x=1",
                "reward.reward_model.rollout.tensor_model_parallel_size=3",
            )
        )
    assert len(caught.value.findings) == 3


def test_dtype_has_a_key_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"hf\.dtype = float32: .* Set dtype as reward\.reward_model\.rollout\.dtype"):
        read_kwargs({"hf": {"dtype": "float32"}})
    assert read_kwargs({"vllm": {"x": 1}}) == read_kwargs(None) == {}


@pytest.mark.parametrize(
    ("kwargs", "seats", "cpu", "expected"),
    [
        ({}, 1, True, {"device_map": "cpu"}),
        ({}, 2, True, {"device_map": "cpu"}),
        ({}, 1, False, {"device_map": 0}),
        ({}, 2, False, {"device_map": "balanced", "devices": [0, 1]}),
        ({"copies_on": ["cuda:2"], "offload": "stream"}, 1, False, {"copies_on": ["cuda:2"], "offload": "stream"}),
    ],
)
def test_a_replica_is_on_its_gpus_unless_others_are_named(
    kwargs: Any, seats: int, cpu: bool, expected: dict[str, Any]
) -> None:
    rollout = SimpleNamespace(dtype="bfloat16", engine_kwargs={"hf": kwargs})
    assert scoring_settings(rollout, seats, cpu=cpu) == {"dtype": "bfloat16", **expected}
