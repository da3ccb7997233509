"""PPO with the actor over two GPUs and the reward model streamed: undisturbed, with one GPU too small, and on verl's trainer.

In processes of their own, skipped where there are fewer GPUs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS

STEPS = 3
SCRIPT = """
import sys
import torch
from verl_shard import PPOTrainer

model, judge, folder, prompts, steps, cap, runner, model_config = *sys.argv[1:4], *map(eval, sys.argv[4:9])

def after_the_first_step(trainer, step, metrics):
    if step == 1 and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(1)
        print("held", torch.cuda.memory_allocated(1))
        if cap:
            torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(1).total_memory, 1)

if __name__ == "__main__":
    trainer = PPOTrainer(
        model, reward_model=judge, train_data=prompts, output_dir=folder, progress=False, runner=runner,
        callbacks=[after_the_first_step] if runner == "local" else [], model_config=model_config,
        ppo_config={"adv_estimator": "grpo", "n": 12, "steps": steps, "batch_size": 8, "micro_batch_size": 96, "lr": 1e-4,
                    "kl_coef": 0, "seed": 1},
        generation_config={"max_new_tokens": 192},
    )
    trainer.train()
    if runner == "local":
        print("actor on", sorted({str(parameter.device) for parameter in trainer.model.parameters()}))
    if runner == "local" and torch.cuda.is_available():
        print("peak", torch.cuda.max_memory_allocated(1))
"""
CONFIG = {
    "actor": {"devices": [0, 1], "precision": "fp32"},
    "reward": {"device": "cuda:0", "dtype": "float32", "offload": "stream"},
}
NAMES = ("critic/score/mean", "actor/grad_norm", "response_length/mean")

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def train(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """train(name, cap=0, runner="local"): what a run printed, and the metrics of its steps."""
    wide = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = make_model(**wide, intermediate_size=8192, max_position_embeddings=512)
    judge = make_model("judge", task="SequenceClassification", num_labels=1, seed=2, max_position_embeddings=512)
    script = tmp_path / "two_gpus.py"
    script.write_text(SCRIPT)

    def run(name: str, *, cap: int = 0, runner: str = "local", steps: int = STEPS) -> tuple[str, list[dict[str, Any]]]:
        given = [str(model), str(judge), str(tmp_path / name), *map(repr, (PROMPTS, steps, cap, runner, CONFIG))]
        ended = subprocess.run(
            [sys.executable, str(script), *given], env=dict(os.environ), capture_output=True, text=True, timeout=500,
            check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr[-6000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return ended.stdout, [json.loads(line)["data"] for line in lines]

    return run


def said(printed: str, what: str) -> int:
    return int(next(line for line in printed.splitlines() if line.startswith(f"{what} ")).split()[-1])


def test_memory_runs_out_on_the_second_gpu_alone(
    train: Callable[..., tuple[str, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    printed, expected = train("still")
    assert "actor on ['cuda:0', 'cuda:1']" in printed
    held, peak = said(printed, "held"), said(printed, "peak")
    assert peak > 2 * held  # activations are most of it
    printed, found = train("capped", cap=(held + peak) // 2)
    assert said(printed, "peak") <= (held + peak) // 2
    events = [json.loads(line) for line in (tmp_path / "capped" / "events.jsonl").read_text().splitlines()]
    short = [event for event in events if event["kind"] == "out-of-memory"]
    assert short
    assert all("GPU 1 has" in json.dumps(event) for event in short)
    assert any(event["kind"] == "remedy" for event in events)
    assert len(found) == len(expected) == STEPS
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in NAMES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), (step, name)


def test_on_verls_own_trainer(train: Callable[..., tuple[str, list[dict[str, Any]]]]) -> None:
    _, steps = train("ray", runner="verl")
    assert len(steps) == STEPS
    assert all(math.isfinite(step[name]) for step in steps for name in NAMES)
    assert all(step["actor/grad_norm"] > 0 for step in steps)
