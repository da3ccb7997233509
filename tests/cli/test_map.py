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
        (["--gpus", "1", "--gpu-memory", "1GiB", "--batch-size", "40000", "--seq-len", "2048"], "does not fit"),
        (["--gpus", "2", "--gpu-memory", "1GiB,2GiB,3GiB"], "3 sizes for 2 GPUs"),
        (
            ["--gpus", "2", "--gpu-memory", "80"],
            "--gpu-memory = 80: less than 1 GiB holds no model that is trained. Give its size, such as 80GiB.",
        ),
        (["--gpus", "2", "--gpu-memory", "80 GB,x"], "--gpu-memory = x: not a number of bytes"),
        (["--gpus", "0"], "--gpus = 0: a model needs at least one GPU. Give 1 or more"),
        (["--gpus", "3", "--devices", "0,1"], "--gpus is 3 and 2 devices are named. Leave --gpus out."),
        (["--gpus", "2", "--purpose", "fun"], '--purpose = fun: not a purpose. Use "inference" or "training".'),
        (
            ["--gpus", "2", "--optimizer", "sgd"],
            "which --purpose inference counts. Leave it out, or use --purpose training.",
        ),
        (["--gpus", "2", "--batch-size", "4"], "Give --seq-len too"),
        (["--gpus", "2", "--gpu-memroy", "1GB"], "No such option: --gpu-memroy"),
    ],
)
def test_what_is_wrong(extra: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["map", folder, *extra]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""


def test_without_a_gpu_the_flag_is_named(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run(["map", folder]) == 2
    assert capsys.readouterr().err == (
        "error: --gpus: torch sees no GPU on this machine. Say how many to plan for, such as --gpus 4; or map to the CPU with "
        "--devices cpu.\n"
    )


def test_all_that_is_wrong_is_said_at_once(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = ["--gpus", "0", "--gpu-memory", "80", "--optimizer", "sgd", "--task", "fun"]
    assert run(["map", folder, *wrong, "--save", str(tmp_path / "absent" / "map.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" = ")[0] for line in captured.err.splitlines()] == [
        "error: --save", "error: --gpus", "error: --gpu-memory", "error: --optimizer", "error: --task",
    ]  # fmt: skip


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
