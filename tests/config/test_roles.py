from __future__ import annotations

from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.config.roles import ResourceConfig, RoleConfig
from verl_shard.config.validated import read
from verl_shard.config.workload import Workload


def faults(call: Any, *args: Any, **given: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        call(*args, **given)
    return {finding.where: str(finding) for finding in caught.value.findings}


def test_a_workload_counts_sequences() -> None:
    made = Workload(train_batch_size=64, n=4, ppo_mini_batch_size=16, prompt_length=100, response_length=28)
    assert (made.sequences, made.mini_batch_sequences, made.sequence_length) == (256, 64, 128)
    assert made.has_critic
    assert not Workload(algorithm="grpo").has_critic


def test_all_faults_of_a_workload_at_once_with_the_nearest_name() -> None:
    found = faults(Workload, algorithm="pppo", n=0, prompt_lenght=3)
    assert set(found) == {"algorithm", "n", "prompt_lenght"}
    assert 'Did you mean "prompt_length"?' in found["prompt_lenght"]
    assert "'ppo', 'gae', 'grpo'" in found["algorithm"]


def test_arithmetic_of_a_workload() -> None:
    found = faults(
        Workload, train_batch_size=8, ppo_mini_batch_size=9, response_length=10, mean_response_length=11,
        prompt_length=5, shortest_prompt_length=6,
    )  # fmt: skip
    assert "more than the longest prompt, 5" in found["shortest_prompt_length"]
    assert "more than the 8 prompts" in found["ppo_mini_batch_size"]
    assert "more than the longest response, 10" in found["mean_response_length"]


def test_a_step_is_cut_into_whole_mini_batches() -> None:
    """As verl's loader asserts; with n responses to each prompt both numbers are n times as many, and the rest is too."""
    for n in (1, 3):
        found = faults(Workload, train_batch_size=10, ppo_mini_batch_size=3, n=n)
        assert found == {
            "ppo_mini_batch_size": "ppo_mini_batch_size = 3: train_batch_size 10 % 3 = 1, not 0: a step is cut into whole "
            "mini-batches. Give 2 or 5, or another divisor of 10."
        }
    assert "Give 1 or 7" in faults(Workload, train_batch_size=7, ppo_mini_batch_size=6)["ppo_mini_batch_size"]
    for size in (1, 2, 5, 10):
        assert Workload(train_batch_size=10, ppo_mini_batch_size=size).mini_batch_sequences == size


def test_devices_are_ids_or_a_count() -> None:
    assert RoleConfig(devices=[2, 5]).devices == (2, 5)  # type: ignore[arg-type]
    assert RoleConfig(devices=3).devices == 3
    assert "0 is named more than once" in faults(RoleConfig, devices=[0, 0])["devices"]
    assert "ids count from 0" in faults(RoleConfig, devices=[-1])["devices"]


def test_nested_faults_say_where() -> None:
    given = {"actor": {"model": "x", "precison": "bf16"}, "ref": {"precision": "fp16"}, "criticc": {}}
    found = faults(read, ResourceConfig, given, "roles")
    assert set(found) == {"roles.actor.precison", "roles.ref.precision", "roles.criticc"}
    assert 'Did you mean "precision"?' in found["roles.actor.precison"]
    assert 'Did you mean "critic"?' in found["roles.criticc"]


def test_lines_are_said_where_they_are_known() -> None:
    lines = {("ref", "precision"): 7}
    found = faults(read, ResourceConfig, {"actor": {}, "ref": {"precision": "x"}}, "roles", lines.get)
    assert list(found) == ["line 7: roles.ref.precision"]


@pytest.mark.parametrize(
    ("given", "where", "why"),
    [
        ({"ref": {"optimizer": "sgd"}}, "ref.optimizer", "the ref is not trained"),
        ({"reward": {"gradient_checkpointing": True}}, "reward.gradient_checkpointing", "the reward is not trained"),
        ({"actor": {"offload": "stream"}}, "actor.offload", "is trained"),
        ({"critic": {"device_type": "cpu"}}, "critic.device_type", "is trained on them"),
    ],
)
def test_what_a_role_has_no_use_for_is_refused(given: dict[str, Any], where: str, why: str) -> None:
    assert why in faults(read, ResourceConfig, {"actor": {}} | given)[where]
