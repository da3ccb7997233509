"""What control groups allow, on trees of files as the kernel writes them, and who goes by it."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from verl_shard.config.cards import find_card
from verl_shard.diagnosis.doctor_machine import read_machine
from verl_shard.resources import limits
from verl_shard.resources.limits import (
    HostMemory,
    Limits,
    available_host_memory,
    host_memory,
    read_limits,
    usable_cores,
)
from verl_shard.resources.probe import probe
from verl_shard.runtime.pinned import room_to_pin

GIB = 2**30
NONE_IN_V1 = "9223372036854771712\n"
Machine = namedtuple("Machine", ["total", "available"])


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def own(folder: Path, text: str) -> Path:
    return write(folder, {"own": text}) / "own"


def test_version_2_holds_from_the_root_down(tmp_path: Path) -> None:
    root = write(
        tmp_path / "v2", {
            "kube/memory.max": "1000\n", "kube/memory.current": "900\n", "kube/memory.stat": "anon 100\ninactive_file 300\n",
            "kube/pod1/memory.max": "max\n", "kube/cpu.max": "max 100000\n", "kube/pod1/cpu.max": "250000 100000\n",
        },
    )  # fmt: skip
    of = own(tmp_path, "0::/kube/pod1\n")
    # 900 in use, of which 300 are files that the kernel gives back.
    assert read_limits(root, of) == Limits(2.5, 1000, 400)
    assert read_limits(tmp_path / "none", of) == read_limits(root, tmp_path / "none") == Limits(None, None, None)


def test_what_is_left_is_of_the_fullest_group_and_the_limit_of_the_smallest(tmp_path: Path) -> None:
    root = write(
        tmp_path / "v2", {
            "a/memory.max": "5000\n", "a/memory.current": "4900\n",  # others are in it too
            "a/b/memory.max": "1000\n", "a/b/memory.current": "300\n", "a/b/cpu.max": "300000 100000\n",
            "a/cpu.max": "150000 100000\n",
        },
    )  # fmt: skip
    assert read_limits(root, own(tmp_path, "0::/a/b\n")) == Limits(1.5, 1000, 100)


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = write(tmp_path / "v2", {"memory.max": "3000\n", "memory.current": "5000\n"})
    assert read_limits(root, own(tmp_path, "0::/\n")) == Limits(None, 3000, 0)
    # A path of the host, which is not there inside.
    assert read_limits(root, own(tmp_path, "0::/../../host.slice\n")) == Limits(None, 3000, 0)


def test_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path / "v1", {
            "memory/memory.limit_in_bytes": NONE_IN_V1, "memory/memory.usage_in_bytes": "90000\n",
            "memory/docker/x/memory.limit_in_bytes": "64000\n", "memory/docker/x/memory.usage_in_bytes": "5000\n",
            "memory/docker/x/memory.stat": "inactive_file 7\ntotal_inactive_file 1000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
        },
    )  # fmt: skip
    of = own(tmp_path, "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n0::/docker/x\n")
    assert read_limits(root, of) == Limits(4.0, 64000, 60000)
    assert read_limits(root, own(tmp_path, "4:memory:/\n3:cpu,cpuacct:/\n")) == Limits(None, None, None)


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, 6), ("max 100000", 6), ("250000 100000", 3), ("50000 100000", 1), ("900000 100000", 6)]
)
def test_cores_are_those_that_may_be_run_on_within_the_quota(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 threads on the two CPUs of a container take several times as long as two."""
    root = write(tmp_path / "v2", {"pod/cpu.max": f"{quota}\n"} if quota else {"pod/other": ""})
    monkeypatch.setattr(limits, "GROUPS", root)
    monkeypatch.setattr(limits, "OWN", own(tmp_path, "0::/pod\n"))
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: set(range(6)))
    assert usable_cores() == cores


def test_host_memory_is_the_least_of_the_machine_and_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: Machine(1000, 700))
    assert host_memory(Limits()) == HostMemory(1000, 700)
    assert host_memory(Limits(memory=800, memory_left=600)) == HostMemory(800, 600)
    assert host_memory(Limits(memory=5000, memory_left=900)) == HostMemory(1000, 700)

    def hidden() -> Machine:
        raise PermissionError

    monkeypatch.setattr("psutil.virtual_memory", hidden)
    assert available_host_memory() is None


def test_a_probe_pinning_and_the_doctor_go_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(
        tmp_path / "groups", {
            "memory/memory.limit_in_bytes": f"{64 * GIB}\n", "memory/memory.usage_in_bytes": f"{24 * GIB}\n",
        },
    )  # fmt: skip
    monkeypatch.setattr(limits, "GROUPS", root)
    monkeypatch.setattr(limits, "OWN", own(tmp_path, "4:memory:/\n"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: Machine(512 * GIB, 400 * GIB))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    card = find_card("h200")
    there = namedtuple("Card", ["name", "total_memory", "major", "minor"])("NVIDIA H200", card.memory, 9, 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda gpu: there)
    (node,) = probe().nodes
    assert node.host_memory == 64 * GIB
    assert room_to_pin(None) == 38 * GIB  # a twentieth of 40 GiB stays
    found = read_machine({})
    assert (found["ram"], found["ram_limit"], found["ram_available"]) == (512 * GIB, 64 * GIB, 40 * GIB)
