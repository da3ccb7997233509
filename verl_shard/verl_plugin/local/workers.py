"""verl's training workers in this process: what its trainer on Ray asks of them, as plain calls on a whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import value_loss

from verl_shard.verl_plugin.engine import ENGINES
from verl_shard.verl_plugin.local.batch import Batch
from verl_shard.verl_plugin.local.group import Processes, worker_environment

Metrics = dict[str, Any]


class Workers:
    """Actor, and critic and reference where the algorithm has them. Mirrors the methods of verl's PPOTrainer by name."""

    def __init__(self, config: Any, processes: Processes) -> None:
        self.config, self.processes = config, processes
        lora = config.actor_rollout_ref.model
        self.ref_in_actor = lora.get("lora_rank", 0) > 0 or lora.get("lora_adapter_path") is not None
        self.has_critic, self.has_ref = bool(need_critic(config)), bool(need_reference_policy(config))
        ENGINES.clear()
        # verl's workers rename keys of what they are given.
        with worker_environment(processes):
            self._critic = _make_critic(deepcopy(config.critic)) if self.has_critic else None
            self._ref = _make(config, "ref") if self.has_ref and not self.ref_in_actor else None
            self._actor = _make(config, "actor")
        self._engines = dict(ENGINES)

    @property
    def actor_module(self) -> torch.nn.Module:
        """The model that is trained, and that generates."""
        module: torch.nn.Module = self._engines["actor"].module
        return module

    def compute_old_log_prob(self, batch: Batch) -> Metrics:
        """Adds old_log_probs, and says how they differ from what the rollout had."""
        actor = self.config.actor_rollout_ref.actor
        output = self._infer(self._actor.compute_log_prob, batch, calculate_entropy=True)
        batch.set_responses("old_log_probs", output["log_probs"])
        batch.set_responses("entropy", output["entropy"])
        data = batch.padded("old_log_probs", "entropy", "response_mask", "responses", "rollout_log_probs")
        entropy = agg_loss(
            loss_mat=data.batch["entropy"],
            loss_mask=data.batch["response_mask"],
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        )
        metrics = {"actor/entropy": entropy.item()}
        del batch.columns["entropy"]
        return metrics | (calculate_debug_metrics(data) if "rollout_log_probs" in batch.columns else {})

    def compute_ref_log_prob(self, batch: Batch) -> None:
        """Adds ref_log_prob. With LoRA the reference is the actor without its adapters."""
        if self._ref is not None:
            output = self._infer(self._ref.compute_ref_log_prob, batch, calculate_entropy=False)
        else:
            output = self._infer(self._actor.compute_log_prob, batch, calculate_entropy=False, no_lora_adapter=True)
        batch.set_responses("ref_log_prob", output["log_probs"])

    def compute_values(self, batch: Batch) -> None:
        """Adds the critic's values."""
        assert self._critic is not None
        batch.set_responses("values", self._infer(self._critic.infer_batch, batch)["values"])

    def update_critic(self, batch: Batch) -> Metrics:
        """Trains the critic on the batch."""
        assert self._critic is not None
        return self._train(self._critic.train_mini_batch, batch, self.config.critic, "critic")

    def update_actor(self, batch: Batch) -> Metrics:
        """Trains the actor on the batch."""
        actor = self.config.actor_rollout_ref.actor
        entropy = actor.calculate_entropy or actor.entropy_coeff != 0.0
        more = {"calculate_entropy": entropy, "distillation_use_topk": False, "distillation_only": False}
        return self._train(self._actor.update_actor, batch, actor, "actor", **more)

    def move(self, role: str, where: Mapping[str, Any] | Sequence[Any], links: Any = None) -> None:
        """Lays actor, critic or ref over the devices of a map, or copies of a ref on each of some, between two steps. Raises as
        move_model, before anything moves."""
        self._engines[role].move(where, links=links)

    def take_over(self, step: int) -> None:
        """The rollout generates on this run's actor from now on, also where another run was made in this process since.

        step: the one that is being worked on, for the memory record.
        """
        ENGINES.clear()
        ENGINES.update(self._engines)
        ENGINES["actor"].step = step

    def save(self, folder: Path, step: int) -> None:
        """Writes the checkpoints of actor and critic, in verl's layout."""
        self._actor.save_checkpoint(str(folder / "actor"), None, step)
        if self._critic is not None:
            self._critic.save_checkpoint(str(folder / "critic"), None, step)

    def load(self, folder: Path) -> None:
        """Restores actor and critic: weights, optimizers and schedules."""
        self._actor.load_checkpoint(str(folder / "actor"))
        if self._critic is not None:
            self._critic.load_checkpoint(str(folder / "critic"))

    def _infer(self, call: Any, batch: Batch, **more: Any) -> dict[str, Sequence[torch.Tensor]]:
        """The outputs for the whole batch: each process has its share computed and gives it to the others."""
        mine = self.processes.share(range(len(batch)))
        temperature = self.config.actor_rollout_ref.rollout.temperature
        output = call(batch.rows(mine, {"compute_loss": False, "temperature": temperature, **more}))
        names = [name for name in ("log_probs", "entropy", "values") if name in output]
        parts = {name: output[name].unbind() for name in names}
        rows = [{name: part[i] for name, part in parts.items()} for i in range(len(mine))]
        if self.processes.size > 1:
            rows = self.processes.gather(lambda: rows)
        return {name: [row[name] for row in rows] for name in names}

    def _train(self, call: Any, batch: Batch, config: Any, role: str, **more: Any) -> Metrics:
        rollout = self.config.actor_rollout_ref.rollout
        # The engine's micro-batches are of this process, its mini-batches of all.
        mini_batch = config.ppo_mini_batch_size * rollout.n
        settings = {
            "global_batch_size": mini_batch,
            "mini_batch_size": mini_batch,
            "epochs": config.ppo_epochs,
            "seed": config.data_loader_seed,
            "dataloader_kwargs": {"shuffle": config.shuffle},
            "temperature": rollout.temperature,
            **more,
        }
        output = call(batch.rows(self.processes.share(range(len(batch))), settings))
        metrics: Metrics = rename_dict(output["metrics"], f"{role}/")
        metrics[f"perf/mfu/{role}"] = metrics.pop(f"{role}/mfu")
        reduced: Metrics = reduce_metrics(metrics)
        return reduced


def _make(config: Any, role: str) -> Any:
    worker = ActorRolloutRefWorker(config=deepcopy(config.actor_rollout_ref), role=role)
    worker.init_model()
    return worker


def _make_critic(config: Any) -> Any:
    """As PPOTrainer._setup makes it."""
    OmegaConf.set_struct(config, False)
    critic = omega_conf_to_dataclass(config)
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    profiler = config.get("profiler", {})
    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
            profiler_config=omega_conf_to_dataclass(profiler) if profiler else None,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    return worker
