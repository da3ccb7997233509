"""The processes of a local run: one, or those of torchrun or accelerate launch."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from verl_shard.common.errors import ConfigError, RunError, ShardError

T = TypeVar("T")

_WORKER = {"WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
_LEFT_OUT = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_FAILURE = "verl_shard/failure"
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is. Each has the whole batch in mind and computes its share of it."""

    rank: int
    size: int
    local_rank: int

    @property
    def first(self) -> bool:
        """Whether this is the process that prints, logs and saves."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part: every size-th item, so that all have as many and of similar lengths."""
        return list(items[self.rank :: self.size])

    def gather(self, work: Callable[[], list[T]]) -> list[T]:
        """What `work` gives in every process, put together in the order from which `share` took it.

        An error of one process is raised in all of them, with that process's number and message: none is left waiting.
        """
        import torch.distributed

        if self.size == 1:
            return work()
        mine: tuple[list[T] | None, ShardError | None] = (None, None)
        try:
            mine = (work(), None)
        except ShardError as error:
            mine = (None, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            mine = (None, RunError(f"{type(error).__name__}: {error}"))
        every: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(every, mine)
        for rank, (_, failure) in enumerate(every):
            if isinstance(failure, ConfigError):
                raise failure
            if failure is not None:
                raise RunError(f"process {rank} of {self.size} failed: {failure}")
        parts = [part for part, _ in every]
        return [parts[i % self.size][i // self.size] for i in range(sum(map(len, parts)))]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work that all processes do. Where one fails and the others lose it, they say what it failed of."""
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            mine = f"process {self.rank} of {self.size} failed: {type(error).__name__}: {error}"
            if (first := _first_failure(mine)) != mine and not isinstance(error, ShardError):
                raise RunError(first) from error
            raise


def _first_failure(mine: str) -> str:
    """What the first process that failed has left in the store of the group; it is this one's where there was none."""
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        found: bytes = _get_default_store().compare_set(_FAILURE, "", mine)
    except (RuntimeError, ValueError):
        return mine
    return found.decode() or mine


def use_platform(*, cpu: bool) -> None:
    """Has verl work on the CPU, or on the GPUs; to be called before anything of verl is imported."""
    if not cpu:
        return
    os.environ["VERL_PLATFORM"] = "cpu"
    if "verl" in sys.modules:
        from verl.plugin.platform import get_platform, set_platform

        from verl_shard.verl_plugin.platform_cpu import PlatformCPU

        if not isinstance(get_platform(), PlatformCPU):
            set_platform(PlatformCPU())


def launched() -> tuple[int, int, int]:
    """(rank, number of processes, rank on this machine) as the launcher's environment says; (0, 1, 0) without one."""
    rank, size, local = (
        int(os.environ.get(name, d)) for name, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    return rank, size, local


def join(*, gpu: int | None) -> Processes:
    """Joins the process group of the launcher, or makes one of this process alone; one that is there is used.

    gpu: the first GPU of this process, which becomes its current one; None on the CPU.
    """
    import torch

    distributed = torch.distributed
    _, size, local = launched()
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if not distributed.is_initialized():
        backend = "cpu:gloo" if gpu is None else "cpu:gloo,cuda:nccl"
        if size > 1:
            distributed.init_process_group(backend, timeout=_PATIENCE)
        else:
            store = Path(tempfile.mkdtemp(prefix="verl_shard_group_")) / "store"
            distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
        if gpu is None:
            atexit.register(_leave)
    return Processes(distributed.get_rank(), distributed.get_world_size(), local)


def _leave() -> None:
    """gloo's threads take a process down that ends while it is in a group."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def worker_environment(processes: Processes) -> Iterator[None]:
    """What a verl worker reads from its environment, and would have from Ray; the environment is then as it was.

    With Ray's NOSET variable a worker asks Ray for its GPU: there is no Ray here.
    """
    before = {name: os.environ.get(name) for name in (*_WORKER, _LEFT_OUT)}
    os.environ.pop(_LEFT_OUT, None)
    os.environ.update(RANK=str(processes.rank), WORLD_SIZE=str(processes.size), LOCAL_RANK=str(processes.local_rank))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
