"""The engine's configuration: every fault at once, and what cannot be trained is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verl.workers.config import FSDPEngineConfig
from verl.workers.config.engine import QATEngineConfig

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin import config as module
from verl_shard.verl_plugin.config import (
    DeviceMapActorConfig,
    DeviceMapCriticConfig,
    DeviceMapEngineConfig,
    untrainable,
)


def _faults(**options: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        DeviceMapEngineConfig(**options)
    return [(finding.where, finding.code) for finding in caught.value.findings]


UNUSED = {
    "param_offload": True, "optimizer_offload": True, "offload_policy": True, "fsdp_size": 2, "reshard_after_forward": False,
    "forward_prefetch": True, "use_orig_params": True, "wrap_policy": {"min_num_params": 1}, "model_dtype": "bf16",
    "mixed_precision": {"param_dtype": "bf16"}, "dtype": "float16", "ulysses_sequence_parallel_size": 2,
    "use_no_sync_for_gradient_accumulation": True,
}  # fmt: skip


def test_the_defaults_have_no_fault() -> None:
    assert DeviceMapEngineConfig().strategy == "device_map"
    assert DeviceMapCriticConfig.__dataclass_fields__["device_map"].default_factory().role == "critic"  # type: ignore[misc]


def test_every_unused_key_is_one_of_fsdps() -> None:
    assert set(UNUSED) == set(module._UNUSED)
    assert set(UNUSED) <= set(FSDPEngineConfig.__dataclass_fields__)


@pytest.mark.parametrize("key", UNUSED)
def test_a_key_that_is_not_read_is_refused(key: str) -> None:
    value = UNUSED[key]
    if value == getattr(FSDPEngineConfig(), key):
        value = not value
    assert _faults(**{key: value}) == [(f"actor.device_map.{key}", "unused-key")]


def test_all_faults_come_at_once() -> None:
    faults = _faults(
        role="critic",
        param_offload=True,
        fsdp_size=4,
        precision="fp16",
        device_map="sequential",
        plan="/no/such/plan.yaml",
    )
    assert sorted(faults) == [
        ("critic.device_map.device_map", "unknown-device-map"),
        ("critic.device_map.fsdp_size", "unused-key"),
        ("critic.device_map.param_offload", "unused-key"),
        ("critic.device_map.plan", "no-plan"),
        ("critic.device_map.precision", "unknown-precision"),
    ]


def test_an_unknown_role_is_refused() -> None:
    assert _faults(role="reward") == [("reward.device_map.role", "unknown-role")]


@pytest.mark.parametrize(
    "qat", [{"enable": True}, QATEngineConfig(enable=True)], ids=["as a mapping", "as verl has it"]
)
def test_quantisation_aware_training_is_refused(qat: Any) -> None:
    assert _faults(qat=qat) == [("actor.device_map.qat.enable", "unused-key")]


@pytest.mark.parametrize("precision", [None, "bf16-mixed", "bf16", "fp32"])
@pytest.mark.parametrize("device_map", ["balanced", "auto", "cpu", {"": 0}, {"model": 0, "lm_head": 1}])
def test_what_can_be_said(precision: str | None, device_map: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").touch()
    made = DeviceMapEngineConfig(precision=precision, device_map=device_map, plan=str(tmp_path / "plan.yaml"))
    assert (made.precision, made.device_map) == (precision, device_map)


OFFLOADED = {"model.embed_tokens": 0, "model.layers.0": "cpu", "model.layers.1": "disk", "lm_head": 0}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_modules_that_would_not_be_trained_are_refused_by_name(role: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DeviceMapEngineConfig(role=role, device_map=OFFLOADED)
    (finding,) = caught.value.findings
    assert finding.where == f"{role}.device_map.device_map"
    assert finding.given == "model.layers.0 -> cpu, model.layers.1 -> disk"


@pytest.mark.parametrize(
    ("device_map", "refused"),
    [
        ({"": "cpu"}, False),
        ({"model": "cpu", "lm_head": "cpu"}, False),
        ({"": 0}, False),
        ({"model": 0, "lm_head": "cuda:1"}, False),
        ({"": "disk"}, True),
        ({"model": "cpu", "lm_head": "disk"}, True),
        ({"model": "cpu", "lm_head": 0}, True),
        ({"model": 0, "lm_head": "disk"}, True),
        ({}, False),
    ],
    ids=str,
)
def test_a_model_that_is_wholly_on_the_cpu_is_trained_there(device_map: dict[str, Any], refused: bool) -> None:
    assert bool(untrainable(device_map, "actor")) is refused


def test_many_offloaded_modules_are_summed_up() -> None:
    (finding,) = untrainable({"a": 0, **{f"layers.{n}": "cpu" for n in range(9)}}, "actor")
    assert finding.given == "layers.0 -> cpu, layers.1 -> cpu, layers.2 -> cpu, layers.3 -> cpu and 5 more"


def test_a_scoring_role_may_be_offloaded() -> None:
    assert DeviceMapEngineConfig(role="ref", forward_only=True, device_map=OFFLOADED).device_map == OFFLOADED


def test_an_actor_and_a_critic_take_their_engine_from_device_map() -> None:
    engine = DeviceMapEngineConfig(precision="bf16")
    actor = DeviceMapActorConfig(
        device_map=engine, rollout_n=2, ppo_micro_batch_size_per_gpu=2, ppo_mini_batch_size=4, optim=None
    )
    assert actor.engine is engine
    assert actor.strategy == "device_map"
