"""PPOTrainer with both of its runners: the same metrics, and one goes on where the other stopped."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from verl_shard import PPOTrainer
from verl_shard.verl_plugin.overrides import RunSettings

pytestmark = pytest.mark.launch

# verl measures these, so that no two runs have the same; the rest are of asynchronous training.
MEASURED = ("timing_", "perf/", "actor/perf/", "critic/perf/", "training/off_policy/")
# Small differences of numbers around 1, of which rounding leaves fewer digits: means of whitened advantages, one minus a
# ratio of variances.
AROUND_ONE = ("critic/advantages/mean", "critic/vf_explained_var", "actor/pg_loss", "actor/loss")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, here as on Ray: quicker for so small a model. What a trainer leaves in the process is taken away."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("VERL_SHARD_RUN_DIR", "VERL_PLATFORM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def reward(prompt: str, response: str) -> float:
    """Deterministic, and different for most responses. Handed to Ray's workers by value."""
    return len(set(response)) / (1 + len(response)) + 0.01 * len(prompt)


def compared(records: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    return {
        record["step"]: {name: value for name, value in record["data"].items() if not name.startswith(MEASURED)}
        for record in records
    }


def assert_same(found: dict[str, float], expected: dict[str, float], step: int) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if math.isnan(value):
            assert math.isnan(found[name]), (step, name)
        else:
            tolerance = 1e-6 if name.startswith(AROUND_ONE) else 0.0
            assert found[name] == pytest.approx(value, rel=1e-4, abs=tolerance), (step, name)


def test_both_runners_do_the_same(settings: RunSettings, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "actor_model": settings.model, "reward_model": reward, "train_data": settings.train_files[0],
        "val_data": settings.val_files[0], "progress": False,
        "generation_config": {"max_new_tokens": 12, "batch_size": 4, "top_p": 0.95},
        "ppo_config": {
            "steps": 5, "batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 2, "n": 2, "lr": 1e-3, "critic_lr": 1e-3,
            "kl_coef": 0.05, "max_epochs": 2, "seed": 3, "test_freq": 5, "save_freq": 3,
        },
    }  # fmt: skip
    heard: list[int] = []
    ray = PPOTrainer(
        **common, runner="verl", output_dir=tmp_path / "ray", callbacks=[lambda _, step, metrics: heard.append(step)]
    )
    expected = compared(ray.train())
    assert sorted(expected) == [0, 1, 2, 3, 4, 5]
    assert heard == [1, 2, 3, 4, 5]
    assert expected[5]["actor/grad_norm"] > 0

    local = PPOTrainer(**common, output_dir=tmp_path / "local")
    found = compared(local.train())
    assert sorted(found) == sorted(expected)
    for step, metrics in expected.items():
        assert_same(found[step], metrics, step)

    # Their weights are the same too, each saved as it says.
    on_ray, here = (
        transformers.AutoModelForCausalLM.from_pretrained(trainer.save(tmp_path / name)).state_dict()
        for trainer, name in ((ray, "saved-ray"), (local, "saved-here"))
    )
    before = transformers.AutoModelForCausalLM.from_pretrained(settings.model).state_dict()
    moved = {name: (weight - before[name]).norm() for name, weight in here.items()}
    assert all(size > 0 for size in moved.values())
    for name, weight in here.items():
        assert (on_ray[name] - weight).norm() < 0.01 * moved[name], name

    # From the checkpoint that verl's trainer wrote after three steps, here.
    shutil.rmtree(tmp_path / "ray" / "checkpoints" / "global_step_5")
    anew: list[int] = []
    resumed = PPOTrainer(
        **common, output_dir=tmp_path / "ray", resume=True, callbacks=[lambda _, step, metrics: anew.append(step)]
    )
    again = compared(resumed.train())
    assert sorted(again) == sorted(expected)
    assert anew == [4, 5]
    for step in (4, 5):
        assert_same(again[step], expected[step], step)
