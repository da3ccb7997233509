"""What the three benches have in common: what is chosen for a machine, what a failed process costs, and what is recorded."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_shard.bench import frame
from verl_shard.bench.frame import Asked, Setting, Sizes, each_alone, finish, left_out_words, opened
from verl_shard.bench.machine import Died, Machine
from verl_shard.bench.record import tell, typed
from verl_shard.common.errors import ConfigError, RunError

GIB = 2**30
MODELS = Sizes(full="qwen2-0.5b", quick="qwen2-7b", on_cpu="tiny", several="llama-1b")
LOADS = Sizes(full=8, quick=4, on_cpu=2)


def test_models_and_loads_go_by_the_machine_and_by_what_is_asked() -> None:
    def chosen(gpus: int, *, quick: bool) -> tuple[str, int]:
        found = Machine(gpus, GIB * gpus, {})
        return MODELS.of(found, quick=quick), LOADS.of(found, quick=quick)

    assert chosen(0, quick=False) == chosen(0, quick=True) == ("tiny", 2)
    assert chosen(1, quick=False) == ("qwen2-0.5b", 8)
    assert chosen(2, quick=False) == ("llama-1b", 8)
    assert chosen(1, quick=True) == chosen(2, quick=True) == ("qwen2-7b", 4)


def test_a_bench_opens_with_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "look", lambda model: Machine(1, 100 * GIB, {"gpus": ["A GPU"]}))
    setting = opened(Asked(model="tiny", gpu_memory="8GiB"), MODELS, LOADS)
    assert (setting.name, setting.config.num_hidden_layers, setting.load, setting.limit, setting.room) == (
        "tiny", 4, 8, 8 * GIB, 8 * GIB,
    )  # fmt: skip
    assert opened(Asked(model="tiny"), MODELS, LOADS).room == 100 * GIB
    with pytest.raises(ConfigError, match="no such language model"):
        opened(Asked(model="nothing"), MODELS, LOADS)


def test_a_process_that_dies_costs_its_own_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "in_a_process", lambda run: Died(run()) if run() is not None else Died(None, "killed"))
    missing = {"pipelined": "there is one GPU"}
    kept: list[Any] = []
    made = each_alone(
        {"a": lambda: 3, "b": lambda: None, "c": lambda: 5},
        lambda name, of: f"{name} made {of}",
        missing,
        lambda rows, gone: kept.append((rows, gone)),
    )
    later = "the bench was ended before it was measured"
    assert kept == [
        ([3], {"pipelined": "there is one GPU", "b": later, "c": later}),
        ([3], {"pipelined": "there is one GPU", "b": "killed", "c": later}),
    ]
    assert made == {"a": 3, "c": 5}
    assert missing == {"pipelined": "there is one GPU", "b": "killed"}
    assert capsys.readouterr().err == "a made 3\nb: killed\nc made 5\n"
    with pytest.raises(RunError, match="x: killed"):
        each_alone({"x": lambda: None}, lambda *_: "", {}, lambda *_: None)


def test_a_bench_ends_with_its_tables_its_record_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    setting = Setting(Machine(1, GIB, {"gpus": ["A GPU"]}), "tiny", None, 2)
    record = {"rows": [1], "left_out": {"stock verl": "it is not [installed]"}}
    asked = Asked(tmp_path / "made.json", tmp_path / "made.png")
    finish(asked, setting, "verl_shard/x/1", record, ["said", *left_out_words(record)], lambda *of: drawn.append(of))
    assert capsys.readouterr().out == "said\nLeft out: stock verl: it is not [installed].\n"
    made = json.loads((tmp_path / "made.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made.pop("date"))
    assert list(made.items()) == [
        ("schema", "verl_shard/x/1"), ("command", ""), ("machine", {"gpus": ["A GPU"]}), *record.items(),
    ]  # fmt: skip
    assert drawn == [(record, tmp_path / "made.png")]
    finish(Asked(), setting, "verl_shard/x/1", record, [], lambda *_: pytest.fail("no picture was asked for"))


def test_the_record_instead_of_tables(capsys: pytest.CaptureFixture[str]) -> None:
    tell("verl_shard/x/1", {"seed": 3}, ["a table"], as_json=True, facts={})
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["machine"], made["seed"]) == ("verl_shard/x/1", {}, 3)


def test_the_command_is_recorded_where_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/verl-shard", "bench", "maps", "--out", "a file.json"])
    assert typed() == "verl-shard bench maps --out 'a file.json'"
    monkeypatch.setattr(sys, "argv", ["/somewhere/verl_shard/__main__.py", "bench", "maps"])
    assert typed() == "verl-shard bench maps"
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/pytest", "-q"])
    assert typed() == ""
