"""Files that are whole or absent, lines that do not mix, claims that only one wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.files import (
    JsonTail,
    append_json_line,
    check_output,
    check_writable_folder,
    claim_once,
    read_json_lines,
    write_whole,
)


def test_write_whole_replaces_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_whole(file, "one")
    write_whole(file, "zwölf")
    assert file.read_bytes() == "zwölf".encode()
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    write_whole(file, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def _places(folder: Path) -> list[tuple[Path, str]]:
    """Paths at which there cannot be a file, and what is said of them."""
    (folder / "file").touch()
    os.mkfifo(folder / "pipe")
    another = "Name a file in another folder."
    return [
        (folder, "it is a folder. Name a file in it."),
        (Path(), "it is a folder. Name a file in it."),
        (folder / "pipe", "it is a device or a pipe, which a file would take the place of. Name a file."),
        (
            folder / "a b" / "c" / "d.json",
            f"there is no folder {folder}/a b/c. Make it first (mkdir -p '{folder}/a b/c'), or name a file in another.",
        ),
        (folder / "file" / "c" / "d.json", f"{folder}/file is a file, not a folder. {another}"),
        (folder / "file" / "d.json", f"{folder}/file is a file, not a folder. {another}"),
        (folder / ("x" * 300), "it cannot be looked at (File name too long). Name another file."),
    ]


def test_a_path_where_there_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    for path, said in _places(tmp_path):
        with pytest.raises(ConfigError) as caught:
            check_output(path, "--out")
        assert str(caught.value) == f"--out = {path}: {said}"
        with pytest.raises(ConfigError) as caught:
            write_whole(path, "text")
        assert str(caught.value) == f"path = {path}: {said}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_path_that_can_be_written_passes_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old")
    check_output(tmp_path / "old.json")
    check_output(tmp_path / "new.json")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_file_in_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for refused in (lambda path: check_output(path), lambda path: write_whole(path, "text")):
        with pytest.raises(
            ConfigError, match=f"{tmp_path} cannot be written by this user. Name a file in another folder"
        ):
            refused(tmp_path / "new.json")


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from verl_shard.common.files import JsonTail, append_json_line\n"
        "for number in range(50):\n"
        "    append_json_line(Path(sys.argv[1]), {'writer': sys.argv[2], 'number': number, 'fill': 'x' * 500})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), name]) for name in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    records = list(read_json_lines(file))
    assert len(records) == 100
    for name in ("a", "b"):
        assert [record["number"] for record in records if record["writer"] == name] == list(range(50))


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert list(read_json_lines(file)) == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert list(read_json_lines(file)) == [{"step": 1}, {"step": 2}]


def test_what_json_has_no_type_for_is_written_as_text(tmp_path: Path) -> None:
    append_json_line(tmp_path / "events.jsonl", {"path": Path("/a/b")})
    assert (tmp_path / "events.jsonl").read_text() == '{"path": "/a/b"}\n'


def test_one_of_many_claims_a_text(tmp_path: Path) -> None:
    file = tmp_path / "claims"
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: claim_once(file, "two\nlines"), range(40)))
    assert won.count(True) == 1
    assert claim_once(file, "another")
    assert not claim_once(file, "another")
    assert file.read_text() == json.dumps("two\nlines") + "\n" + json.dumps("another") + "\n"


def test_without_a_writable_folder_everybody_is_first(tmp_path: Path) -> None:
    assert claim_once(tmp_path / "absent" / "claims", "a")
    assert claim_once(tmp_path / "absent" / "claims", "a")


def test_a_folder_that_can_be_made_passes_and_is_not_made(tmp_path: Path) -> None:
    check_writable_folder(tmp_path / "a" / "b", "--out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/a is a file, not a folder"):
        check_writable_folder(tmp_path / "a" / "b", "--out")


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"^--out = {tmp_path}/new: {tmp_path} cannot be written by this user"):
        check_writable_folder(tmp_path / "new", "--out")


def test_a_file_system_that_refuses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, *_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", fail)
    with pytest.raises(ConfigError, match=r"cannot be written \(Read-only file system\)"):
        check_writable_folder(tmp_path / "new", "--out")
    with pytest.raises(ConfigError, match=r"cannot be written \(Read-only file system\)"):
        check_output(tmp_path / "new", "--out")


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = JsonTail(path)
    assert tail.new() == []
    with path.open("a", encoding="utf-8") as file:
        file.write('{"a": 1}\n{"a": 2}\n{"a"')
        file.flush()
        assert tail.new() == [{"a": 1}, {"a": 2}]
        assert tail.new() == []
        file.write(': "\u00e9"}\n')
        file.flush()
        assert tail.new() == [{"a": "\u00e9"}]
