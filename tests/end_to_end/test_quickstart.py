"""The quick start's command, from nothing to its report."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from verl_shard.cli.main import run
from verl_shard.common.files import read_json_lines
from verl_shard.config.run_folder import RunFolder, whole_checkpoints
from verl_shard.quickstart import prepare, warmup

pytestmark = pytest.mark.launch


def test_from_nothing_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "N_TRAIN", 128)
    monkeypatch.setattr(prepare, "N_VAL", 12)
    monkeypatch.setattr(warmup, "warm_up", functools.partial(warmup.warm_up, steps=3))
    folder = tmp_path / "run"
    arguments = ["quickstart", "--out", str(folder), "--steps", "2", "--save-freq", "1", "--seed", "5"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    # The map, the table, and the sentence.
    assert "model.layers.0-2" in printed
    assert "validation reward" in printed
    assert "2 steps of RL" in " ".join(printed.split())

    made = {path.name for path in folder.iterdir()}
    assert made >= {
        "run.json", "plan.yaml", "config.yaml", "overrides.txt", "metrics.jsonl", "memory.jsonl", "events.jsonl",
        "progress.png", "checkpoints", "data", "model",
    }  # fmt: skip
    assert (folder / "progress.png").read_bytes().startswith(b"\x89PNG")
    assert [record["step"] for record in read_json_lines(folder / "metrics.jsonl")] == [0, 1, 2]
    assert json.loads((folder / "run.json").read_text())["identity"]["seed"] == 5
    assert list(whole_checkpoints(folder / "checkpoints")) == [1, 2]
    assert [event["kind"] for event in read_json_lines(folder / "events.jsonl")] == [
        "launch", "first-step", "launch-ended", "finished",
    ]  # fmt: skip

    # All of it done, there is nothing to go on with, and nothing is started.
    assert run([*arguments, "--resume"]) == 2
    assert "Give --steps 3 or more to train on" in " ".join(capsys.readouterr().err.split())
    assert len(RunFolder(folder).launches()) == 1
