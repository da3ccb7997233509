"""Snapshots are taken of one step, when they are asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from verl_shard.runtime import snapshots
from verl_shard.runtime.snapshots import ask_for_snapshot, snapshot_if_asked


def test_one_step_is_recorded_for_each_time_of_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **given: recording.append(given.get("enabled", True))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).touch())
    monkeypatch.setattr(snapshots, "_step", None)

    def phases(step: int) -> None:
        for role, phase in (("rollout", "generate"), ("actor", "train")):
            with snapshot_if_asked(tmp_path, role, phase, step):
                pass

    phases(1)
    assert recording == []
    ask_for_snapshot(tmp_path)
    phases(2)
    assert recording == [True, None, True, None]
    phases(3)
    names = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "snapshots").iterdir())
    assert names == ["step2-generate-rollout", "step2-train-actor"]
    ask_for_snapshot(tmp_path)
    phases(4)
    assert len(list((tmp_path / "snapshots").iterdir())) == 4


def test_nothing_is_recorded_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("a GPU is in use")
    ask_for_snapshot(tmp_path)
    with snapshot_if_asked(tmp_path, "actor", "train", 1):
        pass
    assert not (tmp_path / "snapshots").exists()
