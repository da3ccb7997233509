"""What a plan leaves free on each GPU bounds how many micro-batches the engine has in flight."""

from __future__ import annotations

from pathlib import Path

from verl_plugin.test_engine_batches import _batch, _engine, _gradients, _group, _laid_out, folder

from verl_shard.planning.plan_file import write_plan

__all__ = ["_group", "folder"]


def test_what_a_plan_file_leaves_free_bounds_the_engine(folder: Path, tmp_path: Path) -> None:
    found = []
    for free in ({0: 2**30, 1: 2**30}, {0: 0, 1: 2**30}, {0: 2**30, 1: 0}):
        write_plan(tmp_path / "plan.yaml", {"actor": {"device_map": {"": "cpu"}, "precision": "fp32", "free": free}})
        engine = _engine(folder, plan=str(tmp_path / "plan.yaml"))
        with _laid_out(engine):
            _gradients(engine, _batch(1))
        found.append(engine._batches().most)
    # Two for each GPU; nothing beside the one that was planned; as many as leave the last GPU with one.
    assert found == [4, 1, 2]
