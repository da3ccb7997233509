"""The rewards of a run whose trainer is on Ray, in verl's reward worker: read from the run's folder.

A reward model is not loaded in each of verl's reward workers: those of a node share one copy, in a process of its own.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.errors import RunError
from verl_shard.common.notices import run_dir
from verl_shard.runtime.scoring_model import TRAINING
from verl_shard.training.reward_model import conversation
from verl_shard.training.rewards import Rewards, ScoreMany

FILE = "rewards.pkl"


def hand_over(rewards: Rewards, folder: Path) -> None:
    """Writes rewards where `compute_score` finds them. Functions of scripts and notebooks go by value."""
    import sys

    import cloudpickle  # type: ignore[import-untyped]

    by_value = []
    for part in rewards.parts:
        module = sys.modules.get(getattr(part.source, "__module__", ""))
        file = getattr(module, "__file__", None) or ""
        if (
            module is not None
            and callable(part.source)
            and "site-packages" not in file
            and module.__name__ != "__main__"
        ):
            # A module beside the script cannot be imported by a worker, whose path is another.
            cloudpickle.register_pickle_by_value(module)
            by_value.append(module)
    try:
        (folder / FILE).write_bytes(cloudpickle.dumps(rewards))
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def on_this_node(path: str, settings: Mapping[str, Any]) -> ScoreMany:
    """A reward model in the one process of this node that has it."""
    from verl_shard.verl_plugin.reward.actor import NodeModel

    model = NodeModel(path, {**TRAINING, **settings})

    def score_many(asked: Sequence[tuple[Sequence[Any], str]]) -> list[float]:
        return model.score([conversation(messages, response) for messages, response in asked])

    return score_many


@functools.cache
def _rewards(folder: Path) -> Rewards:
    found = pickle.loads((folder / FILE).read_bytes())
    assert isinstance(found, Rewards)
    return Rewards(found.parts, models=on_this_node)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """verl's custom reward function."""
    folder = run_dir()
    if folder is None:
        raise RunError("this reward is for runs that PPOTrainer started: no run folder is named")
    return _rewards(folder).compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
