"""A local run: all that a step needs, made once from verl's configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tracking import Tracking

from verl_shard.common.files import write_whole
from verl_shard.verl_plugin.local import algorithm
from verl_shard.verl_plugin.local.batch import Batch, Sample
from verl_shard.verl_plugin.local.compose import compose_config
from verl_shard.verl_plugin.local.data import Prompts
from verl_shard.verl_plugin.local.group import Processes
from verl_shard.verl_plugin.local.rollout import Rollout
from verl_shard.verl_plugin.local.workers import Workers

Metrics = dict[str, Any]
Scored = tuple[float, dict[str, Any]]
"""A sample's score, and what else its reward said of it."""
Score = Callable[[Sequence[Sample], Any], list[Scored]]
"""Scores samples, given the tokenizer."""

__all__ = ["Batch", "LocalRun", "Metrics", "Sample", "Score", "Scored"]


@dataclass
class LocalRun:
    """verl's workers, prompts and rollout in this process, and where the run is. Use `start`.

    steps_done: optimizer steps behind it; total_steps: when it ends. timing: seconds by phase of the step under way.
    """

    config: Any
    processes: Processes
    workers: Workers
    rollout: Rollout
    prompts: Prompts
    score: Score
    tokenizer: Any
    log_file: Path
    steps_done: int = 0
    timing: dict[str, float] = field(default_factory=dict)
    working: bool = False
    """Whether a step is under way."""
    _tracking: Any = None

    @classmethod
    def start(cls, overrides: Sequence[str], processes: Processes, score: Score, log_file: Path) -> LocalRun:
        """Loads everything, from the checkpoint that the configuration names if it does. log_file: for verl's file logger."""
        config = compose_config(overrides)
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        prompts = Prompts(config, model.tokenizer, model.processor)
        with open_dict(config):
            # As PPOTrainer._init_dataloader does: schedules need to know the end.
            for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
                optim.total_training_steps = config.trainer.total_training_steps
        workers = Workers(config, processes)
        rollout = Rollout(config, model, processes)
        run = cls(config, processes, workers, rollout, prompts, score, model.tokenizer, log_file)
        run._kl_in_reward = algorithm.kl_controller(config)
        if config.trainer.resume_mode == "resume_path":
            run._load(Path(config.trainer.resume_from_path))
        rollout.set_steps_done(run.steps_done)
        return run

    _kl_in_reward: Any = None

    @property
    def total_steps(self) -> int:
        """The number of the last step."""
        return int(self.config.trainer.total_training_steps)

    def due(self, frequency: int) -> bool:
        """Whether something that happens every so many steps, and after the last, happens now."""
        return frequency > 0 and (self.steps_done % frequency == 0 or self.steps_done >= self.total_steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a phase of the step by verl's name for it."""
        began, outer = time.perf_counter(), self.working
        self.working = True
        try:
            yield
        finally:
            self.working = outer
        self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - began

    def scores(self, samples: Sequence[Sample]) -> list[Scored]:
        """The scores of all samples: each process scores its share."""
        mine = self.processes.share(samples)
        return self.processes.gather(lambda: self.score(mine, self.tokenizer))

    def advantages(self, batch: Batch) -> Metrics:
        """KL in the reward if it is there, advantages and returns."""
        return algorithm.compute_advantages(batch, self.config, self._kl_in_reward)

    def step_metrics(self, batch: Batch, metrics: Metrics) -> Metrics:
        """What verl logs of the step that has just ended."""
        shown = algorithm.step_metrics(
            batch,
            use_critic=self.workers.has_critic,
            timing=self.timing,
            processes=self.processes.size,
            gradient_norm=metrics.get("actor/grad_norm"),
        )
        place = {
            "training/global_step": self.steps_done,
            "training/epoch": (self.steps_done - 1) // self.prompts.steps_per_epoch,
        }
        return _plain({**metrics, **shown, **place})

    def validate(self) -> Metrics:
        """Scores of the responses to all validation prompts, in verl's metrics."""
        self.workers.take_over(self.steps_done)
        samples = self.rollout.generate(self.prompts.validation(), validate=True)
        scored = self.scores(samples)
        scores, infos = [score for score, _ in scored], [info for _, info in scored]
        return _plain(algorithm.validation_metrics(samples, scores, infos))

    def log(self, metrics: Metrics) -> None:
        """Gives metrics to verl's loggers, in the first process."""
        if not self.processes.first:
            return
        trainer = self.config.trainer
        if self._tracking is None:
            whole = OmegaConf.to_container(self.config, resolve=True)
            with _loggers_in(self.log_file):
                self._tracking = Tracking(trainer.project_name, trainer.experiment_name, trainer.logger, whole)
        self._tracking.log(data=metrics, step=self.steps_done)

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint as verl's trainer does, with WHOLE in it at the end."""
        checkpoints = Path(self.config.trainer.default_local_dir)
        folder = checkpoints / f"global_step_{self.steps_done}"
        self.workers.save(folder, self.steps_done)
        if self.processes.first:
            self.prompts.save(folder)
            write_whole(checkpoints / "latest_checkpointed_iteration.txt", str(self.steps_done))
            keeper = build_checkpoint_callback(self.config)
            keeper.on_save(trainer=None, global_step=self.steps_done, checkpoint_dir=str(folder))
        self.processes.gather(list)
        return folder

    def _load(self, folder: Path) -> None:
        self.steps_done = int(folder.name.removeprefix("global_step_"))
        self.workers.load(folder)
        self.prompts.load(folder)

    def close(self, *, failed: bool = False) -> None:
        """Ends what loggers hold open; to be called once, as verl's file logger begins its file anew."""
        if self._tracking is not None:
            self._tracking.finish(exit_code=int(failed))
            self._tracking = None


def _plain(metrics: Metrics) -> Metrics:
    """Numbers of NumPy and torch as Python's."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


@contextmanager
def _loggers_in(file: Path) -> Iterator[None]:
    """Where verl's file and tensorboard loggers write, which they read from the environment when they are made."""
    wanted = {"VERL_FILE_LOGGER_PATH": str(file)}
    if "TENSORBOARD_DIR" not in os.environ:
        wanted["TENSORBOARD_DIR"] = str(file.parent.parent / "tensorboard")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
