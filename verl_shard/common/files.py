"""Files that are whole or absent, JSON lines that several processes may append to, and the kernel's small files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_shard.common.errors import config_error


def write_whole(path: Path, text: str) -> None:
    """Writes `text` so that a reader, or a crash, sees the old file or the new one and never half of one.

    Raises ConfigError for a path at which there cannot be a file, such as one in a folder that is not there.
    """
    _check_place(path, "path")
    temporary = _beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path: Path, where: str = "path") -> None:
    """Raises ConfigError when `write_whole` could not write a file at `path`; makes nothing, and no folder either.

    For the begin of what takes long. where: what an error names, such as "--out".
    """
    _check_place(path, where)
    _check_probe(_beside(path), where, path, "Name a file in another folder")


def _check_place(path: Path, where: str) -> None:
    """Raises ConfigError for a path that is a folder or a device, or is in no folder that can be written."""
    folder = path.parent
    try:
        if path.is_dir():
            raise config_error("is-a-folder", where, path, "it is a folder", "Name a file in it")
        if path.exists() and not path.is_file():
            why = "it is a device or a pipe, which a file would take the place of"
            raise config_error("not-a-file", where, path, why, "Name a file")
        nearest = folder
        while not nearest.exists():
            nearest = nearest.parent
        is_folder = nearest.is_dir()
    except OSError as error:
        why = f"it cannot be looked at ({error.strerror})"
        raise config_error("no-file-there", where, path, why, "Name another file") from error
    fix = "Name a file in another folder"
    if not is_folder:
        raise config_error("not-a-folder", where, path, f"{nearest} is a file, not a folder", fix)
    if nearest != folder:
        made = f"Make it first (mkdir -p {shlex.quote(str(folder))}), or name a file in another"
        raise config_error("no-folder", where, path, f"there is no folder {folder}", made)
    _check_access(folder, where, path, fix)


def _beside(path: Path) -> Path:
    """The file that is written first, and then takes the place of the one at `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}")


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
    fix = "Name another folder"
    _check_access(nearest, where, path, fix)
    _check_probe(nearest / f".verl_shard_probe_{os.getpid()}", where, path, fix)


def _check_access(folder: Path, where: str, given: Path, fix: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise config_error("folder-not-writable", where, given, f"{folder} cannot be written by this user", fix)


def _check_probe(probe: Path, where: str, given: Path, fix: str) -> None:
    """Raises ConfigError when there can be no file `probe`: a file system may refuse though the user has the rights."""
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = f"{probe.parent} cannot be written ({error.strerror})"
        raise config_error("folder-not-writable", where, given, why, fix) from error
