"""What the GPUs are doing, asked of a library that answers from plain values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
from resources.fake_nvml import GIB, Card, FakeNvml

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.resources.leases import take
from verl_shard.resources.usage import GpuProcess, GpuUsage, check_idle, get_gpu_usage, read_ids

Machine = Callable[..., FakeNvml]
NO_PID = 2**22 + 5
"""Above the largest pid there can be: a process of another container."""


def test_every_gpu_with_all_that_the_driver_says(machine: Machine) -> None:
    me = os.getpid()
    cards = [
        Card("GPU-a", used=70 * GIB, utilization=97, temperature=61, processes=[(me, 40 * GIB), (NO_PID, None)]),
        Card("GPU-b", silent={"utilization", "temperature", "processes", "graphics"}),
        Card("GPU-c", processes=[(me, 2**64 - 1)]),
    ]
    fake = machine(cards)
    first, second, third = get_gpu_usage()
    mine = first.processes[0]
    assert first == GpuUsage(
        id=0, index=0, uuid="GPU-a", name="NVIDIA H200", total=140 * GIB, used=70 * GIB, free=70 * GIB, utilization=97,
        temperature=61, processes=(mine, GpuProcess(NO_PID, None, None, None)),
    )  # fmt: skip
    assert (mine.pid, mine.memory, mine.user) == (me, 40 * GIB, psutil.Process().username())
    assert mine.command == " ".join(psutil.Process().cmdline())
    assert (second.utilization, second.temperature, second.processes) == (None, None, ())
    assert third.processes[0].memory is None
    assert fake.open == 0


def test_without_a_driver_it_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([], driver=False)
    with pytest.raises(
        ConfigError, match=r"NVIDIA's driver does not answer on this machine \(NVML Shared Library Not Found\)"
    ):
        get_gpu_usage()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigError, match="pip install nvidia-ml-py"):
        get_gpu_usage()


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [1, None, 0, None]),
        ("GPU-d,GPU-b", [None, 1, None, 0]),
        ("1,7,2", [None, 0, None, None]),
        ("1,1,2", [None, 0, None, None]),
        ("", [None] * 4),
        ("-1", [None] * 4),
        ("MIG-x", [None] * 4),
    ],
)
def test_ids_are_those_that_torch_counts(
    visible: str | None, ids: list[int | None], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine([Card(f"GPU-{letter}") for letter in "abcd"])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.id for gpu in get_gpu_usage()] == ids
    assert [gpu.index for gpu in get_gpu_usage()] == [0, 1, 2, 3]


def test_a_torch_at_work_is_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([Card("GPU-a"), Card("GPU-b")])
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda ordinal: SimpleNamespace(uuid="ba"[ordinal]),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert [(gpu.uuid, gpu.id) for gpu in get_gpu_usage()] == [("GPU-a", 1), ("GPU-b", 0)]


def test_several_kinds_may_be_counted_otherwise(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([Card("GPU-a", name="L4"), Card("GPU-b", name="H200")])
    with pytest.warns(ShardNotice, match=r"GPU ids = L4, H200: there are several kinds"):
        get_gpu_usage()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    get_gpu_usage()


@pytest.mark.parametrize(
    ("given", "ids"),
    [(2, (2,)), ([0, 1], (0, 1)), ("0-2", (0, 1, 2)), ("cuda:1", (1,)), ((3, 1), (3, 1)), (range(2), (0, 1))],
)
def test_ids_as_people_write_them(given: object, ids: tuple[int, ...], machine: Machine) -> None:
    machine([Card(f"GPU-{n}") for n in range(4)])
    assert read_ids(given) == ids  # type: ignore[arg-type]
    assert [gpu.id for gpu in get_gpu_usage(given)] == list(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "why"),
    [([0, 0], "one is named twice"), ([], "no GPU is named"), ("x", "they name no GPU"), (4, "this process sees 4 GPUs, 0 to 3"),
     (True, "they name no GPU"), ([-1], "this process sees 4 GPUs")],
)  # fmt: skip
def test_ids_that_name_none(given: object, why: str, machine: Machine) -> None:
    machine([Card(f"GPU-{n}") for n in range(4)])
    with pytest.raises(ConfigError, match=why):
        get_gpu_usage(given)  # type: ignore[arg-type]


def test_who_holds_a_gpu_is_named_and_one_is_not_somebody_else(machine: Machine) -> None:
    # A process of nobody's family: the child of a child that has ended.
    waits = "import sys; sys.stdin.read()"
    start = f"subprocess.Popen([sys.executable, '-c', {waits!r}], stdin=0, stdout=-3, stderr=-3)"
    code = f"import subprocess, sys; print({start}.pid)"
    read, write = os.pipe()
    ended = subprocess.run([sys.executable, "-c", code], stdin=read, capture_output=True, text=True, check=True)
    stranger = int(ended.stdout)
    child = subprocess.Popen([sys.executable, "-c", waits], stdin=read)
    try:
        machine(
            [
                Card("GPU-a", used=40 * GIB, processes=[(os.getpid(), 20 * GIB), (child.pid, 20 * GIB)]),
                Card("GPU-b", used=21 * GIB, processes=[(stranger, 20 * GIB)]),
                Card("GPU-c", used=50 * GIB),
                Card("GPU-d", used=3 * GIB // 2),
            ]
        )
        assert [gpu.id for gpu in check_idle([3, 0])] == [3, 0]
        with pytest.raises(ConfigError) as caught:
            check_idle("0-3")
        busy = {finding.where: finding.why for finding in caught.value.findings}
        assert list(busy) == ["GPU 1", "GPU 2"]
        assert (
            busy["GPU 1"] == f"pid {stranger} of {psutil.Process().username()} ({sys.executable} -c {waits}, 20.00 GiB)"
        )
        assert busy["GPU 2"].startswith("50.00 GiB of it are used by what cannot be seen from here")
    finally:
        os.close(write)
        os.close(read)
        child.wait(20)
        psutil.wait_procs([psutil.Process(stranger)] if psutil.pid_exists(stranger) else [], 20)


def test_what_this_process_leased_is_shown_and_idle(machine: Machine) -> None:
    machine([Card("GPU-a"), Card("GPU-b")])
    with take({1: "GPU-b"}):
        first, second = get_gpu_usage()
        assert first.leased_by is None
        assert second.leased_by is not None
        assert second.leased_by.pid == os.getpid()
        check_idle([0, 1])
    assert get_gpu_usage(1)[0].leased_by is None
