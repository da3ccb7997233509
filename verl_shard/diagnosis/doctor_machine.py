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

from verl_shard.common.files import number_of, words_of
from verl_shard.diagnosis.doctor_facts import Disk, Package, Trouble
from verl_shard.diagnosis.doctor_network import RAY_PORT
from verl_shard.resources.limits import host_memory, read_limits

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
    limits = read_limits()
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
        "cpu_limit": limits.cpus,
        "ram": psutil.virtual_memory().total,
        "ram_available": host_memory(limits).available,
        "ram_limit": limits.memory,
        "shm": None if isinstance(shm, Trouble) else shm.total,
        "shm_free": None if isinstance(shm, Trouble) else shm.free,
        "memlock": _limit(resource.RLIMIT_MEMLOCK, 0),
        "open_files": _limit(resource.RLIMIT_NOFILE, 1),
        "processes": _limit(resource.RLIMIT_NPROC, 0),
        "overcommit": number_of(Path("/proc/sys/vm/overcommit_memory")),
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
            words_of(one / "vendor") == ["0x10de"] and (words_of(one / "class") or [""])[0].startswith("0x03")
            for one in devices.iterdir()
        )
    return 0


def kernel_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the loaded kernel module, the first number in "NVRM version: ... Kernel Module  580.65.06"."""
    for word in words_of(file):
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
