"""A reward model in this process: what training adds to a ScoringModel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from verl_shard.common.errors import RunError
from verl_shard.common.notices import ShardNotice
from verl_shard.training.reward_model import RewardModel

MESSAGES = [{"role": "user", "content": "w10 w11"}]


def _plain(folder: Path, ids: list[int]) -> float:
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(judge(torch.tensor([ids])).logits)


def test_it_scores_the_whole_conversation(make_model: Callable[..., Path]) -> None:
    folder = make_model("judge", task="SequenceClassification", num_labels=1)
    made = RewardModel(str(folder), dtype="float32")
    one, two = _plain(folder, [10, 11, 12]), _plain(folder, [10, 11, 13, 14])
    assert made.score(MESSAGES, "w12") == pytest.approx(one, abs=1e-6)
    assert made.score_many([(MESSAGES, "w13 w14"), (MESSAGES, "w12")]) == pytest.approx([two, one], abs=1e-6)


def test_an_empty_response_is_part_of_training_unless_it_is_not_wanted(make_model: Callable[..., Path]) -> None:
    folder = make_model("judge", task="SequenceClassification", num_labels=1)
    with pytest.warns(ShardNotice, match="the policy ended at once"):
        found = RewardModel(str(folder), dtype="float32").score(MESSAGES, "")
    assert found == pytest.approx(_plain(folder, [10, 11]), abs=1e-6)
    with pytest.raises(RunError, match="is empty"):
        RewardModel(str(folder), dtype="float32", empty_response="stop").score(MESSAGES, "")
