"""What can be read of this machine without a process of its own: files, names, disks, limits. Nothing is changed."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
from packaging.utils import canonicalize_name

from verl_shard.diagnosis.doctor_facts import Disk, Package, Trouble
from verl_shard.diagnosis.doctor_network import RAY_PORT

SHORT_S = 5.0
"""For what a healthy machine answers at once: a name, the room on a disk."""
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "RAY_", "VERL_", "HF_", "VLLM_", "PYTORCH_", "MASTER_", "TMPDIR")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "AUTH")
_T = TypeVar("_T")


def read_machine(env: Mapping[str, str]) -> dict[str, Any]:
    """The fields of Facts that come from here."""
    host = socket.gethostname()
    addresses = within(SHORT_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    address = None if isinstance(addresses, Trouble) or not addresses else str(addresses[0][4][0])
    cpu_limit, ram_limit, ram_used = cgroup_limits()
    ram = psutil.virtual_memory()
    shm = within(SHORT_S, lambda: shutil.disk_usage("/dev/shm"))
    nccl_files = (
        Path("/etc/nccl.conf"),
        Path.home() / ".nccl.conf",
        Path(env.get("NCCL_CONF_FILE") or "/etc/nccl.conf"),
    )
    return {
        "packages": packages(),
        "plugins": tuple(sorted({one.name for one in metadata.entry_points(group="verl.plugins")})),
        "env": {name: value for name, value in env.items() if matters(name)},
        "pci_gpus": pci_gpus(),
        "kernel_driver": kernel_driver(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu_limit": cpu_limit,
        "ram": ram.total,
        "ram_available": min(ram.available, max(ram_limit - ram_used, 0)) if ram_limit is not None else ram.available,
        "ram_limit": ram_limit,
        "shm": None if isinstance(shm, Trouble) else shm.total,
        "shm_free": None if isinstance(shm, Trouble) else shm.free,
        "memlock": _limit(resource.RLIMIT_MEMLOCK, 0),
        "open_files": _limit(resource.RLIMIT_NOFILE, 1),
        "processes": _limit(resource.RLIMIT_NPROC, 0),
        "overcommit": _number(Path("/proc/sys/vm/overcommit_memory")),
        "disks": tuple(read_disk(use, path) for use, path in places(env)),
        "host": host,
        "host_address": address,
        "reaches_itself": None if address is None else reaches(address),
        "interfaces": _interfaces(),
        "infiniband": _names(Path("/sys/class/infiniband")),
        "nccl_files": tuple(dict.fromkeys(str(path) for path in nccl_files if path.is_file())),
        "ports_taken": tuple(port for port in _ports(env) if taken(port)),
    }


def within(limit_s: float, ask: Callable[[], _T]) -> _T | Trouble:
    """The answer, or Trouble when it is an OSError or does not come in time; its thread is then left behind."""
    answer: list[_T | Trouble] = []

    def asked() -> None:
        try:
            answer.append(ask())
        except OSError as error:
            answer.append(Trouble("failed", error.strerror or str(error)))

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0] if answer else Trouble("hung", f"no answer in {limit_s:g} s")


def packages() -> dict[str, Package]:
    """Every installed distribution by its normalized name; of one that is there twice, the first on the path."""
    found: dict[str, Package] = {}
    for one in metadata.distributions():
        said = one.metadata  # read and parsed anew each time it is asked for
        name = next(iter(said.get_all("Name") or ()), "")
        if name and canonicalize_name(name) not in found:
            version = next(iter(said.get_all("Version") or ()), "")
            requires = tuple(said.get_all("Requires-Dist") or one.requires or ())
            python = next(iter(said.get_all("Requires-Python") or ()), "")
            found[canonicalize_name(name)] = Package(version, requires, python)
    return found


def ray_address(env: Mapping[str, str]) -> tuple[str, str]:
    """The cluster that ray.init() would join, and what says so: RAY_ADDRESS, else the file that `ray start` leaves; or "", ""."""
    given = env.get("RAY_ADDRESS", "")
    if given == "local":
        return "", ""
    if given and given != "auto":
        return given, "RAY_ADDRESS"
    left = Path(env.get("RAY_TMPDIR") or env.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError):
        return left.read_text().strip(), str(left)
    return given, "RAY_ADDRESS" if given else ""


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, int | None, int]:
    """CPUs and bytes that this process's control groups allow, None for no limit; and bytes in use under that of memory."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = own.read_text().splitlines()
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        controllers = names.split(",")
        for at in _upwards(path):
            if not names:  # version 2
                quota = _words(root / at / "cpu.max")
                if len(quota) == 2 and quota[0].isdigit():
                    cpus.append(int(quota[0]) / int(quota[1]))
                memory += _memory(root / at, "memory.max", "memory.current", "inactive_file")
            if "memory" in controllers:
                group = root / "memory" / at
                memory += _memory(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if "cpu" in controllers:
                folder = next((one for one in (root / names, root / "cpu") if one.is_dir()), root)
                quota_us, period = _number(folder / at / "cpu.cfs_quota_us"), _number(folder / at / "cpu.cfs_period_us")
                if quota_us is not None and period and quota_us > 0:
                    cpus.append(quota_us / period)
    least, used = min(memory, default=(None, 0), key=lambda one: one[0])
    return min(cpus, default=None), least, used


def _memory(group: Path, limit: str, current: str, cache: str) -> list[tuple[int, int]]:
    """A group's limit and what is in use, less what the kernel would give back at once; nothing where it has no limit."""
    most = _number(group / limit)
    if most is None or most >= 2**60:  # version 1 writes a number near 2**63 for none
        return []
    words = _words(group / "memory.stat")
    held = dict(zip(words[::2], words[1::2], strict=False)).get(cache, "0")
    return [(most, max((_number(group / current) or 0) - int(held), 0))]


def _upwards(path: str) -> list[str]:
    """A group, the group it is in, and so on to the root: the limits of all of them hold."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join(parts[:end]) for end in range(len(parts), -1, -1)]


def places(env: Mapping[str, str]) -> list[tuple[str, Path]]:
    """What is written where: models of the hub, temporary files of Ray and torch, runs."""
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    return [
        ("models", Path(env.get("HF_HUB_CACHE") or home / "hub")),
        ("temporary files", Path(env.get("RAY_TMPDIR") or env.get("TMPDIR") or tempfile.gettempdir())),
        ("this folder", Path.cwd()),
    ]


def read_disk(use: str, path: Path) -> Disk:
    """Room and rights at a path, or at the nearest folder above it that is there."""

    def ask() -> Disk:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        room = shutil.disk_usage(there)
        return Disk(use, str(path), there.stat().st_dev, room.total, room.free, os.access(there, os.W_OK | os.X_OK))

    asked = within(SHORT_S, ask)
    return asked if isinstance(asked, Disk) else Disk(use, str(path), error=asked.text)


def reaches(address: str) -> bool:
    """Whether a port opened here is reached under an address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as server:
            server.bind(("", 0))
            server.listen(1)
            socket.create_connection((address, server.getsockname()[1]), timeout=2.0).close()
    except OSError:
        return False
    return True


def taken(port: int) -> bool:
    """Whether somebody listens on a port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return True
    return False


def pci_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA display controllers on the PCI bus, with a driver or without."""
    with contextlib.suppress(OSError):
        return sum(
            _words(one / "vendor") == ["0x10de"] and (_words(one / "class") or [""])[0].startswith("0x03")
            for one in devices.iterdir()
        )
    return 0


def kernel_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the loaded kernel module, the first number in "NVRM version: ... Kernel Module  580.65.06"."""
    for word in _words(file):
        if word[:1].isdigit() and "." in word and word.replace(".", "").isdigit():
            return word
    return None


def matters(name: str) -> bool:
    return name.startswith(_PREFIXES) and not any(part in name for part in _SECRET)


def _ports(env: Mapping[str, str]) -> list[int]:
    master = env.get("MASTER_PORT", "")
    return [RAY_PORT, *([int(master)] if master.isdigit() and 0 < int(master) < 65536 else [])]


def _limit(of: int, which: int) -> int | None:
    value = resource.getrlimit(of)[which]
    return None if value == resource.RLIM_INFINITY else value


def _interfaces() -> tuple[str, ...]:
    """Interfaces that are up and have an address; all there are where that cannot be found out."""
    with contextlib.suppress(OSError):
        up, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
        families = (socket.AF_INET, socket.AF_INET6)
        found = [
            name
            for name, stats in up.items()
            if stats.isup and any(one.family in families for one in addresses.get(name, ()))
        ]
        if found:
            return tuple(sorted(found))
    with contextlib.suppress(OSError):
        return tuple(name for _, name in socket.if_nameindex())
    return ()


def _names(folder: Path) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(one.name for one in folder.iterdir()))
    return ()


def _words(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").split()
    return []


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].lstrip("-").isdigit() else None
