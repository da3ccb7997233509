"""Options of the quick start: all faults at once, and what makes a run the same run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.quickstart.options import QuickstartOptions, flag


def _faults(**options: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        QuickstartOptions(**options)
    return [(finding.where, finding.given) for finding in caught.value.findings]


def test_the_defaults_have_no_fault() -> None:
    assert QuickstartOptions().algorithm == "ppo"


@pytest.mark.parametrize(
    "name",
    ["steps", "gpus", "batch_size", "n", "micro_batch_size", "max_prompt_length", "max_response_length", "save_freq"],
)
def test_counts_begin_at_one(name: str) -> None:
    for value in (0, -3):
        assert _faults(**{name: value}) == [(f"--{name.replace('_', '-')}", str(value))]
    assert getattr(QuickstartOptions(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", ["lr", "critic_lr", "kl_coef"])
def test_rates_are_finite_and_not_negative(name: str) -> None:
    for value in (-1e-9, float("inf"), float("nan")):
        assert _faults(**{name: value}) == [(f"--{name.replace('_', '-')}", str(value))]
    assert getattr(QuickstartOptions(**{name: 0.0}), name) == 0


def test_zero_gpus_are_refused_with_the_way_to_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"^--gpus = 0: 0 is less than 1. Leave out --gpus to run on the CPU.$"):
        QuickstartOptions(gpus=0)


def test_all_faults_come_at_once() -> None:
    faults = _faults(steps=0, seed=-1, lr=-1.0, algorithm="dpo", val_data=(Path("v"),), reward="r.py:f")
    assert faults == [
        ("--steps", "0"), ("--lr", "-1.0"), ("--seed", "-1"), ("--algorithm", "dpo"),
        ("--val-data", str((Path("v"),))), ("--reward", "r.py:f"),
    ]  # fmt: skip


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="Use one of ppo, grpo"):
        QuickstartOptions(algorithm="PPO")


def test_data_and_task_exclude_each_other() -> None:
    assert _faults(data=(Path("a"),), task=("chain_sum", "b")) == [("--task", "chain_sum, b")]


def test_the_identity_is_what_a_run_keeps() -> None:
    base = QuickstartOptions(data=(Path("a"), Path("b")), model="m")
    assert base.identity() == {
        "model": "m", "data": ["a", "b"], "val-data": [], "reward": None, "reward-model": None, "task": [], "algorithm": "ppo",
        "seed": 0, "batch-size": None, "n": None,
    }  # fmt: skip
    other = QuickstartOptions(data=(Path("a"), Path("b")), model="m", steps=7, save_freq=2, out=Path("x"), resume=True)
    assert other.identity() == base.identity()
    assert QuickstartOptions(data=(Path("a"), Path("b")), model="m", seed=1).identity() != base.identity()
    assert QuickstartOptions(reward_model="demo").identity() == QuickstartOptions().identity() | {
        "reward-model": "demo"
    }


def test_the_demo_reward_model_knows_only_our_tasks() -> None:
    assert _faults(data=(Path("a"),), reward_model="demo") == [("--reward-model", "demo")]
    assert QuickstartOptions(data=(Path("a"),), reward_model="folder").reward_model == "folder"


def test_settings_come_back_from_json() -> None:
    import json

    options = QuickstartOptions(data=(Path("a"),), out=Path("x"), lr=1e-5, steps=3)
    stored = json.loads(json.dumps(options.settings()))
    assert set(stored) == {field.name for field in fields(QuickstartOptions)}
    again = QuickstartOptions(
        **{**stored, "data": tuple(map(Path, stored["data"])), "val_data": (), "task": (), "out": Path(stored["out"])}
    )
    assert again == options


def test_flags() -> None:
    assert flag("max_prompt_length") == "--max-prompt-length"


def test_the_reward_models_device_is_one_and_has_a_model() -> None:
    assert _faults(reward_device="gpu") == [("--reward-device", "gpu"), ("--reward-device", "gpu")]
    assert _faults(reward_device="disk", reward_model="m") == [("--reward-device", "disk")]
    assert QuickstartOptions(reward_device="cuda:1", reward_model="m").settings()["reward_device"] == "cuda:1"
