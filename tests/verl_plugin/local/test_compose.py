"""verl's configuration composed in this process, and what is wrong with it said as ours."""

from __future__ import annotations

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.local.compose import compose_config

FINE = (
    "model_engine=device_map", "actor_rollout_ref.model.path=m", "critic.enable=false", "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.device=cpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.n=1",
)  # fmt: skip


def test_it_is_resolved() -> None:
    config = compose_config([*FINE, "data.max_response_length=9"])
    assert config.actor_rollout_ref.rollout.response_length == 9
    assert config.actor_rollout_ref.actor.strategy == "device_map"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.nonsense=1", "nonsense"),
        ("a b=", "LexerNoViableAlt"),
        ("trainer.n_gpus_per_node=2", r"trainer\.n_gpus_per_node = 2: 1 x 2 = 2 processes"),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null",
            "verl refuses it: .*Please set at least one",
        ),
    ],
)
def test_what_cannot_be_is_one_of_our_errors(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config([*FINE, override])
