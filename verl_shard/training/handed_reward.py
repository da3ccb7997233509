"""The rewards of a run whose trainer is on Ray, in verl's reward worker: read from the run's folder.

A reward model is not loaded in each of verl's reward workers: those of a node share one copy, in a process of its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.errors import RunError
from verl_shard.common.files import write_whole
from verl_shard.common.manifest import SCHEMA
from verl_shard.common.notices import run_dir
from verl_shard.runtime.scoring_model import TRAINING
from verl_shard.training.reward_model import conversation
from verl_shard.training.rewards import Rewards, ScoreMany

FILE = "rewards.pkl"
MANIFEST = "rewards.manifest.json"
"""Says which FILE was written, as a checkpoint's manifest does: see common.manifest."""


def hand_over(rewards: Rewards, folder: Path) -> None:
    """Writes rewards and their hash where `compute_score` finds them. Functions of scripts and notebooks go by value."""
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
        content = cloudpickle.dumps(rewards)
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
    (folder / FILE).write_bytes(content)
    files = {FILE: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    write_whole(folder / MANIFEST, json.dumps({"schema": SCHEMA, "files": files}, indent=2) + "\n")


def read_handed(folder: Path) -> Rewards:
    """What `hand_over` wrote. Raises RunError, and loads nothing, unless the file is the one that its manifest names."""
    try:
        content = (folder / FILE).read_bytes()
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"][FILE]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _not_ours(folder, f"it or its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    # Of the bytes that are loaded: the file may change after it was looked at.
    if hashlib.sha256(content).hexdigest() != listed:
        raise _not_ours(folder, f"it is not the file that {MANIFEST} names")
    found = pickle.loads(content)
    assert isinstance(found, Rewards)
    return found


def _not_ours(folder: Path, why: str) -> RunError:
    return RunError(
        f"{folder / FILE} is not loaded: {why}, and loading it would run what is in it. Start the run again: that writes it anew"
    )


def on_this_node(path: str, settings: Mapping[str, Any]) -> ScoreMany:
    """A reward model in the one process of this node that has it."""
    from verl_shard.verl_plugin.reward.actor import NodeModel

    model = NodeModel(path, {**TRAINING, **settings})

    def score_many(asked: Sequence[tuple[Sequence[Any], str]]) -> list[float]:
        return model.score([conversation(messages, response) for messages, response in asked])

    return score_many


@functools.cache
def _rewards(folder: Path) -> Rewards:
    return Rewards(read_handed(folder).parts, models=on_this_node)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """verl's custom reward function."""
    folder = run_dir()
    if folder is None:
        raise RunError("this reward is for runs that PPOTrainer started: no run folder is named")
    return _rewards(folder).compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
