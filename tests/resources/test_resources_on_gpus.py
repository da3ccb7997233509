"""A real driver: what get_gpu_usage says of real GPUs, runs that want the same one, and a GPU that somebody else uses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from verl_shard import get_gpu_usage, pin_to_device
from verl_shard.common.errors import ConfigError
from verl_shard.resources.pin import reserve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_RUN = """
import sys
import torch
from verl_shard import pin_to_device
from verl_shard.common.errors import ConfigError
try:
    lease = pin_to_device(int(sys.argv[1]))
    held = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("taken", torch.cuda.current_device(), flush=True)
except ConfigError as error:
    print("refused", " ".join(str(error).split()), flush=True)
sys.stdin.readline()
"""
_HELD = 3 * 2**30


class Run:
    """Another process that pins a GPU, holds memory of it, and stays until it is ended."""

    def __init__(self, gpu: int) -> None:
        command = [sys.executable, "-c", _RUN, str(gpu), str(_HELD)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def run(folder: Path) -> Iterator[Callable[[int], Run]]:
    """folder: of leases, which other processes find by the environment."""
    del folder
    made: list[Run] = []

    def start(gpu: int) -> Run:
        made.append(Run(gpu))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def test_the_driver_and_torch_say_the_same() -> None:
    found = get_gpu_usage()
    assert [gpu.id for gpu in found] == list(range(torch.cuda.device_count()))
    for number, gpu in enumerate(found):
        assert gpu.name == torch.cuda.get_device_name(number)
        assert str(torch.cuda.get_device_properties(number).uuid) in gpu.uuid
        assert gpu.total == pytest.approx(torch.cuda.mem_get_info(number)[1], rel=0.03)
        assert gpu.used + gpu.free == pytest.approx(gpu.total, rel=0.03)
        assert gpu.temperature is None or 10 < gpu.temperature < 110
        assert gpu.utilization is None or 0 <= gpu.utilization <= 100
    before = get_gpu_usage(0)[0].used
    held = torch.empty(_HELD, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    assert get_gpu_usage(0)[0].used - before == pytest.approx(_HELD, rel=0.05)
    del held
    torch.cuda.empty_cache()


def test_two_runs_do_not_take_the_same_gpu(run: Callable[[int], Run]) -> None:
    last = torch.cuda.device_count() - 1
    first = run(last)
    assert first.said == f"taken {last}"
    second = run(last)
    assert second.said.startswith("refused")
    assert f"leased by pid {first.process.pid} of" in second.said
    with pytest.raises(ConfigError, match=f"leased by pid {first.process.pid} of"):
        pin_to_device(last)
    assert [gpu.leased_by.pid for gpu in get_gpu_usage(last) if gpu.leased_by] == [first.process.pid]
    first.kill()  # it releases nothing itself
    third = run(last)
    assert third.said == f"taken {last}"


_STRANGER = """
import os, sys, time
import torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
with open(sys.argv[2] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[2] + ".part", sys.argv[2])
until = time.monotonic() + 120
while time.monotonic() < until and os.path.exists(sys.argv[2]):
    time.sleep(0.05)
"""


def test_a_run_does_not_begin_on_a_gpu_in_use(tmp_path: Path) -> None:
    """By a process that knows no leases, and that is no child of this one: a run's own processes are not strangers."""
    said = tmp_path / "pid"
    command = [sys.executable, "-c", _STRANGER, str(_HELD), str(said)]
    subprocess.run(["sh", "-c", '"$@" >/dev/null 2>&1 &', "sh", *command], check=True)
    until = time.monotonic() + 120
    while not said.exists():
        assert time.monotonic() < until, "it does not begin"
        time.sleep(0.05)
    stranger = psutil.Process(int(said.read_text()))
    try:
        with pytest.raises(ConfigError, match=rf"GPU 0 = .*(pid {stranger.pid} |of it are used)"):
            reserve(0)
    finally:
        said.unlink()
        stranger.wait(60)
    with reserve(0):
        assert get_gpu_usage(0)[0].leased_by is not None
