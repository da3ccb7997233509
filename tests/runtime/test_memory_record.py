"""memory.jsonl: a line for each phase, whatever becomes of it."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
import torch

from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.runtime.memory_record import host_peak, record_memory
from verl_shard.runtime.oom_report import report_out_of_memory


def test_a_phase_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with record_memory("actor", "train", 7):
        time.sleep(0.05)
    (line,) = read_json_lines(tmp_path / "memory.jsonl")
    assert (line["role"], line["phase"], line["step"], line["pid"], line["gpus"]) == (
        "actor",
        "train",
        7,
        os.getpid(),
        {},
    )
    assert 0.05 <= line["seconds"] < 5
    assert 0 < line["host_peak"] <= host_peak()


def test_a_phase_that_fails_is_a_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(ZeroDivisionError), record_memory("actor", "train", 1):
        raise ZeroDivisionError
    assert len(list(read_json_lines(tmp_path / "memory.jsonl"))) == 1


def test_each_gpu_has_its_own_peak_from_the_beginning_of_the_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset: list[int] = []
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    for index, name in enumerate(("memory_allocated", "max_memory_allocated", "max_memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, lambda gpu, index=index: 100 * gpu + index)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1000 - gpu, 5000))
    with record_memory("rollout", "generate", 2):
        assert reset == [0, 1]
    (line,) = read_json_lines(tmp_path / "memory.jsonl")
    assert line["gpus"] == {
        "0": {"allocated": 0, "peak": 1, "peak_reserved": 2, "used": 4000},
        "1": {"allocated": 100, "peak": 101, "peak_reserved": 102, "used": 4001},
    }


def test_a_gpu_of_other_processes_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's answer about a GPU makes a context there."""
    asked: list[int] = []
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: None)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda gpu: 7 * gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: asked.append(gpu) or (1, 10))
    with record_memory("actor", "train", 1):
        pass
    (line,) = read_json_lines(tmp_path / "memory.jsonl")
    assert {gpu: sizes.get("used") for gpu, sizes in line["gpus"].items()} == {"0": None, "1": 9}
    report = report_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."), torch.nn.Linear(1, 1), "update_actor")
    assert report.gpus == {1: {"allocated": 7, "reserved": 7, "free": 1}}
    assert asked == [1, 1]


def test_outside_a_run_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    with record_memory("actor", "train", 1):
        pass
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "gone"))
    with record_memory("actor", "train", 1):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_host_peak_is_in_bytes() -> None:
    before = host_peak()
    held = torch.ones(2**25, dtype=torch.float32)
    with open("/proc/self/status") as status:
        high = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    assert host_peak() >= before
    assert abs(host_peak() - high) < 2**24
    assert held[-1] == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 >= 2**27
