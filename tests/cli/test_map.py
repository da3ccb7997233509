"""verl-shard map: a table, JSON, a picture, and one message for what is wrong."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from verl_shard.cli.main import run
from verl_shard.mapping.device_map import DeviceMap


@pytest.fixture
def folder(tmp_path: Path, small_config: Any) -> str:
    small_config("llama").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_table(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["map", folder, "--gpus", "2"]) == 0
    printed = capsys.readouterr().out
    assert "GPU 0" in printed
    assert "GPU 1" in printed
    assert "holds" in printed


def test_json_is_what_the_function_gives(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "map.json"
    argv = ["map", folder, "--devices", "2,5", "--purpose", "training", "--seq-len", "32", "--batch-size", "2"]
    assert run([*argv, "--gradient-checkpointing", "--json", "--save", str(saved)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == "verl_shard/device_map/1"
    assert printed["counts"] == "peak of training (2 x 32 tokens, bf16-mixed, adamw, gradient checkpointing)"
    assert DeviceMap.from_dict(printed) == DeviceMap.load(saved)
    assert set(DeviceMap.from_dict(printed).loads) == {2, 5}


def test_a_picture(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(["map", folder, "--gpus", "2", "--picture", str(tmp_path / "map.png")]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "Picture: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--gpus", "2", "--gpu-memory", "1KB"], "does not fit"),
        (["--gpus", "2", "--gpu-memory", "1GB,2GB,3GB"], "3 sizes for 2 GPUs"),
        (["--gpus", "0"], "a model needs at least one GPU"),
        (["--gpus", "2", "--purpose", "fun"], '"inference" or "training"'),
        (["--gpus", "2", "--optimizer", "sgd"], 'use purpose="training"'),
        (["--gpus", "2", "--gpu-memroy", "1GB"], "No such option: --gpu-memroy"),
    ],
)
def test_what_is_wrong(extra: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["map", folder, *extra]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["map", "./nowhere", "--gpus", "2"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_notice_is_a_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(["map", folder, "--gpus", "8"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("notice: n_gpus = 8: ")
    assert ".py:" not in said
