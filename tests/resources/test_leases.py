"""Leases between real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resources.fake_nvml import Card, FakeNvml

from verl_shard.common.errors import ConfigError
from verl_shard.resources.leases import Owner, owners, take
from verl_shard.resources.pin import pin_to_device, reserve

HOLDER = """\
import sys
from verl_shard.resources.leases import take
from verl_shard.common.errors import ConfigError
assert "torch" not in sys.modules
try:
    lease = take({0: sys.argv[1]})
except ConfigError as error:
    print("refused", error, flush=True)
else:
    print("taken", flush=True)
    sys.stdin.read()
"""


RUN = """\
import sys
from resources.fake_nvml import Card, FakeNvml
sys.modules["pynvml"] = FakeNvml([Card("GPU-a"), Card("GPU-b"), Card("GPU-c")])
from verl_shard.common.errors import ConfigError
from verl_shard.resources.pin import reserve
print("ready", flush=True)
for line in sys.stdin:
    try:
        lease = reserve(line.strip())
    except ConfigError as error:
        print("refused", str(error).replace(chr(10), " | "), flush=True)
    else:
        print("taken", flush=True)
"""


class Run:
    """A run on this machine of three GPUs: another process, which reserves those that it is told to."""

    def __init__(self) -> None:
        here = str(Path(__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.said() == "ready"

    def ask(self, gpus: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{gpus}\n")
        self.process.stdin.flush()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Holder:
    """Another process that takes a lease and keeps it until it is told to end."""

    def __init__(self, uuid: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, uuid], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.communicate(timeout=20)


@pytest.fixture
def holder() -> Iterator[Callable[[str], Holder]]:
    made: list[Holder] = []

    def start(uuid: str) -> Holder:
        made.append(Holder(uuid))
        return made[-1]

    yield start
    for one in made:
        one.end()


def test_two_runs_do_not_take_the_same_gpu(holder: Callable[[str], Holder]) -> None:
    first = holder("GPU-a")
    assert first.said == "taken"
    assert holder("GPU-b").said == "taken"
    second = holder("GPU-a")
    assert second.said.startswith(f"refused GPU 0 = GPU-a: leased by pid {first.process.pid} of ")
    with pytest.raises(ConfigError) as caught:
        take({0: "GPU-c", 1: "GPU-a", 2: "GPU-b"})
    assert [finding.where for finding in caught.value.findings] == ["GPU 1", "GPU 2"]
    # All or none: the one that was free is free again.
    assert sorted(owners()) == ["GPU-a", "GPU-b"]
    assert owners()["GPU-a"].pid == first.process.pid
    assert sys.executable in owners()["GPU-a"].command


@pytest.mark.parametrize("kill", [False, True])
def test_a_lease_ends_with_its_process_however_that_ends(
    kill: bool, holder: Callable[[str], Holder], folder: Path
) -> None:
    first = holder("GPU-a")
    first.end(kill=kill)
    assert json.loads((folder / "GPU-a").read_text())["pid"] == first.process.pid  # the file is stale
    assert owners() == {}
    assert holder("GPU-a").said == "taken"


def test_a_lock_that_outlives_its_owner_is_nobodys(folder: Path) -> None:
    """The owner is gone, and something that it started still has its file open."""
    code = """\
