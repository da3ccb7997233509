"""verl-shard doctor: a table or JSON, and the exit code of the worst that was found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from verl_shard.cli import doctor
from verl_shard.diagnosis import doctor_gather
from verl_shard.diagnosis.doctor_facts import Facts, Torch, Trouble

WARNED = Facts(python="3.12.3", torch=Torch("2.11.0+cpu"), shm=2**40, shm_free=2**40)
HUNG = replace(WARNED, torch=Trouble("hung", "torch: no answer in 3 s"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time limits that the machine was read with; its facts are WARNED, and HUNG within 3 s."""
    limits: list[float] = []

    def gather(time_limit_s: float) -> Facts:
        limits.append(time_limit_s)
        return HUNG if time_limit_s <= 3 else WARNED

    monkeypatch.setattr(doctor_gather, "gather", gather)
    return limits


def run(*arguments: str) -> tuple[int, str]:
    # As cli/main.py does: what a command returns is the exit code.
    app = typer.Typer()
    app.callback()(lambda: None)
    doctor.add_to(app)
    result = CliRunner().invoke(app, ["doctor", *arguments], standalone_mode=False)
    assert result.exception is None
    return result.return_value, result.output


def test_warnings_are_1_and_faults_are_2(asked: list[float]) -> None:
    code, printed = run()
    assert code == 1
    assert "warning  GPUs" in printed
    code, printed = run("--time-limit", "3")
    assert code == 2
    assert "torch: no answer in 3 s" in printed
    assert asked == [60.0, 3.0]


def test_json(asked: list[float]) -> None:
    code, printed = run("--json")
    made = json.loads(printed)
    assert (code, made["schema"], made["verdict"]) == (1, "verl_shard/doctor/1", "warning")
    assert made["facts"]["torch"]["version"] == "2.11.0+cpu"
    assert {check["code"] for check in made["checks"]} == {"", "not-installed", "verl-not-installed", "no-gpu"}


def test_a_limit_of_nothing_is_refused(asked: list[float]) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    doctor.add_to(app)
    assert CliRunner().invoke(app, ["doctor", "--time-limit", "0"]).exit_code == 2
    assert asked == []
