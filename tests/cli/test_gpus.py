from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import typer
from resources.fake_nvml import GIB, Card, FakeNvml
from typer.testing import CliRunner

from verl_shard.cli import gpus
from verl_shard.common.errors import ConfigError
from verl_shard.common.tables import as_text
from verl_shard.resources.usage import get_gpu_usage


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    cards = [Card("GPU-a", used=70 * GIB, utilization=97, temperature=61, processes=[(2**22 + 5, 69 * GIB)]),
             Card("GPU-b", silent={"utilization"})]  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(cards))  # type: ignore[arg-type]
    monkeypatch.setenv("VERL_SHARD_LEASES", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    made = typer.Typer()
    made.callback()(lambda: None)
    gpus.add_to(made)
    return made


def test_a_table(app: typer.Typer) -> None:
    shown = as_text(140, gpus.as_table(get_gpu_usage()))
    rows = [[cell.strip() for cell in line[1:-1].split("│")] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [
        ["GPU 0", "NVIDIA H200", "70.00 GiB of 140.00 GiB", "70.00 GiB", "97 %", "61 °C",
         "pid 4194309 (in another container, 69.00 GiB)"],
        ["hidden (1)", "NVIDIA H200", "512.00 MiB of 140.00 GiB", "139.50 GiB", "?", "30 °C", "nobody"],
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["gpus"])
    assert result.exit_code == 0
    assert "GPU 0" in result.stdout


def test_json(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["gpus", "--json", "--devices", "0"])
    (found,) = json.loads(result.stdout)["gpus"]
    assert json.loads(result.stdout)["schema"] == "verl_shard/gpus/1"
    assert (found["id"], found["used"], found["processes"][0]["pid"]) == (0, 70 * GIB, 2**22 + 5)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_watch_goes_on_until_it_is_stopped(app: typer.Typer, more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = CliRunner().invoke(app, ["gpus", "--watch", "--every", "0.5", *more])
    assert result.exit_code == 130
    assert waited == [0.5] * 3
    if more:
        assert [json.loads(line)["schema"] for line in result.stdout.splitlines()] == ["verl_shard/gpus/1"] * 3


def test_without_a_driver_it_says_so(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], driver=False))  # type: ignore[arg-type]
    result = CliRunner().invoke(app, ["gpus"])
    assert isinstance(result.exception, ConfigError)
    assert "does not answer on this machine" in str(result.exception)
