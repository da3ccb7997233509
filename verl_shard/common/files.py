"""Files that are whole or absent, JSON lines that several processes may append to, and the kernel's small files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_shard.common.errors import config_error


def write_whole(path: Path, text: str) -> None:
    """Writes `text` so that a reader, or a crash, sees the old file or the new one and never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one line; a single write in append mode, so that lines of several processes do not mix."""
    data = (json.dumps(record, default=str) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file. A last line without its end (a writer was killed in it) is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


class JsonTail:
    """A file of JSON lines that another process is writing, read as it grows: each line once, and only whole ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        """The lines that have come since the last call; none while there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def words_of(path: Path) -> list[str]:
    """The words of a small file, such as those of /proc and /sys; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").split()
    return []


def number_of(path: Path) -> int | None:
    """The whole number that such a file begins with, or None."""
    words = words_of(path)
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None


def claim_once(path: Path, text: str) -> bool:
    """True for the first process that claims `text` in the file `path`; False for every later one.

    A folder that cannot be written makes everybody first: saying something twice is better than never.
    """
    try:
        with path.open("a+", encoding="utf-8") as claims:
            fcntl.flock(claims, fcntl.LOCK_EX)
            claims.seek(0)
            if json.dumps(text) in (line.rstrip("\n") for line in claims):
                return False
            claims.write(json.dumps(text) + "\n")
            return True
    except OSError:
        return True


def check_writable_folder(path: Path, where: str) -> None:
    """Raises ConfigError when a folder at `path` could not be made or written; leaves nothing behind."""
    nearest = path
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise config_error(
            "not-a-folder", where, path, f"{nearest} is a file, not a folder", "Name a folder that can be made"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise config_error(
            "folder-not-writable", where, path, f"{nearest} cannot be written by this user", "Name another folder"
        )
    probe = nearest / f".verl_shard_probe_{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise config_error(
            "folder-not-writable", where, path, f"{nearest} cannot be written ({error.strerror})", "Name another folder"
        ) from error
