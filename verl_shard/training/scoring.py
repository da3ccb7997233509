"""Scores samples as verl's reward manager does: the response as text, the row's ground truth, and what the reward says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_shard.training.rewards import Rewards
from verl_shard.verl_plugin.local.run import Sample, Score, Scored


def scorer(rewards: Rewards | None) -> Score:
    """The function that a local run scores with. None: verl's own rewards, by data_source."""

    def score(samples: Sequence[Sample], tokenizer: Any) -> list[Scored]:
        asked = [_asked(sample, tokenizer) for sample in samples]
        if rewards is not None:
            return [_scored(result) for result in rewards.compute_scores(asked)]
        from verl_shard.verl_plugin.local.default_reward import default_reward

        return [_scored(default_reward(**one)) for one in asked]

    return score


def _asked(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    """What verl's NaiveRewardManager.run_single hands to a reward."""
    row = sample.row
    return {
        "data_source": row["data_source"],
        "solution_str": tokenizer.decode(sample.response, skip_special_tokens=True),
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": {**row.get("extra_info", {}), "num_turns": 2, "rollout_reward_scores": {}},
    }


def _scored(result: Any) -> Scored:
    """What it makes of the reward's answer."""
    if isinstance(result, Mapping):
        return float(result["score"]), dict(result)
    return float(result), {"acc": result}
