"""PPOTrainer on real GPUs, in processes of its own; skipped where there are too few."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from verl_shard.training.accelerate_config import accelerate_config

N_GPUS = torch.cuda.device_count()
ARTICLE = """
import sys
import torch
from verl_shard import PPOTrainer

actor_model, critic_model, ref_model, reward_model, folder, prompts = *sys.argv[1:6], eval(sys.argv[6])
devices = sys.argv[7:]
trainer = PPOTrainer(
    actor_model=actor_model, critic_model=critic_model, reward_model=reward_model, ref_model=ref_model,
    model_config={
        "actor":  {"device": devices[0], "dtype": torch.bfloat16},
        "critic": {"device": devices[1], "dtype": torch.bfloat16},
        "reward": {"device": devices[2], "dtype": torch.float16},
        "ref":    {"device": devices[3], "dtype": torch.bfloat16},
    },
    generation_config={"max_new_tokens": 12, "do_sample": True, "top_p": 0.95, "batch_size": 4},
    ppo_config={"kl_coef": 0.08, "max_epochs": 1, "steps": 2, "batch_size": 4},
    use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
    train_data=prompts, output_dir=folder, progress=False,
)
trainer.train()
from verl_shard.verl_plugin.engine import ENGINES
print({role: str(next(engine.module.parameters()).device) for role, engine in ENGINES.items()})
"""
SHARED = """
import os, sys
from verl_shard import PPOTrainer

def reward(response):
    if len(sys.argv) > 4 and os.environ.get("RANK") == sys.argv[4]:
        raise ValueError("the scale is broken")
    return float(len(set(response.split())))

trainer = PPOTrainer(
    sys.argv[1], reward_model=reward, train_data=eval(sys.argv[3]), output_dir=sys.argv[2], progress=False,
    model_config={"actor": {"precision": "fp32"}, "critic": {"precision": "fp32"}, "ref": {"precision": "fp32"}},
    ppo_config={"steps": 3, "batch_size": 4, "micro_batch_size": 1, "n": 2, "lr": 1e-3, "critic_lr": 1e-3},
    generation_config={"max_new_tokens": 6},
)
trainer.train()
import torch
devices = sorted({str(param.device) for param in trainer.model.parameters()})
print("current", os.environ.get("LOCAL_RANK"), torch.cuda.current_device(), devices)
"""

MOVED = """
import sys
from verl_shard import PPOTrainer
from verl_shard.resources.leases import owners

model, judge, folder, prompts, moves = *sys.argv[1:4], eval(sys.argv[4]), eval(sys.argv[5])

def move(trainer, step, metrics):
    for component, *where in moves.get(step, ()):
        trainer.update_resource(component, *where)
    print("leased", step, len(owners()))

roles = {role: {"device": "cuda:0", "precision": "fp32"} for role in ("actor", "critic", "ref")}
trainer = PPOTrainer(
    model, reward_model=judge, train_data=prompts, output_dir=folder, progress=False, callbacks=[move],
    model_config={**roles, "reward": {"device": "cuda:0", "dtype": "float32"}},
    ppo_config={"steps": 4, "batch_size": 4, "micro_batch_size": 1, "n": 2, "lr": 1e-3, "critic_lr": 1e-3},
    generation_config={"max_new_tokens": 6},
)
trainer.train()
engines = trainer._started().workers._engines
for role, engine in sorted(engines.items()):
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    if engine.optimizer is not None:
        tensors += [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
    print(role, sorted({str(tensor.device) for tensor in tensors}))
print("leased at the end", len(owners()))
"""


def run(*command: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    # A run looks whether its GPUs are idle, and in a container it cannot tell this process's memory from another run's.
    gc.collect()
    torch.cuda.empty_cache()
    return subprocess.run(
        [sys.executable, *command], env=dict(os.environ), capture_output=True, text=True, timeout=timeout, check=False
    )


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
def test_the_articles_call(make_model: Callable[..., Path], tmp_path: Path) -> None:
    models = [make_model("actor"), make_model("critic", seed=1), make_model("ref")]
    judge = make_model("judge", task="SequenceClassification", num_labels=1, seed=2)
    (tmp_path / "article.py").write_text(ARTICLE)
    devices = [f"cuda:{role % N_GPUS}" for role in range(4)]  # the article's, where there are four
    given = [*map(str, models), str(judge), str(tmp_path / "run"), repr(PROMPTS), *devices]
    ended = run(str(tmp_path / "article.py"), *given)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert str({"critic": devices[1], "ref": devices[3], "actor": devices[0]}) in ended.stdout
    assert len(steps_of(tmp_path / "run")) == 2


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("each", [1, 2])
def test_processes_with_gpus_of_their_own(each: int, make_model: Callable[..., Path], tmp_path: Path) -> None:
    if 2 * each > N_GPUS:
        pytest.skip(f"needs {2 * each} GPUs")
    model, script = make_model(), tmp_path / "shared.py"
    script.write_text(SHARED)
    config = tmp_path / "accelerate.yaml"
    config.write_text(accelerate_config(2 * each, each))
    arguments = [str(model), str(tmp_path / "two"), repr(PROMPTS)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    ended = run(*launcher, str(script), *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in (0, 1):
        mine = [f"cuda:{gpu}" for gpu in range(rank * each, (rank + 1) * each)]
        assert f"current {rank} {rank * each} {mine}" in ended.stdout
    alone = run(str(script), str(model), str(tmp_path / "one"), repr(PROMPTS))
    assert alone.returncode == 0, alone.stderr[-3000:]
    for found, expected in zip(steps_of(tmp_path / "two"), steps_of(tmp_path / "one"), strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
def test_the_failure_of_one_ends_all(make_model: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = run(*launcher, str(script), str(make_model()), str(tmp_path / "run"), repr(PROMPTS), "1", timeout=180)
    assert ended.returncode != 0
    assert "process 1 of 2 failed: ValueError: the scale is broken" in ended.stderr


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
def test_roles_that_move_train_on_as_if_they_had_been_there(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_SHARD_LEASES", str(tmp_path / "leases"))
    model, script = make_model(), tmp_path / "moved.py"
    judge = make_model("judge", task="SequenceClassification", num_labels=1, seed=2)
    script.write_text(MOVED)
    moves = {
        1: [("actor", [0, 1]), ("critic", [1]), ("reward", [0, 1], "data_parallel")],
        2: [("actor", [1]), ("critic", [1, 0]), ("ref", [1]), ("reward", "cpu")],
        3: [("critic", [1])],
    }
    given = [str(model), str(judge)]
    ended = run(str(script), *given, str(tmp_path / "moved"), repr(PROMPTS), repr(moves))
    assert ended.returncode == 0, ended.stderr[-3000:]
    for role in ("actor", "critic", "ref"):
        assert f"{role} ['cuda:1']" in ended.stdout
    for said in ("leased 1 2", "leased 2 2", "leased 3 1", "leased at the end 0"):
        assert said in ended.stdout
    still = run(str(script), *given, str(tmp_path / "still"), repr(PROMPTS), "{}")
    assert still.returncode == 0, still.stderr[-3000:]
    for found, expected in zip(steps_of(tmp_path / "moved"), steps_of(tmp_path / "still"), strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name
