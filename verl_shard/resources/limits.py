"""What this process may take of the machine: what its control groups (cgroups, versions 1 and 2) allow, and host memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_shard.common.files import number_of, words_of

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_NO_LIMIT = 2**60
"""Version 1 writes a number near 2**63 where there is none."""


@dataclass(frozen=True)
class Limits:
    """Of all control groups that this process is in. cpus: how many, parts included. memory: bytes of the least limit.
    memory_left: bytes that may still be taken below all limits; files that the kernel gives back at once are no use of it.

    None: no limit.
    """

    cpus: float | None = None
    memory: int | None = None
    memory_left: int | None = None


@dataclass(frozen=True)
class HostMemory:
    """Bytes of RAM that this process may have in all, and those that it could have now: the machine's, or its container's."""

    total: int
    available: int


def read_limits(groups: Path | None = None, own: Path | None = None) -> Limits:
    """What the kernel says. groups: where its control groups are mounted; own: which of them this process is in."""
    groups = GROUPS if groups is None else groups
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for controllers, path in _memberships(OWN if own is None else own):
        for at in _upwards(path):
            if not controllers:  # version 2
                quota = words_of(groups / at / "cpu.max")
                if len(quota) == 2 and quota[0].isdigit():
                    cpus.append(int(quota[0]) / int(quota[1]))
                memory += _memory(groups / at, "memory.max", "memory.current", "inactive_file")
            if "memory" in controllers:
                group = groups / "memory" / at
                memory += _memory(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if "cpu" in controllers:
                folder = next((one for one in (groups / ",".join(controllers), groups / "cpu") if one.is_dir()), groups)
                quota_us = number_of(folder / at / "cpu.cfs_quota_us")
                period = number_of(folder / at / "cpu.cfs_period_us")
                if quota_us is not None and period and quota_us > 0:
                    cpus.append(quota_us / period)
    least = min((most for most, _ in memory), default=None)
    return Limits(min(cpus, default=None), least, min((left for _, left in memory), default=None))


def host_memory(limits: Limits | None = None) -> HostMemory:
    """RAM within the limits; read anew without them. Raises OSError where the machine does not say what it has."""
    limits = read_limits() if limits is None else limits
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    if limits.memory is not None and limits.memory_left is not None:
        total, available = min(total, limits.memory), min(available, limits.memory_left)
    return HostMemory(total, available)


def available_host_memory() -> int | None:
    """Bytes that this process could take now; None where that is not known."""
    with contextlib.suppress(OSError):
        return host_memory().available
    return None


def usable_cores() -> int:
    """Cores that this process may run on, within what its control groups allow: of so many, threads make sense."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_limits().cpus
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _memberships(own: Path) -> Iterator[tuple[list[str], str]]:
    """(controllers, path) of each group; version 2 names no controller."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            yield controllers.split(",") if controllers else [], path


def _upwards(path: str) -> list[str]:
    """A group, the group it is in, and so on to the root: the limits of all of them hold."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _memory(group: Path, limit: str, current: str, cache: str) -> list[tuple[int, int]]:
    """A group's limit and what is left of it; nothing where it has no limit."""
    most = number_of(group / limit)
    if most is None or most >= _NO_LIMIT:
        return []
    words = words_of(group / "memory.stat")
    held = dict(zip(words[::2], words[1::2], strict=False)).get(cache, "0")
    used = max((number_of(group / current) or 0) - int(held), 0)
    return [(most, max(most - used, 0))]
