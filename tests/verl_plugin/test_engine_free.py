"""What a plan leaves free on each GPU bounds how many micro-batches the engine has in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verl_plugin.test_engine_batches import _batch, _engine, _gradients, _group, _laid_out, folder

from verl_shard.planning.plan_file import write_plan
from verl_shard.verl_plugin.engine_batches import MicroBatches

__all__ = ["_group", "folder"]


def test_what_a_plan_file_leaves_free_bounds_the_engine(folder: Path, tmp_path: Path) -> None:
    found = []
    for free in ({0: 2**30, 1: 2**30}, {0: 0, 1: 2**30}, {0: 2**30, 1: 0}):
        write_plan(tmp_path / "plan.yaml", {"actor": {"device_map": {"": "cpu"}, "precision": "fp32", "free": free}})
        engine = _engine(folder, plan=str(tmp_path / "plan.yaml"))
        with _laid_out(engine):
            _gradients(engine, _batch(1))
        found.append(engine._batches().most)
    # One for each GPU; nothing beside the one that was planned; as many as leave the last GPU with one.
    assert found == [2, 1, 2]


def test_the_share_of_logits_is_asked_once_for_a_mini_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, traced = [], []
    trace = MicroBatches._trace

    def share(self: MicroBatches, data: Any, loss_function: Any) -> float:
        asked.append(len(data))
        return 0.75

    def traces(self: MicroBatches, tokens: Any, packed: bool, logits: float) -> Any:
        traced.append(logits)
        return trace(self, tokens, packed, logits)

    monkeypatch.setattr(MicroBatches, "share_of_logits", share)
    monkeypatch.setattr(MicroBatches, "_trace", traces)
    free = {0: 2**30, 1: 2**30}
    write_plan(tmp_path / "plan.yaml", {"actor": {"device_map": {"": "cpu"}, "precision": "fp32", "free": free}})
    engine = _engine(folder, plan=str(tmp_path / "plan.yaml"))
    with _laid_out(engine):
        _gradients(engine, _batch(1))
    assert (len(asked), traced) == (1, [0.75])
