from __future__ import annotations

from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.config.workload import Workload
from verl_shard.planning.settings import Settings, fill, micro_batch, read_roles


def filled(workload: Workload | None = None, backend: Any = None, **roles: Any) -> Settings:
    return fill(read_roles({"actor": "a", **roles}, backend), workload or Workload(train_batch_size=64))


def faults(*args: Any, **given: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        filled(*args, **given)
    return {finding.where: str(finding) for finding in caught.value.findings}


def test_ppo_brings_a_critic_and_the_kl_a_reference() -> None:
    made = filled()
    assert list(made.roles) == ["actor", "critic", "ref", "rollout"]
    assert made.roles["critic"].model == made.roles["ref"].model == "a"
    assert made.roles["critic"].task == "value"
    assert list(filled(Workload(algorithm="grpo", kl="none")).roles) == ["actor", "rollout"]


def test_defaults_and_what_was_blank() -> None:
    made = filled(actor={"model": "a", "micro_batch_size": 4})
    actor = made.roles["actor"]
    assert (actor.precision, actor.optimizer, actor.micro_batch_size, actor.gradient_checkpointing) == (
        "bf16-mixed", "adamw", 4, False,
    )  # fmt: skip
    assert made.roles["ref"].precision == "bf16"
    assert "micro_batch_size" not in made.blank["actor"]
    assert "precision" in made.blank["actor"]


@pytest.mark.parametrize(
    ("batch", "n", "mini", "size"), [(64, 1, None, 16), (10, 3, None, 15), (7, 1, None, 7), (34, 1, 17, 1)]
)
def test_a_micro_batch_divides_the_mini_batch(batch: int, n: int, mini: int | None, size: int) -> None:
    assert micro_batch(Workload(train_batch_size=batch, n=n, ppo_mini_batch_size=mini)) == size


def test_a_micro_batch_that_does_not_divide_is_refused_with_the_arithmetic() -> None:
    found = faults(actor={"model": "a", "micro_batch_size": 5})
    assert "64 prompts x 1 = 64 sequences, % 5 = 4" in found["actor.micro_batch_size"]
    assert "1, 2, 4, 8, 16, 32, 64" in found["actor.micro_batch_size"]


def test_roles_without_use_and_settings_of_another_backend_all_at_once() -> None:
    found = faults(
        Workload(algorithm="grpo", kl="none", train_batch_size=64),
        critic="c",
        ref="r",
        reward={},
        rollout={"gpu_memory_utilization": 0.5, "devices": 2},
    )
    assert set(found) == {"critic", "ref", "reward.model", "rollout.gpu_memory_utilization", "rollout.devices"}
    assert "learns no values" in found["critic"]


def test_stock_verl_has_its_own_settings() -> None:
    made = filled(backend="fsdp2", actor={"model": "a", "offload_policy": True})
    assert made.roles["rollout"].strategy == "vllm"
    assert made.roles["rollout"].gpu_memory_utilization == 0.5
    assert made.roles["critic"].param_offload is False
    assert (
        "FSDP1 does not have it"
        in faults(backend="fsdp", actor={"model": "a", "offload_policy": True})["actor.offload_policy"]
    )
    assert "device_map backend's" in faults(backend="fsdp", ref={"offload": "stream"})["ref.offload"]
    assert (
        "fsdp has fsdp there"
        in faults(backend="fsdp", actor={"model": "a", "strategy": "device_map"})["actor.strategy"]
    )


def test_the_actor_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="the actor needs a model"):
        fill(read_roles({"actor": {}}), Workload())


def test_lora_makes_the_reference_the_actor() -> None:
    assert filled(actor={"model": "a", "lora_rank": 8}).ref_in_actor
    assert not filled().ref_in_actor


@pytest.mark.parametrize(
    ("backend", "given", "where"),
    [
        ("device_map", {"critic": {"logits": "fused"}}, "critic.logits"),
        ("device_map", {"rollout": {"offload": "stream"}}, "rollout.offload"),
        ("device_map", {"ref": {"offload": "cpu_offload"}}, "ref.offload"),
        ("fsdp2", {"actor": {"model": "a", "gpu_memory_utilization": 0.5}}, "actor.gpu_memory_utilization"),
        ("fsdp2", {"ref": {"param_offload": True}}, "ref.param_offload"),
        ("fsdp2", {"ref": {"devices": [0]}}, "ref.devices"),
        ("fsdp2", {"ref": {"device_type": "cpu"}}, "ref.device_type"),
    ],
)
def test_no_field_goes_by_in_silence(backend: Any, given: dict[str, Any], where: str) -> None:
    assert list(faults(backend=backend, **given)) == [where]


def test_auto_is_for_the_planner() -> None:
    made = filled(ref={"offload": "auto"})
    assert made.roles["ref"].offload == "none"
    assert "offload" in made.blank["ref"]


@pytest.mark.parametrize(
    ("backend", "given", "why"),
    [
        ("device_map", {"reward": {"strategy": "vllm"}}, "has device_map or none or data_parallel there"),
        ("device_map", {"actor": {"strategy": "data_parallel"}}, "backend device_map has device_map or none there"),
        ("fsdp2", {"ref": {"strategy": "data_parallel"}}, "backend fsdp2 has fsdp2 there"),
        ("device_map", {"reward": {"strategy": "data_parallel", "devices": [2]}}, "one GPU, and so one copy"),
        ("device_map", {"reward": {"strategy": "none", "devices": [1, 2]}}, "it is for one GPU, and there are 2"),
        ("fsdp2", {"reward": {"strategy": "data_parallel"}}, "backend fsdp2 has vllm or sglang there"),
        (
            "fsdp2",
            {"reward": {"strategy": "sglang"}},
            "the rollout is on vllm, and a plan of stock verl has one engine",
        ),
    ],
)
def test_strategies_that_a_role_cannot_have(backend: Any, given: dict[str, Any], why: str) -> None:
    ((role, section),) = given.items()
    found = faults(backend=backend, **{role: {"model": "m", **section}})
    assert list(found) == [f"{role}.strategy"]
    assert why in found[f"{role}.strategy"]


def test_a_reference_with_copies_has_weights_of_its_own() -> None:
    assert filled(ref={"strategy": "data_parallel"}).roles["ref"].strategy == "data_parallel"
    found = faults(actor={"model": "a", "lora_rank": 4}, ref={"strategy": "data_parallel"})
    assert list(found) == ["ref.strategy"]
    assert "the reference is the actor without its adapters" in found["ref.strategy"]


def test_a_reward_model_on_stock_verl_is_on_the_rollouts_engine() -> None:
    """What a resource config calls it, vllm or sglang, and not the backend of the trainer."""
    for rollout in ("vllm", "sglang"):
        named, blank = ({"model": "m", "strategy": rollout}, {"model": "m"})
        for reward in (named, blank):
            made = filled(backend="fsdp2", reward=reward, rollout={"strategy": rollout})
            assert made.roles["reward"].strategy == rollout
    on_cpu = filled(backend="fsdp2", reward={"model": "m", "device_type": "cpu"})
    assert on_cpu.roles["reward"].strategy == "none"


def test_strategy_none_is_for_one_gpu() -> None:
    made = filled(critic={"strategy": "none"}, ref={"strategy": "none", "device_type": "cpu"}, reward="m")
    assert [made.roles[role].devices for role in ("critic", "ref", "reward")] == [1, None, None]
