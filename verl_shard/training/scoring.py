"""Scores samples as verl's reward manager does: the response as text, the row's ground truth, and what the reward says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_shard.training.rewards import Rewards
from verl_shard.verl_plugin.local.run import Sample, Score, Scored


def scorer(rewards: Rewards | None) -> Score:
    """The function that a local run scores with. None: verl's own rewards, by data_source."""
    compute: Callable[..., Any]
    if rewards is None:
        from verl_shard.verl_plugin.local.default_reward import default_reward as compute
    else:
        compute = rewards.compute_score

    def score(samples: Sequence[Sample], tokenizer: Any) -> list[Scored]:
        return [_scored(compute, sample, tokenizer) for sample in samples]

    return score


def _scored(compute: Callable[..., Any], sample: Sample, tokenizer: Any) -> Scored:
    """Mirrors verl's NaiveRewardManager.run_single."""
    row = sample.row
    result = compute(
        data_source=row["data_source"],
        solution_str=tokenizer.decode(sample.response, skip_special_tokens=True),
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info={**row.get("extra_info", {}), "num_turns": 2, "rollout_reward_scores": {}},
    )
    if isinstance(result, Mapping):
        return float(result["score"]), dict(result)
    return float(result), {"acc": result}
