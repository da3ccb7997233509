"""Roles that move between the steps of a run: it trains on as if they had been there from the start. On made-up devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runtime.fake_links import FakeLinks

from tests.training.conftest import count_w4
from verl_shard import ConfigError, PPOTrainer, RunError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import ShardNotice
from verl_shard.config.run_folder import WHOLE
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.training import moving
from verl_shard.training.placement import Places
from verl_shard.verl_plugin.local.group import Processes

Make = Callable[..., PPOTrainer]
COMPARED = ("critic/score/mean", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty")


def on_made_up_gpus(trainer: PPOTrainer, links: FakeLinks, n: int = 4) -> None:
    """Has a started run on the CPU be moved among GPUs that are not there."""
    places = replace(trainer._inputs.places, cpu=False, share=tuple(range(n)))
    trainer._inputs = replace(trainer._inputs, places=places)
    for engine in trainer._started().workers._engines.values():
        move = engine.move
        engine.move = lambda device_map, links=None, move=move: move(device_map, links=fake)
    fake = links


def engine_of(trainer: PPOTrainer, role: str) -> Any:
    return trainer._started().workers._engines[role]


def devices_of(trainer: PPOTrainer, role: str, links: FakeLinks) -> set[str]:
    """Where weights, buffers, gradients and the optimizer's states are."""
    engine = engine_of(trainer, role)
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    if engine.optimizer is not None:
        tensors += [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
    return {links.of(tensor) for tensor in tensors}


def moved_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["kind"] == "moved"]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], names: Any = COMPARED) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for one, other in zip(found, expected, strict=True):
        for name in names:
            assert one["data"][name] == pytest.approx(other["data"][name], rel=1e-4, abs=1e-6), (one["step"], name)


def test_every_role_moves_and_nothing_else_changes(trainer: Make, tmp_path: Path) -> None:
    settings = {"steps": 4, "kl_coef": 0.1, "critic_lr": 1e-2}
    still = trainer(ppo=settings, output_dir=tmp_path / "still").train()
    links, seen = FakeLinks(), []

    def move(made: PPOTrainer, step: int, _: Any) -> None:
        if step == 1:
            on_made_up_gpus(made, links)
            made.update_resource("actor", [0, 1])
            made.update_resource("critic", "1-2", strategy="device_map")
            made.update_resource("ref", [3])
        if step == 2:
            made.update_resource("actor", [2])
        seen.append({role: devices_of(made, role, links) for role in ("actor", "critic", "ref")})
        if step == 3:
            made.update_resource("actor", ["cuda:3", 0])
            made.update_resource("actor", [3, 0])  # it is there already

    made = trainer(ppo=settings, callbacks=[move], output_dir=tmp_path / "moved")
    found = made.train()
    first = {"actor": {"gpu0", "gpu1"}, "critic": {"gpu1", "gpu2"}, "ref": {"gpu3"}}
    assert seen == [
        first,
        {**first, "actor": {"gpu2"}},
        {**first, "actor": {"gpu2"}},
        {**first, "actor": {"gpu3", "gpu0"}},
    ]
    assert_same(found, still)
    # One GPU has no pipeline, several have; the rollout and the pieces go by the module as it is.
    assert pipeline_of(made.model) is not None
    assert engine_of(made, "actor")._batches().pipe is pipeline_of(made.model)
    plan = yaml.safe_load((tmp_path / "moved" / "plan.yaml").read_text())["roles"]
    assert {role: set(entry["device_map"].values()) for role, entry in plan.items()} == {
        "actor": {3, 0}, "critic": {1, 2}, "ref": {3},
    }  # fmt: skip
    assert [(e["component"], e["strategy"], e["step"], e["after"]) for e in moved_events(tmp_path / "moved")] == [
        ("actor", "device_map", 1, {"devices": [0, 1]}),
        ("critic", "device_map", 1, {"devices": [1, 2]}),
        ("ref", "none", 1, {"devices": [3]}),
        ("actor", "none", 2, {"devices": [2]}),
        ("actor", "device_map", 3, {"devices": [3, 0]}),
    ]


def test_a_moved_actor_with_adapters(trainer: Make, tmp_path: Path) -> None:
    settings = {"steps": 3, "lora_rank": 2, "lora_alpha": 4}
    still = trainer(ppo=settings, output_dir=tmp_path / "still").train()
    links = FakeLinks()

    def move(made: PPOTrainer, step: int, _: Any) -> None:
        if step == 2:
            on_made_up_gpus(made, links)
            with pytest.raises(ConfigError, match="the reference is the actor without its adapters"):
                made.update_resource("ref", [0])
            made.update_resource("actor", [0, 1])

    made = trainer(ppo=settings, callbacks=[move], output_dir=tmp_path / "moved")
    assert_same(made.train(), still)
    assert devices_of(made, "actor", links) == {"gpu0", "gpu1"}
