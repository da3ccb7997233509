"""A launch of verl's main program for PPOTrainer, and the model that its last checkpoint holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl_shard.common.errors import config_error
from verl_shard.config.run_folder import Launch, RunFolder, whole_checkpoints
from verl_shard.resources.limits import usable_cores
from verl_shard.training.callbacks import progress_line
from verl_shard.training.handed_reward import hand_over as hand_over

Metrics = dict[str, Any]
REWARD = "pkg://verl_shard.training.handed_reward:compute_score"


def run_launch(
    run: RunFolder,
    launch: Launch,
    overrides: Sequence[str],
    *,
    cpu: bool,
    on_record: Callable[[Metrics], None],
    on_look: Callable[[], None],
    steps: int,
    shown: bool,
) -> list[Metrics]:
    """Runs verl to its end, or until one of the two raises; returns what it logged. on_record hears of each line of metrics,
    on_look is called several times a second after it."""
    from verl_shard.verl_plugin.fork_server import can_fork, fork_server
    from verl_shard.verl_plugin.launch import environment, run_verl

    # Its processes compute in turn, so each may have all cores.
    env = environment(cpu=cpu, threads=int(os.environ.get("OMP_NUM_THREADS") or usable_cores()))
    env.setdefault("TENSORBOARD_DIR", str(run.path / "tensorboard"))
    (run.path / "overrides.txt").write_text("\n".join(overrides) + "\n", encoding="utf-8")
    hydra = [f"hydra.run.dir={run.path / 'launches' / f'{launch.number}.hydra'}", "hydra.output_subdir=."]
    with ExitStack() as stack:
        line = stack.enter_context(progress_line(steps, shown=shown))
        server = stack.enter_context(fork_server(env)) if cpu and can_fork() else None

        def heard(record: Metrics) -> None:
            line.show(record["step"], record["data"])
            on_record(record)

        run_verl(
            [*overrides, *hydra], run, env=env, launch=launch, on_record=heard, on_look=on_look, server=server
        )  # fmt: skip
    return launch.records()


def model_of_checkpoint(checkpoints: Path, actor: str, *, lora: bool) -> Any:
    """The actor of the last whole checkpoint. actor: what it was trained from."""
    import torch

    from verl_shard.runtime.load import load_sharded

    found = whole_checkpoints(checkpoints)
    if not found or lora:
        why = "the run has no checkpoint" if not found else "its checkpoints hold adapters"
        raise config_error("nothing-to-save", "save", None, why, "Set ppo_config['save_freq'], or use runner='local'")
    folder = found[max(found)]
    model = load_sharded(actor, "cpu", task="causal-lm", dtype="float32", attn_implementation="sdpa")
    weights = torch.load(folder / "actor" / "model_world_size_1_rank_0.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    return model
