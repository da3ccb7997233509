"""Reading the log of a run: which files, which lines, and which process said each line.

Ray, torchrun, vLLM and container runtimes put a prefix of their own before what a process prints, often several:

    (WorkerDict pid=1234, ip=10.0.0.1) ERROR 09-03 11:03:37 [core.py:712] ValueError: ... [repeated 7x across cluster]

A line here is the text without any of them, and the process that it came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verl_shard.common.errors import config_error

BLOCK_BYTES = 1 << 18
LONGEST_LINE = 20_000
"""Characters of a line that are looked at; a printed configuration may be a line of a megabyte."""

_GIVE = "Give the file that holds what the run printed, or pipe it in"
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|(?<![\w\]])\[(?:\d{1,2};)*(?:0|1|2|3\d|9\d)m")
# What stands before a process' own words. Each is tried again after another was taken off.
_PREFIXES = (
    re.compile(r"\((?P<name>[^()\n]*?(?:\([^()]*\)[^()\n]*?)?) ?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^,()\s]+))?\) ?"),
    re.compile(r"\((?P<name>raylet|gcs_server|autoscaler|scheduler)(?:[ ,][^)]*)?\) ?"),
    re.compile(r"\[rank(?P<rank>\d+)\]: ?"),
    re.compile(r"\[(?:default|\d+,)(?P<local_rank>\d+)\](?:<std(?:out|err)>)?: ?"),
    re.compile(r"(?P<container>[\w.-]+)\s+\| (?!(?:MISSING|UNEXPECTED|MISMATCH)\b)"),
    re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z? ?"),
    re.compile(r"(?:ERROR|CRITICAL|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\s]+:\d+\] ?"),
    re.compile(r"\[\d{4}-\d\d-\d\d[T ][\d:,.]+Z?\] ?(?!\[)"),
    re.compile(r"E {2,}(?=\S*(?:Error|Exception)\b)"),
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
# The first letters of all prefixes: most lines of a log begin with none.
_MAY_BEGIN = re.compile(r"[(\[ECWID\d]|[\w.-]+\s+\| ")


class Readable(Protocol):
    """What bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log. number: counted from 1; process: as the prefixes name it, "" for the driver's own words."""

    number: int
    text: str
    process: str = ""
    rank: int | None = None


def read_line(number: int, raw: str) -> Line:
    """A line without colours, prefixes and Ray's note of how often it was said."""
    text = raw.rstrip("\r\n")[:LONGEST_LINE]
    if "\r" in text:  # a progress bar, written over and over: what stood there last
        text = text.rsplit("\r", 1)[1]
    if "\x1b" in text or "m(" in text or "m " in text:
        text = _COLOUR.sub("", text)
    process, rank = "", None
    while _MAY_BEGIN.match(text):
        for prefix in _PREFIXES:
            if match := prefix.match(text):
                process, rank = _named(match, process, rank)
                text = text[match.end() :]
                break
        else:
            break
    if "[repeated " in text:
        text = _REPEATED.sub("", text)
    return Line(number, text.rstrip(), process, rank)


def _named(match: re.Match[str], process: str, rank: int | None) -> tuple[str, int | None]:
    found = match.groupdict()
    if found.get("pid"):
        at = f", ip={found['ip']}" if found["ip"] else ""
        return f"{found['name']} pid={found['pid']}{at}".strip(), rank
    if found.get("name"):
        return found["name"], rank
    number = found.get("rank") or found.get("local_rank")
    if number is not None:
        return process or f"rank {number}", int(number)
    return process, rank


def read_blocks(stream: Readable) -> Iterator[tuple[int, str]]:
    """Whole lines of a file in blocks: the number of the first line of each, and their text. Reads a file of any size."""
    number, rest = 1, b""
    while block := stream.read(BLOCK_BYTES):
        whole, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += block
            # What has no line end in it is cut somewhere, so that memory stays bounded.
            if len(rest) < 16 * BLOCK_BYTES:
                continue
            whole, tail = rest, b""
            rest = b""
        text = (rest + whole).decode("utf-8", errors="replace")
        rest = tail
        yield number, text
        number += text.count("\n") + 1
    if rest:
        yield number, rest.decode("utf-8", errors="replace")


def check_is_text(stream: Readable, where: str) -> bytes:
    """Raises ConfigError for what is no text. Returns the bytes that were read for that, which stand before the rest."""
    start = stream.read(4096)
    if start.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ")):
        raise config_error(
            "not-a-log", where, None, "it is compressed", f"Unpack it first, as in: zcat {where} | verl-shard explain"
        )
    if b"\0" in start:
        raise config_error("not-a-log", where, None, "it is a binary file", "Give the text that the run printed")
    return start


def files_of(path: Path) -> Sequence[Path]:
    """The log itself; of a folder, the logs of a run in it, the newest first.

    Raises ConfigError when there is none.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise config_error("no-log", "LOG", path, "there is no such file", _GIVE)
    if not path.is_dir():
        raise config_error("no-log", "LOG", path, "it is neither a file nor a folder", _GIVE)
    for pattern in ("launches/*.log", "*.log", "*/*.log", "*.out", "*.err"):
        if found := _newest_first(path.glob(pattern)):
            return found
    why = "there is no launches/*.log, *.log, *.out or *.err in the folder"
    raise config_error("no-log", "LOG", path, why, _GIVE)


def _newest_first(files: Iterable[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=lambda file: (-file.stat().st_mtime, str(file)))
