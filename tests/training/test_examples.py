"""The examples, as they are, on tiny models and the CPU: those with a launcher in processes of their own."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_shard import Plan, PPOTrainer
from verl_shard.common.notices import ShardNotice

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.parametrize(("example", "launcher"), [("ppo_local.py", ()), ("ppo_accelerate.py", TORCHRUN)])
def test_it_runs(example: str, launcher: tuple[str, ...], make_model: Callable[..., Path], tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLES / example), str(make_model()), str(tmp_path / "run")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [line for line in ended.stdout.splitlines() if line.startswith("step 3: reward")]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """run_example("plan_yaml.py", model): what an example writes to stdout and stderr, in this process."""

    def run(example: str, *arguments: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
        capsys.readouterr()
        ended = 0
        try:
            runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        except SystemExit as end:
            ended = int(end.code or 0)
        shown = capsys.readouterr()
        assert ended == code, shown.err
        return shown.out, shown.err

    return run


def test_every_example_says_how_it_is_run_and_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    for example in sorted(EXAMPLES.glob("*.py")):
        opening = example.read_text(encoding="utf-8").split('"""')[1]
        assert re.search(rf"(python|launch .*) examples/{example.name}", opening), f"{example.name} does not say it"
        assert f'"{example.name}"' in here


def test_device_map(run_example: Callable[..., tuple[str, str]]) -> None:
    shown, _ = run_example("device_map.py")
    # 7,615,616,512 parameters in two bytes and 512 bytes of rotary frequencies: 14.19 GiB, of which GPU 0 has 3.62.
    assert "14.19 GiB" in shown
    assert re.search(r"GPU 0 .* model\.embed_tokens.* 3\.62 GiB", shown)


def test_plan_yaml(
    run_example: Callable[..., tuple[str, str]], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(max_position_embeddings=2048)
    shown, _ = run_example("plan_yaml.py", model, tmp_path / "plan.yaml")
    assert shown.endswith("plan.yaml: it fits\n")
    made = Plan.load(tmp_path / "plan.yaml")
    assert made.roles["actor"].settings["gradient_checkpointing"] is True
    assert "gradient_checkpointing" not in made.roles["actor"].chosen


def test_ppo_fsdp_vllm(run_example: Callable[..., tuple[str, str]], make_model: Callable[..., Path]) -> None:
    model = make_model(max_position_embeddings=2048)
    shown, said = run_example("ppo_fsdp_vllm.py", model)
    first, *settings = shown.split(" \\\n    ")
    assert first == "python3 -m verl.trainer.main_ppo"
    assert {"actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.rollout.name=vllm"} <= set(settings)
    assert {"trainer.n_gpus_per_node=8", f"actor_rollout_ref.model.path={model}"} <= set(settings)
    assert f"{len(settings) - 2} settings checked" in said  # without those of the data
    assert "error:" not in said


def test_ppo_verl(
    run_example: Callable[..., tuple[str, str]],
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the start of Ray; a run with this runner is in tests/end_to_end."""
    trained: list[str] = []

    def train(trainer: PPOTrainer) -> list[dict[str, object]]:
        trained.append(trainer.runner)
        return [{"step": 1, "data": {"critic/score/mean": 0.25}}]

    monkeypatch.setattr(PPOTrainer, "train", train)
    shown, _ = run_example("ppo_verl.py", make_model(), tmp_path / "run")
    assert trained == ["verl"]
    assert shown.startswith("step 1: reward 0.250\nThe run is in ")


# On the CPU nothing is streamed; that a random policy's answer may be empty is said once.
@pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")
@pytest.mark.usefixtures("_no_group")
def test_reward_streamed(
    run_example: Callable[..., tuple[str, str]], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    judge = make_model("judge", task="SequenceClassification", num_labels=1, seed=1)
    shown, _ = run_example("reward_streamed.py", make_model(), judge, tmp_path / "run")
    assert [line for line in shown.splitlines() if line.startswith("step 3: reward")]


def test_resource_config(run_example: Callable[..., tuple[str, str]]) -> None:
    with pytest.warns(ShardNotice) as said:
        shown, _ = run_example("resource_config.py")
    assert re.search(r"GPU 2 +│ +reward ", shown)
    settings = shown.split("lengths:\n")[1].splitlines()
    assert {"trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.gpu_memory_utilization=0.85"} <= set(settings)
    assert any("takes no ids" in str(each.message) for each in said)
