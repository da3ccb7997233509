"""verl's worker in a process without Ray."""

from __future__ import annotations

import os

import pytest
import ray
import torch
from verl.single_controller.base.worker import Worker

from verl_shard.verl_plugin.stock_engine import one_process

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.mark.filterwarnings("ignore")
def test_a_worker_asks_ray_for_nothing_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this variable, which our engine's users set, verl's worker takes its GPU from Ray; with a rank of another launch it
    would look for the others."""
    monkeypatch.setattr(ray, "get_runtime_context", _no_ray)  # it would start one
    for name, value in {
        NOSET: "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LookupError, match="no Ray"):
        Worker()
    with one_process("cpu"):
        assert (Worker().rank, Worker().world_size, torch.distributed.get_world_size()) == (0, 1, 1)
    assert [os.environ[name] for name in (NOSET, "RANK", "WORLD_SIZE")] == ["1", "3", "4"]


def _no_ray() -> None:
    raise LookupError("there is no Ray")
