"""The tables of the pages are those that the results make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_shard.bench import readme_tables
from verl_shard.bench.readme_tables import PAGES, ROOT, TABLES, drifted, main, markdown, percent, with_tables
from verl_shard.common.errors import ConfigError

RESULTS = ROOT / "docs" / "results"


def test_the_pages_are_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_the_readmes_tables_are_made() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"memory", "stock", "maps", "training-maps"} <= {name for name in TABLES if f"<!-- table {name} -->" in text}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one page and one small result."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    rows = [
        {"cell": {"strategy": name}, "phase": "values", "error": error}
        for name, error in (("device_map", 0.001), ("device_map", -0.004), ("fsdp", -0.028), ("fsdp2", 0.01))
    ]
    (tmp_path / "docs" / "results" / "h200_stock.json").write_text(json.dumps({"rows": rows[:2]}))
    (tmp_path / "docs" / "results" / "h200_stock_flash.json").write_text(json.dumps({"rows": rows[2:]}))
    (tmp_path / "README.md").write_text("Before.\n\n<!-- table stock -->\nold\n<!-- end of table -->\n\nAfter.\n")
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    monkeypatch.setattr(drifted, "__defaults__", (tmp_path,))
    return tmp_path


def test_a_table_that_drifted_is_found_and_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 1
    assert capsys.readouterr().out == "README.md: its tables are not what docs/results says; use --write\n"
    assert "old" in (place / "README.md").read_text()
    assert main(["--write"]) == 0
    text = (place / "README.md").read_text()
    assert text.startswith(
        "Before.\n\n<!-- table stock -->\n\n| error of the peak | our engine | verl's fsdp and fsdp2 |\n"
    )
    assert "| values | 0.40 % | 2.8 % |\n" in text
    assert "| generate | - | - |\n" in text
    assert text.endswith("|\n\n<!-- end of table -->\n\nAfter.\n")
    assert main(["--check"]) == 0


def test_faults_of_a_page_and_of_results_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no such table"):
        with_tables("<!-- table nothing -->\n<!-- end of table -->", RESULTS, "README.md")
    with pytest.raises(ConfigError, match="end of table"):
        with_tables("<!-- table stock -->\n| a |\n", RESULTS, "README.md")
    (place / "docs" / "results" / "h200_stock.json").unlink()
    assert main(["--check"]) == 2
    assert "cannot be read (FileNotFoundError)" in capsys.readouterr().err


def test_numbers_have_two_digits() -> None:
    assert [percent(share) for share in (0.0, -0.0035, 0.0094, 0.0101, -0.054, 0.099, 0.3, 3.99)] == [
        "0.00 %", "0.35 %", "0.94 %", "1.0 %", "5.4 %", "9.9 %", "30 %", "399 %",
    ]  # fmt: skip
    assert markdown(("a", "b"), [(1, "x")]) == "| a | b |\n|---|---|\n| 1 | x |\n"


def test_the_three_tables_of_the_benches(tmp_path: Path) -> None:
    gib = 2**30
    rung: dict[str, Any] = {
        "adds": "plain fp32", "peaks": [], "estimate": 150 * gib, "error": None, "sequences_per_s": None,
        "outcome": "OOM in forward", "expected": "OOM in forward",
    }  # fmt: skip
    third = {**rung, "adds": "flash attention", "peaks": [3 * gib, gib], "error": -0.002, "sequences_per_s": 12.34}
    (tmp_path / "h200_ladder.json").write_text(json.dumps({"rows": [rung, rung, third]}))
    lines = TABLES["ladder"](tmp_path).splitlines()
    assert lines[2] == "| plain fp32 | - | 150.00 | - | - | OOM in forward | OOM in forward |"
    assert lines[4] == "| + flash attention | 3.00 | 150.00 | 0.20 % | 12.3 | OOM in forward | OOM in forward |"

    less = {**third, "outcome": "OOM in backward", "peaks": [], "sequences_per_s": None}
    (tmp_path / "h200_ladder_80.json").write_text(json.dumps({"rows": [rung, less]}))
    assert (
        TABLES["ladder-80"](tmp_path)
        .splitlines()[3]
        .endswith("| 150.00 | 0.20 % | - | OOM in backward | OOM in forward |")
    )
    assert TABLES["ladder-short"](tmp_path).splitlines()[2:] == [
        "| plain fp32 | - | 150.00 | - | OOM in forward |",
        "| plain fp32 | - | 150.00 | - | OOM in forward |",
        "| + flash attention | 3.00 | 150.00 | 12.3 | OOM in backward |",
    ]

    phases = [
        {"phase": "generate", "seconds": 1.5, "predicted": 5 * gib},
        {"phase": "values", "seconds": 9, "predicted": None},
    ]
    way = {
        "backend": "device_map", "way": "ref streamed", "phases": phases, "step_s": 2.0, "peak": 4 * gib, "host": gib,
        "predicted_host": gib // 2, "failed": "", "predicted_step_s": 1.75,
    }  # fmt: skip
    stock = way | {"backend": "fsdp2", "way": "no offload"}
    advice = {
        "room": 7 * gib, "backend": "device_map", "role": "ref", "what": "weights", "on": True, "measured_saved": gib,
        "saved": 2 * gib, "measured_seconds": None, "seconds": 0.25, "right": True,
    }  # fmt: skip
    (tmp_path / "h200_offload_advice.json").write_text(json.dumps({"ways": [way, stock], "advice": [advice]}))
    made = TABLES["offload-ways"](tmp_path).splitlines()[2]
    assert made == "| device_map: ref streamed | 1.50 | - | 2.00 | 4.00 | 5.00 | 1.00 | 0.50 |"
    assert TABLES["offload-short"](tmp_path).splitlines()[2:] == ["| ref streamed | 2.00 | 1.75 | 4.00 | 5.00 |"]
    made = TABLES["offload-advice"](tmp_path).splitlines()[2]
    assert made == "| 7.00 | device_map, ref: weights | on | 1.00 | 2.00 | - | 0.25 | right |"

    row = {
        "placement": "our placement", "where": "actor on 0", "tokens_per_s": 1234.5, "step_s": 2.5, "predicted_step_s": None,
        "peaks": [gib], "predicted_peak": None, "outcome": "stable",
    }  # fmt: skip
    (tmp_path / "h200_elastic.json").write_text(json.dumps({"rows": [row]}))
    made = TABLES["elastic"](tmp_path).splitlines()[2]
    assert made == "| our placement | actor on 0 | 1234 | 2.50 | - | 1.00 | - | stable |"
    made = TABLES["elastic-short"](tmp_path).splitlines()[2]
    assert made == "| our placement (actor on 0) | 2.50 | - | 1.00 | - |"


def test_generation_and_one_gpus_pipeline(tmp_path: Path) -> None:
    gib = 2**30
    done = {
        "way": "ours",
        "seconds": 2.0,
        "tokens_per_second": 1763.6,
        "cache_bytes": None,
        "peak_bytes": gib,
        "same": 0.5,
    }
    failed = {**dict.fromkeys(done), "way": "theirs"}
    (tmp_path / "h200_generate.json").write_text(json.dumps({"rows": [done, failed]}))
    assert TABLES["generate"](tmp_path).splitlines()[2:] == [
        "| ours | 2.00 | 1764 | - | 1.00 | 50 % |", "| theirs | - | - | - | - | - |",
    ]  # fmt: skip
    rows = [
        {"kind": kind, "way": way, "micro_batches": n, "seconds": 1.25, "ratio": 1.0}
        for kind, way, n in (("forward", "plain model", 4), ("forward", "ours", 4), ("update", "by hand", 8))
    ]
    (tmp_path / "h200_pipeline.json").write_text(json.dumps({"rows": rows}))
    assert TABLES["pipeline-one-gpu"](tmp_path).splitlines() == [
        "| seconds (of the plain way's) | M = 4 | M = 8 |", "|---|---|---|",
        "| forward, plain model | 1.250 (1.000) | - |", "| forward, ours | 1.250 (1.000) | - |",
        "| update, by hand | - | 1.250 (1.000) |",
    ]  # fmt: skip


def test_maps_that_came_to_the_same_share_a_row(tmp_path: Path) -> None:
    even = {"median": 1.0, "p90": 1.0, "worst": 1.0, "empty": 0, "spilled": 0, "feasible": 9}
    worse = {**even, "median": 1.25, "worst": 3.83149, "spilled": 4}
    gib = 2**30
    row = {"words": "small", "weights": [gib, 3 * gib], "peak": [2 * gib, 2 * gib + gib // 4]}
    record = {
        "machine": {"packages": {"accelerate": "1.2"}}, "cells": 12, "training": [row],
        "quality": {"verl_shard": even, "accelerate": worse, 'transformers 5 "auto"': worse, "transformers 6": even},
    }  # fmt: skip
    (tmp_path / "maps.json").write_text(json.dumps(record))
    head, _, *lines = TABLES["maps"](tmp_path).splitlines()
    assert head.endswith("| leaves a GPU empty (of 12) | spills to the CPU though a split fits (of 9) |")
    assert lines == [
        "| verl_shard, transformers 6 | 1.000 | 1.000 | 1.000 | 0 | 0 |",
        '| accelerate 1.2, transformers 5 "auto" | 1.250 | 1.000 | 3.831 | 0 | 4 |',
    ]
    assert TABLES["training-maps"](tmp_path).splitlines()[2] == "| small | 1.0, 3.0 | 2.0, 2.2 |"


def test_every_page_is_there() -> None:
    assert all((ROOT / page).is_file() for page in PAGES)
