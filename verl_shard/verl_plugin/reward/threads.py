"""Threads of an actor that scores on the CPU: Ray gives one to whom it assigns no CPU, unless OMP_NUM_THREADS is set."""

from __future__ import annotations

import os

import torch

from verl_shard.common.notices import notice
from verl_shard.resources.limits import usable_cores
from verl_shard.runtime.scoring_model import ScoringModel
from verl_shard.verl_plugin.fork_server import LAUNCH_MARK


def take_cores(model: ScoringModel) -> int:
    """Lets a model on the CPU compute on all cores that this process may have; how many threads torch has then.

    To be called in the thread that scores, before it does: the number is a thread's own.
    A launch of ours says how many threads there are to be, and is left at that. Ray's one thread and a one that the user
    asked for cannot be told apart; no reward model is meant to score on one core of many.
    """
    threads = torch.get_num_threads()
    if threads > 1 or LAUNCH_MARK in os.environ or not any(d.type == "cpu" for d in model.devices):
        return threads
    if (cores := usable_cores()) == 1:
        return threads
    why = "that is what Ray sets for an actor without CPUs of its own, and the reward model computes on the CPU"
    notice("reward-threads", "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"), why, f"{cores} threads")
    torch.set_num_threads(cores)
    return cores
