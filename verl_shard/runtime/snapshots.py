"""torch's memory snapshots of one step's phases, asked for from outside of the run.

A snapshot has every allocation with its stack; https://pytorch.org/memory_viz draws it. Recording slows a step down, so it
is off until a file in the run's folder asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_shard.common.notices import record_event

REQUEST, FOLDER = "snapshot.request", "snapshots"
MAX_ENTRIES = 200_000
"""Allocations that are kept, the last ones: about 100 MB a file at most."""

_step: int | None = None
"""The step that this process takes snapshots of."""


def ask_for_snapshot(run: Path) -> Path:
    """Asks a run's processes for snapshots of the phases of their next step; where they will be."""
    (run / REQUEST).touch()
    return run / FOLDER


@contextmanager
def snapshot_if_asked(run: Path, role: str, phase: str, step: int) -> Iterator[None]:
    """Around a phase: records it when somebody asked. One step is recorded for each time of asking."""
    if not _is_asked(run, step):
        yield
        return
    import torch

    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    file = folder / f"step{step}-{phase}-{role}-{os.getpid()}.pickle"
    recorder: Any = torch.cuda.memory
    recorder._record_memory_history(max_entries=MAX_ENTRIES)
    try:
        yield
    finally:
        recorder._dump_snapshot(str(file))
        recorder._record_memory_history(enabled=None)
        record_event("snapshot", folder=run, file=str(file.relative_to(run)))


def _is_asked(run: Path, step: int) -> bool:
    global _step
    import torch

    request = run / REQUEST
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    if _step is not None and step != _step:
        request.unlink(missing_ok=True)  # its step is over
        _step = None
        return False
    if request.exists():
        _step = step
    return _step is not None
