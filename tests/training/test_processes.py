"""Several processes, as torchrun starts them: they do what one does, and none waits for one that failed. On the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import PROMPTS, count_w4
from verl_shard import PPOTrainer
from verl_shard.common.files import read_json_lines

SCRIPT = f"""
import sys, warnings
warnings.simplefilter("ignore")
from verl_shard import PPOTrainer

def count_w4(response):
    return float(response.split().count("w4")) + 0.01 * len(set(response.split()))

def failing(response):
    import os
    if os.environ["RANK"] == "1":
        raise ValueError("the scale is broken")
    return 0.0

def move(trainer, step, metrics):
    if step == 1:  # to where it is, by another map: laid out anew, with all that goes by the layout
        trainer.update_resource("actor", {{"": "cpu"}})
        trainer.update_resource("critic", {{"": "cpu"}})

model, folder, reward, settings = sys.argv[1:5]
PPOTrainer(
    model, reward_model=globals()[reward], train_data={PROMPTS!r}, output_dir=folder, progress=False,
    callbacks=[move], ppo_config=eval(settings), generation_config={{"max_new_tokens": 6}},
).train()
"""
SETTINGS: dict[str, Any] = {
    "steps": 4, "batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 1, "n": 2, "lr": 1e-2, "critic_lr": 1e-2, "seed": 1,
    "save_freq": 2, "max_epochs": 2,
}  # fmt: skip
COMPARED = (
    "critic/score/mean", "actor/entropy", "actor/grad_norm", "actor/pg_loss", "critic/vf_loss", "critic/grad_norm",
    "actor/reward_kl_penalty", "actor/lr", "response_length/mean", "critic/vf_explained_var", "actor/pg_clipfrac",
)  # fmt: skip


def launch(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
        *arguments,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def steps_of(folder: Path) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["data"] for record in map(json.loads, lines)}


def assert_same(found: dict[str, float], expected: dict[str, float]) -> None:
    for name in COMPARED:
        # The policy loss is a mean of whitened advantages, zero but for rounding before the first update.
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_two_processes_do_what_one_does(
    trainer: Callable[..., PPOTrainer], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, two = make_model(), tmp_path / "two"
    ended = launch(tmp_path, str(model), str(two), "count_w4", repr(SETTINGS))
    assert ended.returncode == 0, ended.stderr[-3000:]
    one = trainer(actor_model=model, ppo=SETTINGS, reward_model=count_w4, output_dir=tmp_path / "one").train()
    found = steps_of(two)
    assert sorted(found) == [1, 2, 3, 4]
    for record in one:
        assert_same(found[record["step"]], record["data"])
    events = [event for event in read_json_lines(two / "events.jsonl") if event["kind"] == "moved"]
    assert sorted((event["component"], event["process"]) for event in events) == [
        ("actor", 0), ("actor", 1), ("critic", 0), ("critic", 1),
    ]  # fmt: skip

    # The checkpoint of two is that of any number: one goes on from the second step.
    last = two / "checkpoints" / "global_step_4"
    assert {path.name for path in (last / "actor").glob("*.pt")} == {
        f"{kind}_world_size_1_rank_0.pt" for kind in ("model", "optim", "extra_state")
    }
    (last / "WHOLE").unlink()
    resumed = trainer(actor_model=model, ppo=SETTINGS, output_dir=two, resume=True)
    for record in resumed.train()[2:]:
        assert_same(record["data"], one[record["step"] - 1]["data"])


def test_the_failure_of_one_ends_all_with_its_message(make_model: Callable[..., Path], tmp_path: Path) -> None:
    ended = launch(tmp_path, str(make_model()), str(tmp_path / "run"), "failing", repr(SETTINGS))
    assert ended.returncode != 0
    assert "process 1 of 2 failed: ValueError: the scale is broken" in ended.stderr
