"""The page of all results: a section for each file that is one, plots in the page itself, and the rest named."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from verl_shard.bench import report_plots
from verl_shard.bench.report import bench_report
from verl_shard.bench.report_sections import UnknownSchemaError, section_of
from verl_shard.cli import bench_tables
from verl_shard.common.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def ladder_record(**changed: Any) -> dict[str, Any]:
    """What a run on a GPU writes: one rung that ran and one that did not."""
    rung: dict[str, Any] = {
        "rung": {}, "seconds": 2.0, "sequences_per_s": 4.0, "peaks": [2**30], "estimate": 2**30 + 2**24,
        "expected": "stable", "estimate_s": 1.0, "adds": "bf16 autocast", "outcome": "stable", "error": 2**-6,
    }  # fmt: skip
    failed = {
        **rung, "adds": "plain <fp32>", "seconds": None, "sequences_per_s": None, "peaks": [], "outcome": "OOM in backward",
        "error": None,
    }  # fmt: skip
    return {
        "schema": "verl_shard/bench-ladder/1", "date": "2026-11-30", "command": "verl-shard bench ladder --quick",
        "machine": {"cpus": 3, "gpus": ["A <GPU>", "A <GPU>"], "python": "3.11", "packages": {"torch": "2.11", "verl": None}},
        "model": "small", "batch": {"sequences": 4, "micro_batch": 2, "longest": 16}, "limit": 2**31, "loss": "ours",
        "attention": "sdpa", "left_out": {"pipelined": "there is one GPU"}, "rows": [failed, rung], **changed,
    }  # fmt: skip


def test_every_recorded_result_has_a_section_with_a_plot(tmp_path: Path) -> None:
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    page = bench_report(tmp_path)
    assert (page.path, page.skipped) == (tmp_path / "report.html", {})
    assert page.sections == tuple(sorted(file.name for file in RESULTS.glob("*.json")))
    html = page.path.read_text()
    plots = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(plots) == len(page.sections)
    assert all(base64.b64decode(plot)[:8] == b"\x89PNG\r\n\x1a\n" for plot in plots)
    assert html.count("src=") == len(plots)
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)
    # The first row of the recorded attention bench, as anybody reads it in the file.
    assert "<td>qwen2-0.5b</td><td>sdpa, mask</td><td>False</td><td>0.0288</td><td>4.17 GiB</td>" in html


def test_files_of_other_kinds_are_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "a_ladder.json").write_text(json.dumps(ladder_record()))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "newer.json").write_text('{"schema": "verl_shard/bench-ladder/99"}')
    (tmp_path / "empty.json").write_text('{"schema": "verl_shard/bench-ladder/1"}')
    (tmp_path / "notes.txt").write_text("not looked at")
    page = bench_report(tmp_path, tmp_path / "page.html")
    assert page.sections == ("a_ladder.json",)
    assert page.skipped == {
        "broken.json": "it is not JSON",
        "empty.json": "it is not as its schema says (KeyError: 'rows')",
        "list.json": "its schema is not known: None",
        "newer.json": "its schema is not known: verl_shard/bench-ladder/99",
    }
    html = (tmp_path / "page.html").read_text()
    assert "<li><code>broken.json</code>: it is not JSON</li>" in html
    assert page.words.startswith("1 result; skipped: broken.json (it is not JSON); ")


def test_a_section_has_the_machine_the_command_and_the_table(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text(json.dumps(ladder_record()))
    html = bench_report(tmp_path).path.read_text()
    about = (
        "2 x A &lt;GPU&gt;, 3 CPU cores, Python 3.11, torch 2.11; 2026-11-30; <code>verl-shard bench ladder --quick</code>; "
        "<code>ladder.json</code>"
    )
    assert about in html
    cells = "plain &lt;fp32&gt;", "-", "1.02 GiB", "-", "-", "OOM in backward", "stable"
    assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in html
    assert "<p>Left out: pipelined: there is one GPU.</p>" in html
    assert "<p>torch may take 2.00 GiB of each GPU.</p>" in html


def test_the_error_of_estimates_is_of_what_was_recorded() -> None:
    def row(peak: int, measured: int, **others: int) -> dict[str, Any]:
        return {"row": {"phase": "train", "fields": {}}, "peak": peak, "measured_peak": measured, "others": others}

    record = {"schema": "verl_shard/bench-memory/2", "rows": [row(101, 100, rival=50), row(98, 100), row(100, 100)]}
    (table,) = section_of(record).tables
    assert table.rows == [("estimate_memory: train", "1.00%", "2.00%", 3), ("rival", "50.00%", "50.00%", 1)]
    with pytest.raises(UnknownSchemaError):
        section_of({"schema": ["verl_shard/bench-memory/2"]})


def test_generation_has_a_row_and_a_bar_for_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(way: str, seconds: float | None, cache: int | None, same: float | None) -> dict[str, Any]:
        ran = {
            "seconds": seconds,
            "cpu_seconds": seconds,
            "tokens_per_second": None if seconds is None else 6 / seconds,
        }
        return {"way": way, **ran, "cache_bytes": cache, "peak_bytes": None, "same": same}

    record = {
        "schema": "verl_shard/bench-generate/1", "model": "small", "threads": 1, "device": "cpu", "dtype": "float32",
        "prompt_tokens": [3, 9], "response_tokens": [2, 4],
        "rows": [row("plain", 3.0, 2_000_000, 1.0), row("ours", 2.0, 3_000_000, 0.975), row("theirs", None, None, None)],
    }  # fmt: skip
    made = section_of(record)
    (table,) = made.tables
    assert table.title.startswith("small, 2 requests: prompts of 3 to 9 tokens (mean 6), responses of 2 to 4 (mean 3)")
    assert table.rows == [
        ("plain", "3.00", "3.00", "2", "1.50 x", "2", "-", "100.0%"),
        ("ours", "2.00", "2.00", "3", "", "3", "-", "97.5%"),
        ("theirs", "-", "-", "-", "", "-", "-", "-"),
    ]
    assert made.notes == ["Greedy, with random weights in float32, on cpu, threads: 1.", "Did not run: theirs."]
    drawn: list[Any] = []
    monkeypatch.setattr(report_plots, "_bars", lambda *given: drawn.append(given))
    assert made.draw is not None
    made.draw(record, tmp_path / "plot.png")
    names = ["plain", "ours", "theirs (did not run)"]
    assert drawn == [("Tokens a second", names, [2.0, 3.0, 0.0], tmp_path / "plot.png")]
    monkeypatch.undo()
    made.draw(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        bench_report(tmp_path / "nothing")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no result of a bench \(other.json: its schema is not known: None\)"):
        bench_report(tmp_path)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text(json.dumps(ladder_record()))
    app = typer.Typer()
    bench_tables.add_to(app)
    called = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "made.html")])
    assert (called.exit_code, called.output) == (0, f"{tmp_path / 'made.html'}: 1 result\n")
    assert (tmp_path / "made.html").read_text().startswith("<!DOCTYPE html>")
