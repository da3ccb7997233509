from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from verl_shard.cli import explain, main

LOGS = Path(__file__).parent.parent / "diagnosis" / "logs"


@pytest.fixture(autouse=True)
def _with_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    if "explain" not in {command.name for command in main.app.registered_commands}:
        app = typer.Typer()
        app.callback()(lambda: None)
        explain.add_to(app)
        monkeypatch.setattr(main, "app", app)


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def test_a_cause_is_shown_with_what_to_do_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", str(LOGS / "gpu_oom_update.log")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "A GPU ran out of memory in update_actor" in shown
    assert "83.57 GiB more were asked for, 55.71 GiB were free of 139.80 GiB, 27.86 GiB too little" in shown
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1" in shown
    # The price is the planner's.
    assert "smaller micro-batch: saves half of activations and logits; costs more launches" in shown
    assert shown.index("What to do, in order") < shown.index("https://")


def test_no_fault_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", str(LOGS / "nothing_wrong.log")]) == 0
    assert "No fault in" in capsys.readouterr().out


def test_an_unknown_fault_is_exit_code_1_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", str(LOGS / "unknown.log")]) == 1
    shown = capsys.readouterr().out
    assert "not in the catalogue" in shown
    assert "KeyError: 'wrong'" in shown
    assert "in compute_score" in shown


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["explain", str(LOGS / "ray_worker_segfault.log"), "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == "verl_shard/explain/1"
    assert made["verdict"] == "fault"
    assert made["cause"]["id"] == "segmentation-fault"
    assert {one["id"] for one in made["also"]} == {"worker-died", "actor-died"}
    assert made["unknown"] is None


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, (LOGS / "token_budget.log").read_bytes())
    assert main.run(["explain"]) == 1
    assert "The token budget 2048 is below a sequence of 4096" in capsys.readouterr().out
    piped(monkeypatch, b"")
    assert main.run(["explain", "-"]) == 0


def test_of_a_runs_folder_the_newest_log_is_read_and_with_all_every_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launches").mkdir()
    for number, name in enumerate(("token_budget", "unknown"), 1):
        copy = tmp_path / "launches" / f"{number}.log"
        copy.write_bytes((LOGS / f"{name}.log").read_bytes())
        os.utime(copy, (number, number))
    (tmp_path / "other.log").write_text("RuntimeError: not of a launch\n")
    assert main.run(["explain", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "unknown"
    assert main.run(["explain", str(tmp_path), "--json", "--all"]) == 1
    both = json.loads(capsys.readouterr().out)
    assert [one["log"] for one in both] == [str(tmp_path / "launches" / f"{n}.log") for n in (2, 1)]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "no launches/*.log, *.log, *.out or *.err in the folder"),
        (lambda path: path.write_bytes(b"\x7fELF\x02\0\0\0"), "it is a binary file"),
        (lambda path: path.write_bytes(b"\x1f\x8b\x08\x00\x00"), "it is compressed"),
    ],
)
def test_what_is_no_log_is_refused_with_exit_code_2(
    make: object, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    make(path)  # type: ignore[operator]
    assert main.run(["explain", str(path)]) == 2
    shown = capsys.readouterr()
    assert why in shown.err
    assert shown.err.count("error:") == 1
    assert shown.out == ""


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfrom verl_shard.diagnosis.explain import explain_lines\n"
        "from verl_shard.diagnosis.explain_report import Report\n"
        "explain_lines(['CUDA out of memory'])\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "verl", "ray"} & set(done.stdout.split())
