"""What memory each phase of a run really took, as lines of the run folder's memory.jsonl."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl_shard.common.files import append_json_line
from verl_shard.common.notices import run_dir
from verl_shard.runtime.snapshots import snapshot_if_asked


def host_peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    # Linux counts ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def record_memory(role: str, phase: str, step: int) -> Iterator[dict[str, Any]]:
    """Records the peaks of the block it wraps: bytes allocated and reserved for each GPU, what all processes use of it in the
    end (where this one does), and the host's resident set.

    What the block puts into the mapping it is given is recorded too. Outside a run it does nothing. The GPUs' peak counters
    are reset on entry, so that each phase has its own peak.
    """
    folder = run_dir()
    if folder is None or not folder.is_dir():
        yield {}
        return
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    start = time.perf_counter()
    more: dict[str, Any] = {}
    try:
        with snapshot_if_asked(folder, role, phase, step):
            yield more
    finally:
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "step": step,
            "role": role,
            "phase": phase,
            "seconds": time.perf_counter() - start,
            "host_peak": host_peak(),
            "gpus": {
                gpu: {
                    "allocated": torch.cuda.memory_allocated(gpu),
                    "peak": torch.cuda.max_memory_allocated(gpu),
                    "peak_reserved": torch.cuda.max_memory_reserved(gpu),
                    **_used(gpu),
                }
                for gpu in gpus
            },
            **more,
        }
        append_json_line(folder / "memory.jsonl", record)


def _used(gpu: int) -> dict[str, int]:
    """What all processes hold of a GPU now, by the driver; nothing of a GPU that this process has not used: the question
    would make a context of half a GiB there."""
    import torch

    if not torch.cuda.max_memory_reserved(gpu):
        return {}
    free, total = torch.cuda.mem_get_info(gpu)
    return {"used": total - free}
