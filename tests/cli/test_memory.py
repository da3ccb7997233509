"""verl-shard memory"""

import json
from pathlib import Path

import pytest
import typer
from diagnosis.test_memory_timeline import record

from verl_shard.cli import memory
from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import record_event
from verl_shard.runtime.oom_report import LiveTensor, OutOfMemoryReport

app = typer.Typer()
memory.add_to(app)
app.callback()(lambda: None)


def call(*arguments: object) -> None:
    app([str(argument) for argument in ("memory", *arguments)], standalone_mode=False)


def test_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 1, "actor", "train", 10, 5, {0: 3 * 2**30})
    call(tmp_path, "--picture", tmp_path / "memory.png")
    shown = capsys.readouterr().out
    assert "update_actor" in shown
    assert "3.00 GiB" in shown
    assert "says where models are" in shown
    assert (tmp_path / "memory.png").stat().st_size > 1000
    call(tmp_path, "--json")
    (row,) = json.loads(capsys.readouterr().out)["phases"]
    assert row == {
        "phase": "update_actor", "gpu": 0, "times": 1, "peak": 3 * 2**30, "reserved": 3 * 2**30 + 5, "planned": None, "off": None,
    }  # fmt: skip


def test_what_was_there_when_memory_ran_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 1, "actor", "train", 10, 5, {0: 3 * 2**30})
    largest = (LiveTensor("", (4096, 152064), "bfloat16", "cuda:0", 4096 * 152064 * 2, 3),)
    sizes = {0: {"allocated": 75 * 2**30, "reserved": 78 * 2**30, "free": 2**28}}
    report = OutOfMemoryReport("update_actor", "Tried to allocate 2 GiB", "lm_head", largest, sizes, planned=60 * 2**30)
    record_event("out-of-memory", folder=tmp_path, **report.to_dict())
    call(tmp_path)
    shown = capsys.readouterr().out
    assert "Out of memory, 1: update_actor: Tried to allocate 2 GiB.\nComputing: lm_head." in shown
    assert "GPU 0: 75.00 GiB allocated, 78.00 GiB reserved, 256.00 MiB free." in shown
    assert "The plan expected at most 60.00 GiB in this pass." in shown
    assert "3.48 GiB: 3 x [4096, 152064] bfloat16 on cuda:0, a tensor that is no weight" in shown


def test_a_run_without_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 1, "actor", "train", 10, 5, {})
    call(tmp_path)
    assert "a process held at most 1.00 GiB. No GPU was used." in capsys.readouterr().out
    with pytest.raises(ConfigError, match="used no GPU"):
        call(tmp_path, "--snapshot")
    assert not (tmp_path / "snapshot.request").exists()
    with pytest.raises(ConfigError, match="no run's folder"):
        call(tmp_path / "absent")
