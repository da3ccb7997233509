"""The check that verl still is what this package needs, and the registration."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, entry_points
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_shard.verl_plugin import hooks


def test_nothing_is_missing_from_the_installed_verl() -> None:
    assert hooks.missing(everything=True) == []


@pytest.mark.parametrize(
    "name",
    [f"{module}.{name}" for module, names in {**hooks._NEEDED, **hooks._NEEDED_LATER}.items() for name in names],
)
def test_what_is_gone_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, attribute = name.rpartition(".")
    monkeypatch.delattr(importlib.import_module(module), attribute)
    assert hooks.missing(everything=True) == [name]
    assert hooks.missing() == ([name] if module in hooks._NEEDED else [])


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks._NEEDED, "verl.no_such_module", ("A", "B"))
    assert hooks.missing() == ["verl.no_such_module: No module named 'verl.no_such_module'"]


@pytest.mark.parametrize("installed", ["0.9.0", "0.8.2", "0.10.0", "1.0", "0.10.1.dev0"])
def test_another_verl_is_refused_by_version(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "version", lambda _: installed)
    (line,) = hooks.missing()
    assert line == f"verl {installed} is installed; this plugin is for verl >=0.9.1,<0.10"


@pytest.mark.parametrize("installed", ["0.9.1", "0.9.2", "0.9.1.post1"])
def test_versions_that_are_meant(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "version", lambda _: installed)
    assert hooks.missing() == []


def test_without_verl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(hooks, "version", version)
    assert hooks.missing() == ["verl is not installed"]


def test_the_entry_point_is_registered_and_loads() -> None:
    (entry,) = entry_points(group="verl.plugins", name="verl_shard")
    assert entry.load() is True


def test_what_the_plugin_registers_is_there() -> None:
    from verl.plugin.platform import PlatformRegistry
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_shard.verl_plugin.engine import DeviceMapEngineWithLMHead, DeviceMapEngineWithValueHead
    from verl_shard.verl_plugin.platform_cpu import PlatformCPU
    from verl_shard.verl_plugin.rollout.adapter import HFServerAdapter
    from verl_shard.verl_plugin.rollout.replica import HFReplica

    assert PlatformRegistry.get("cpu") is PlatformCPU
    assert get_rollout_class("hf", "async") is HFServerAdapter
    assert RolloutReplicaRegistry.get("hf") is HFReplica
    for device in ("cpu", "cuda"):
        of = EngineRegistry._engines
        assert of["language_model"]["device_map"][device] is DeviceMapEngineWithLMHead
        assert of["value_model"]["device_map"][device] is DeviceMapEngineWithValueHead


def test_a_plugin_that_cannot_work_says_why_and_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verl_shard.verl_plugin import register

    monkeypatch.setattr(hooks, "missing", lambda: ["verl.a.B", "verl.c"])
    assert register.register() is False
    assert capsys.readouterr().err == (
        "verl_shard: the verl plugin is off: this verl lacks what the plugin needs: verl.a.B; verl.c\n"
    )


def test_the_output_device_is_that_of_logits_or_of_fused_log_probs() -> None:
    meta, cpu = torch.zeros(1, device="meta"), torch.zeros(1)
    assert hooks.output_device(SimpleNamespace(logits=meta, log_probs=None)) == meta.device
    assert hooks.output_device(SimpleNamespace(logits=None, log_probs=cpu)) == cpu.device


def test_a_cpu_worker_gets_a_group_that_torch_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils import distributed

    calls: list[Any] = []
    monkeypatch.setattr(distributed, "initialize_global_process_group_ray", lambda **given: calls.append(given))
    hooks.before_training_workers(lambda: calls.append("prepared"))
    distributed.initialize_global_process_group_ray(timeout_second=None)
    distributed.initialize_global_process_group_ray(None, "nccl")
    assert calls == [
        "prepared", {"timeout_second": None, "backend": "cpu:gloo"},
        "prepared", {"timeout_second": None, "backend": "nccl"},
    ]  # fmt: skip


def test_a_trainer_reads_a_prepared_config(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import logging_utils

    calls: list[Any] = []
    monkeypatch.setattr(logging_utils, "configure_verl_logging", lambda *a, **k: calls.append("logging"))
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: calls.append(("trainer", config)))
    hooks.before_trainer(lambda config: calls.append(("prepare", config)))
    logging_utils.configure_verl_logging()
    logging_utils.configure_verl_logging()
    initialize: Any = PPOTrainer.__init__
    initialize(object(), "config")
    assert calls == ["logging", "logging", ("prepare", "config"), ("trainer", "config")]
