"""Runs of verl's own trainer on a tiny model. Each launch costs some fifteen seconds: at most eight in the whole test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_shard.config.run_folder import RunFolder
from verl_shard.planning.plan_file import write_plan
from verl_shard.quickstart.model import make_model
from verl_shard.training.data_of_tasks import write_data
from verl_shard.verl_plugin.fork_server import ForkServer, fork_server
from verl_shard.verl_plugin.launch import environment, run_verl
from verl_shard.verl_plugin.overrides import RunSettings, to_overrides


@pytest.fixture(scope="session")
def env() -> dict[str, str]:
    return environment(cpu=True, threads=1)


@pytest.fixture(scope="session")
def server(env: dict[str, str]) -> Iterator[ForkServer]:
    with fork_server(env) as running:
        yield running


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RunSettings:
    """Four steps of PPO on the quick start's tasks and untrained model, with small batches."""
    folder = tmp_path_factory.mktemp("inputs")
    files = write_data(folder / "data", seed=0, n_train=64, n_val=8)
    model = make_model(folder / "model", files, seed=0)
    entry = {"device_map": {"": "cpu"}, "precision": "fp32", "loads": {}}
    write_plan(folder / "plan.yaml", dict.fromkeys(("actor", "critic", "ref"), entry))
    return RunSettings(
        algorithm="ppo", model=model, train_files=(files.train,), val_files=(files.val,),
        reward="pkg://verl_shard.quickstart.reward:compute_score", plan=folder / "plan.yaml", checkpoints=Path("unset"),
        steps=4, seed=0, train_batch_size=4, n=2, mini_batch_size=4, micro_batch_size=4, max_prompt_length=96,
        max_response_length=12, actor_lr=1e-3, critic_lr=1e-3, kl_coef=0.01, test_freq=4, save_freq=2, cpu=True,
    )  # fmt: skip


Run = Callable[..., tuple[RunFolder, list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def run(env: dict[str, str], server: ForkServer, settings: RunSettings) -> Run:
    """Launches verl in a run folder and returns it with the metrics; more overrides and changed settings can be given."""

    def launch(
        path: Path, *extra: str, on_record: Callable[[dict[str, Any]], None] = lambda _: None, **changed: Any
    ) -> tuple[RunFolder, list[dict[str, Any]]]:
        folder = RunFolder(path) if (path / "run.json").exists() else RunFolder.start(path, {}, {})
        started = folder.new_launch()
        wanted = replace(settings, checkpoints=path / "checkpoints", resume_from=started.checkpoint, **changed)
        overrides = [*to_overrides(wanted, extra), f"hydra.run.dir={path / 'hydra'}"]
        run_verl(overrides, folder, env=env, launch=started, on_record=on_record, server=server)
        return folder, folder.metrics()

    return launch
