"""Overrides of verl that somebody typed, beside those of a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from override_sets import GOOD

from verl_shard.common.errors import ConfigError
from verl_shard.training.check_overrides import check_overrides

OWN = [*GOOD["GRPO plain"], "+ray_kwargs.ray_init.include_dashboard=False"]


def found(*extra: str, own: Sequence[str] = OWN) -> list[tuple[str, str]]:
    """(code, key) of what is refused."""
    try:
        check_overrides(extra, own)
    except ConfigError as error:
        return [(finding.code, finding.where) for finding in error.findings]
    return []


def test_what_verl_takes_passes() -> None:
    assert found() == []
    assert found("trainer.save_freq=5", "ray_kwargs.ray_init.include_dashboard=True", "hydra.run.dir=here") == []
    assert found("~critic.optim", "+trainer.v1={a: 1}", "--config-dir=here") == []
    assert found("mine.key=1", "--config-name=mine") == [], "keys of another configuration are not known"


def test_all_that_it_does_not_is_said_at_once() -> None:
    extra = ["algorithm.gama=1", "a b=2", "+trainer.nnodes=2", "trainer=3", "data.seed=???", "--gpus=2"]
    assert found(*extra) == [
        ("unreadable-override", "a b"), ("unknown-flag", "--gpus"), ("plus-on-a-key", "trainer.nnodes"),
        ("unknown-key", "algorithm.gama"), ("wrong-value", "trainer"), ("wrong-value", "data.seed"),
    ]  # fmt: skip


def test_what_does_not_go_together_is_said_when_each_is_right() -> None:
    strange = "actor_rollout_ref.rollout.name"
    assert found(f"{strange}=vlm") == [("unknown-rollout", strange)]
    assert found(f"{strange}=vlm", "algorithm.gama=1") == [("unknown-key", "algorithm.gama")]


def test_nothing_is_said_of_the_runs_own() -> None:
    own = [*OWN, "algorithm.gama=1", "actor_rollout_ref.rollout.name=vlm"]
    assert found("trainer.save_freq=5", own=own) == []
    assert found("algorithm.gam=1", own=own) == [("unknown-key", "algorithm.gam")]


def test_an_engine_that_takes_away_the_runs_own_keys() -> None:
    own = ["model_engine=device_map", "actor_rollout_ref.actor.device_map.seed=1"]
    assert found("model_engine=dp", own=own) == [("another-engine", "model_engine")]
    with pytest.raises(ConfigError, match=r"model_engine = nothing: .*Could not find 'model_engine/nothing'"):
        check_overrides(["model_engine=nothing"], own)
    assert found("model_engine=nothing", own=own) == [("no-such-group", "model_engine")]
