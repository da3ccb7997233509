"""A fallback is said once for each run and host."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from verl_shard.common.errors import Finding
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE, ShardNotice, notice, record_event, run_dir


def _say(given: str = "flash") -> Finding:
    return notice("no-flash", "attn_implementation", given, "not installed", "sdpa")


def test_it_warns_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    with pytest.warns(ShardNotice, match=r"^attn_implementation = flash: not installed. Using sdpa instead.$"):
        first = _say()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _say() == first
    with pytest.warns(ShardNotice, match="another"):
        _say("another")


def test_in_a_run_it_is_a_line_of_events_and_only_the_first_process_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    with pytest.warns(ShardNotice, match="Using sdpa"):
        _say()
    code = (
        "from verl_shard.common.notices import notice\n"
        "notice('no-flash', 'attn_implementation', 'flash', 'not installed', 'sdpa')"
    )
    other = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (other.returncode, other.stderr) == (0, "")
    (line,) = read_json_lines(tmp_path / "events.jsonl")
    assert {key: line[key] for key in ("kind", "code", "where", "given", "why", "fix")} == {
        "kind": "notice",
        "code": "no-flash",
        "where": "attn_implementation",
        "given": "flash",
        "why": "not installed",
        "fix": "Using sdpa instead",
    }


def test_events_have_time_host_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    record_event("launch", number=3)
    (line,) = read_json_lines(tmp_path / "events.jsonl")
    assert set(line) == {"time", "host", "pid", "kind", "number"}
    assert (line["kind"], line["number"]) == ("launch", 3)


def test_outside_a_run_there_are_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    assert run_dir() is None
    record_event("launch")
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "gone"))
    record_event("launch")
    assert list(tmp_path.iterdir()) == []


def test_the_process_that_launches_a_run_writes_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "other"))
    record_event("launch", folder=tmp_path / "mine", number=1)
    assert [line["number"] for line in read_json_lines(tmp_path / "mine" / "events.jsonl")] == [1]
    assert list((tmp_path / "other").iterdir()) == []
