"""Saying a fallback once: a Python warning, and a line in the run folder's events.jsonl."""

from __future__ import annotations

import os
import socket
import time
import warnings
from pathlib import Path

from verl_shard.common.errors import Finding
from verl_shard.common.files import append_json_line, claim_once

RUN_DIR_VARIABLE = "VERL_SHARD_RUN_DIR"
"""Environment variable that names the folder of the run a process belongs to."""


class ShardNotice(UserWarning):
    """What was asked for is not what is used; the text says what, and why."""


_said: set[Finding] = set()


def run_dir() -> Path | None:
    """The folder of the run that this process belongs to, if it belongs to one."""
    path = os.environ.get(RUN_DIR_VARIABLE)
    return Path(path) if path else None


def notice(code: str, where: str, given: object, why: str, used: str) -> Finding:
    """Says that `used` stands in for what was asked for, and returns that as a finding.

    A ShardNotice is warned of, and within a run a line goes to its events.jsonl: once per run and host, however many
    processes ask. code, where, given, why: as in Finding.
    """
    finding = Finding("notice", code, where, str(given), why, f"Using {used} instead")
    if finding in _said:
        return finding
    _said.add(finding)
    folder = run_dir()
    if folder is None or claim_once(folder / "events.claims", f"{socket.gethostname()} {finding}"):
        warnings.warn(str(finding), ShardNotice, stacklevel=3)
        record_event("notice", code=code, where=where, given=str(given), why=why, fix=finding.fix)
    return finding


def record_event(kind: str, *, folder: Path | None = None, **fields: object) -> None:
    """Appends a line to the events.jsonl of the run in `folder`, by default this process's; nothing to do outside a run."""
    folder = folder or run_dir()
    if folder is not None and folder.is_dir():
        line = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "kind": kind, **fields}
        append_json_line(folder / "events.jsonl", line)
