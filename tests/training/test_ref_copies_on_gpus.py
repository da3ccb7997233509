"""A reference on one GPU, then a copy on each of two, then on the other: the run is the one that stayed.

In a process of its own, skipped where there are fewer GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.conftest import PROMPTS

SCRIPT = """
import sys
import torch
from verl_shard import PPOTrainer

model, folder, prompts, moves, config = *sys.argv[1:3], *map(eval, sys.argv[3:6])

def move(trainer, step, metrics):
    if step in moves:
        trainer.update_resource("ref", *moves[step])
    engine = trainer._started().workers._engines["ref"]
    modules = [copy.module for copy in engine.copies.each] if engine.copies else [engine.module]
    print("ref on", [str(module.lm_head.weight.device) for module in modules])

if __name__ == "__main__":
    trainer = PPOTrainer(
        model, train_data=prompts, output_dir=folder, progress=False, callbacks=[move], model_config=config,
        reward_model=lambda prompt, response: float(len(set(response.split()))),
        ppo_config={"adv_estimator": "grpo", "n": 4, "steps": 4, "batch_size": 4, "micro_batch_size": 2, "lr": 1e-3,
                    "kl_coef": 0.1, "seed": 1},
        generation_config={"max_new_tokens": 12},
    )
    trainer.train()
"""
NAMES = ("critic/score/mean", "actor/grad_norm", "actor/kl_loss")


@pytest.fixture
def train(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[list[str], list[dict[str, float]]]]:
    """train(name, moves={step: arguments}, config={...}): where the reference was after each step, and the metrics."""
    model, script = make_model(), tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(name: str, *, moves: object, config: object) -> tuple[list[str], list[dict[str, float]]]:
        folder = tmp_path / name
        given = [str(model), str(folder), repr(PROMPTS), repr(moves), repr(config)]
        made = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, timeout=300)
        assert made.returncode == 0, made.stderr[-3000:]
        where = [line.removeprefix("ref on ") for line in made.stdout.splitlines() if line.startswith("ref on ")]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [record["data"] for record in map(json.loads, lines) if "step" in record]
        return where, [{name: data[name] for name in NAMES} for data in records]

    return run


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copies_of_a_reference_come_and_go(train: Callable[..., tuple[list[str], list[dict[str, float]]]]) -> None:
    actor = {"actor": {"device": 0, "precision": "fp32"}}
    one, two = {"device": 0, "dtype": "float32"}, {"copies_on": [0, 1], "dtype": "float32"}
    _, still = train("still", moves={}, config={**actor, "ref": one})
    where, moved = train("moved", moves={1: ([0, 1], "data_parallel"), 3: ([1],)}, config={**actor, "ref": one})
    assert where == ["['cuda:0', 'cuda:1']", "['cuda:0', 'cuda:1']", "['cuda:1']", "['cuda:1']"]
    there, begun = train("begun", moves={}, config={**actor, "ref": two})
    assert there == ["['cuda:0', 'cuda:1']"] * 4
    streamed = train("streamed", moves={}, config={**actor, "ref": {**two, "offload": "stream"}})[1]
    for run in (moved, begun, streamed):
        assert len(run) == len(still) == 4
        for found, expected in zip(run, still, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
