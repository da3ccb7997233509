"""The arithmetic of a step between the models: verl's own functions on the whole batch."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
    process_validation_metrics,
)
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from verl_shard.verl_plugin.local.batch import Batch, Sample, lengths_of

Metrics = dict[str, Any]


def kl_controller(config: Any) -> Any:
    """verl's controller of the KL's weight in the reward; None when the KL is not in the reward."""
    algorithm = config.algorithm
    return core_algos.get_kl_controller(algorithm.kl_ctrl) if algorithm.use_kl_in_reward else None


def compute_advantages(batch: Batch, config: Any, kl_in_reward: Any) -> Metrics:
    """Adds token_level_rewards, advantages and returns. Mirrors PPOTrainer._compute_advantage."""
    algorithm, metrics = config.algorithm, {}
    data = batch.padded("response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
    data.batch["token_level_scores"] = data.batch["rm_scores"]
    added = ["advantages", "returns"]
    if kl_in_reward is not None:
        data, metrics = apply_kl_penalty(data, kl_ctrl=kl_in_reward, kl_penalty=algorithm.kl_penalty)
        added.append("token_level_rewards")
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    correction = algorithm.get("rollout_correction", None)
    if correction is not None and "rollout_log_probs" in data.batch:
        data, corrected = compute_rollout_correction_and_add_to_batch(data, correction)
        metrics |= corrected
        added += ["response_mask", *(name for name in ["rollout_is_weights"] if name in data.batch)]
    data = compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    for name in added:
        batch.set_padded(name, data.batch[name])
    return metrics


def step_metrics(
    batch: Batch, *, use_critic: bool, timing: dict[str, float], processes: int, gradient_norm: float | None
) -> Metrics:
    """What verl logs of a step beside what its workers say. Mirrors PPOTrainer._compute_metrics.

    timing: seconds by phase. processes: by how many the throughput is divided, as verl divides it by its own.
    """
    data = batch.padded(
        "prompts", "responses", "response_mask", "values", "advantages", "returns", "rm_scores", "token_level_rewards"
    )
    data.batch["token_level_scores"] = data.batch["rm_scores"]
    if "token_level_rewards" not in data.batch:
        data.batch["token_level_rewards"] = data.batch["rm_scores"]
    for name in ("prompt", "response"):
        data.batch[f"{name}_length"] = lengths_of(batch.columns[f"{name}s"]).float()
    lengths = lengths_of(batch.columns["input_ids"]).tolist()
    data.meta_info["global_token_num"] = lengths
    # One user turn and one answer.
    data.non_tensor_batch["__num_turns__"] = np.full(len(batch), 2, dtype=np.int32)
    metrics: Metrics = compute_data_metrics(batch=data, use_critic=use_critic)
    metrics |= compute_timing_metrics(batch=data, timing_raw=timing)
    metrics |= compute_throughout_metrics(batch=data, timing_raw=timing, n_gpus=processes)
    metrics |= compute_variance_proxy_metrics(batch=data, gradient_norm=gradient_norm)
    metrics |= {f"training/num_turns/{which}": 2 for which in ("mean", "max", "min")}
    share = get_seqlen_balanced_partitions(calculate_workload(torch.tensor(lengths)), k_partitions=1, equal_size=True)
    metrics |= log_seqlen_unbalance(seqlen_list=lengths, partitions=share, prefix="global_seqlen")
    return metrics


def validation_metrics(samples: list[Sample], scores: list[float], infos: list[dict[str, Any]]) -> Metrics:
    """verl's metrics of a validation, by data source. Mirrors PPOTrainer._val_metrics_update."""
    sources = [str(sample.row.get("data_source", "unknown")) for sample in samples]
    columns: dict[str, list[Any]] = {"reward": scores}
    for name in dict.fromkeys(name for info in infos for name in info):
        columns[name] = [info.get(name) for info in infos]
    uids = [sample.uid for sample in samples]
    metrics: Metrics = {f"val-aux/num_turns/{which}": 2 for which in ("mean", "max", "min")}
    with warnings.catch_warnings():
        # A single sample of a prompt has no spread.
        warnings.simplefilter("ignore", RuntimeWarning)
        by_source = process_validation_metrics(
            sources, uids, columns, expected_acc_counts=dict(Counter(zip(sources, uids, strict=True)))
        )
    for source, by_name in by_source.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, values in by_name.items():
            most = max(int(metric.split("@")[-1].split("/")[0]) for metric in values)
            for metric, value in values.items():
                is_core = name == core and metric.startswith(("mean", "maj", "best")) and f"@{most}" in metric
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{metric}"] = value
    return metrics