import os, subprocess, sys
from verl_shard.resources import leases
leases.take({0: "GPU-a"})
descriptor = leases._held["GPU-a"].descriptor
os.set_inheritable(descriptor, True)
waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
subprocess.Popen(waits, stdin=0, stdout=subprocess.DEVNULL, close_fds=False)
os._exit(0)
"""
    read, write = os.pipe()
    subprocess.run([sys.executable, "-c", code], stdin=read, stdout=subprocess.PIPE, check=True)
    before = (folder / "GPU-a").stat().st_ino
    assert owners() == {}
    with take({0: "GPU-a"}):
        assert (folder / "GPU-a").stat().st_ino != before
        assert owners()["GPU-a"].pid == os.getpid()
    os.close(write)
    os.close(read)


def test_a_process_shares_what_it_has_and_what_started_it_has(holder: Callable[[str], Holder]) -> None:
    first = take({0: "GPU-a"})
    second = take({0: "GPU-a", 1: "GPU-b"})
    # This process started it, as a launcher starts its workers.
    assert holder("GPU-a").said == "taken"
    first.release()
    first.release()
    assert sorted(owners()) == ["GPU-a", "GPU-b"]
    second.release()
    assert owners() == {}
    assert repr(second) == "Lease([0, 1], released)"


def _child_ends(queue: Any) -> None:
    from verl_shard.resources import leases

    queue.put(len(leases._held))
    time.sleep(60)


def test_a_forked_child_does_not_keep_a_lease_alive(holder: Callable[[str], Holder]) -> None:
    context = multiprocessing.get_context("fork")
    lease, queue = take({0: "GPU-a"}), context.SimpleQueue()
    child = context.Process(target=_child_ends, args=(queue,))
    child.start()
    try:
        assert queue.get() == 0
        lease.release()
        assert owners() == {}
        assert holder("GPU-a").said == "taken"
    finally:
        child.kill()
        child.join()


def test_owners_of_another_container_are_never_thought_dead() -> None:
    me = Owner.me()
    assert not me.dead
    assert me.started_me
    gone = Owner(2**22 + 5, "x", "y", 0.0, 0.0, me.space)
    assert gone.dead
    assert not gone.started_me
    assert not Owner(2**22 + 5, "x", "y", 0.0, 0.0, "pid:[1]").dead
    # The same id, and another process: it began at another time.
    assert Owner(me.pid, "x", "y", me.started - 100, 0.0, me.space).dead


def test_the_folder_is_everybodys(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        with take({0: "GPU-a"}):
            assert folder.stat().st_mode & 0o7777 == 0o1777
            assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
                ".guard": 0o666,
                "GPU-a": 0o666,
            }
    finally:
        os.umask(mask)
    (tmp_path / "elsewhere").touch()
    (folder / "GPU-b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="leases on GPUs cannot be written"):
        take({0: "GPU-b"})
    monkeypatch.setenv("VERL_SHARD_LEASES", str(tmp_path / "elsewhere" / "x"))
    with pytest.raises(ConfigError, match="VERL_SHARD_LEASES"):
        take({0: "GPU-c"})


def test_pin_to_device_leases_and_makes_the_first_current(
    machine: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    machine([Card(f"GPU-{letter}") for letter in "abcd"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    lease = pin_to_device([1, 0])
    assert current == [1]
    assert sorted(owners()) == ["GPU-b", "GPU-d"]
    lease.release()

    def fail(_: int) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with pytest.raises(RuntimeError):
        pin_to_device("cuda:2")
    assert owners() == {}
    with pytest.raises(ConfigError, match="sees 3 GPUs"):
        pin_to_device(3)


def test_a_run_reserves_what_is_idle(machine: Callable[..., FakeNvml], holder: Callable[[str], Holder]) -> None:
    machine([Card("GPU-a"), Card("GPU-b", used=50 * 2**30)])
    with pytest.raises(ConfigError, match=r"GPU 1 = NVIDIA H200: 50\.00 GiB of it are used"):
        reserve([0, 1])
    assert owners() == {}
    with reserve(0):
        assert list(owners()) == ["GPU-a"]


def test_of_runs_that_start_at_once_one_has_the_gpu_and_when_it_is_killed_another_can(folder: Path) -> None:
    runs = [Run() for _ in range(3)]
    try:
        for run in runs:
            run.ask("0,1")
        answers = [run.said() for run in runs]
        (winner,) = [run for run, answer in zip(runs, answers, strict=True) if answer == "taken"]
        losers = [run for run in runs if run is not winner]
        for answer in answers:
            for gpu, uuid in ((0, "GPU-a"), (1, "GPU-b")) if answer != "taken" else ():
                assert f"GPU {gpu} = {uuid}: leased by pid {winner.process.pid} of " in answer
        # The one GPU that is left, and all or none: a run that wants both kinds gets neither.
        losers[0].ask("2,1")
        assert losers[0].said().startswith("refused GPU 1 = GPU-b")
        losers[1].ask("2")
        assert losers[1].said() == "taken"
        winner.process.kill()  # SIGKILL: nothing of it runs any more
        winner.process.wait(20)
        assert (folder / "GPU-a").read_text()  # what it wrote is still there
        assert sorted(owners()) == ["GPU-c"]
        losers[0].ask("0-1")
        assert losers[0].said() == "taken"
        assert {uuid: owner.pid for uuid, owner in owners().items()} == {
            "GPU-a": losers[0].process.pid,
            "GPU-b": losers[0].process.pid,
            "GPU-c": losers[1].process.pid,
        }
    finally:
        for run in runs:
            run.end()
