"""Who owns which GPU: the leases of a run on made-up GPUs, and the table."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_shard import ConfigError, PPOTrainer
from verl_shard.common.tables import as_text
from verl_shard.resources import leases
from verl_shard.training import owners
from verl_shard.training.owners import Leases
from verl_shard.training.placement import Places, RolePlace
from verl_shard.verl_plugin.local.group import Processes

ALONE = Processes(0, 1, 0)


def uuids(ids: Iterable[int]) -> dict[int, str]:
    return {id: f"uuid-{id}" for id in ids}


@pytest.fixture(autouse=True)
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The GPUs that were looked at whether they are idle; leases are in a folder of their own."""
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(tmp_path / "leases"))
    seen: list[list[int]] = []

    def reserve(ids: list[int]) -> leases.Lease:
        seen.append(list(ids))
        return leases.take(uuids(ids))

    monkeypatch.setattr(owners, "gpu_uuids", uuids)
    monkeypatch.setattr(owners, "reserve", reserve)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda gpu: 0)
    return seen


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[int], int]]:
    """another(2): another process has GPU 2 leased; its pid."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    files = []

    def take(gpu: int) -> int:
        (tmp_path / "leases").mkdir(exist_ok=True)
        file = (tmp_path / "leases" / f"uuid-{gpu}").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        owner = replace(leases.Owner.me(), pid=process.pid, started=psutil.Process(process.pid).create_time())
        file.write(json.dumps(asdict(owner)))
        file.flush()
        files.append(file)
        return process.pid

    yield take
    process.communicate()
    for file in files:
        file.close()


def places(**roles: Any) -> Places:
    made = {role: RolePlace(devices, None, None, "fp32", "sdpa") for role, devices in roles.items()}
    return Places(False, (0, 1, 2, 3), made, made)


def test_a_run_takes_what_its_roles_are_on_and_a_move_the_rest(looked_at: list[list[int]]) -> None:
    held = Leases()
    held.own(places(actor=(0, 1), reward=("cpu",), ref=(1,)), ALONE, shown=False)
    assert (held.gpus, looked_at) == ((0, 1), [[0, 1]])
    assert set(leases.owners()) == {"uuid-0", "uuid-1"}
    held.take((1, 2))
    assert looked_at == [[0, 1], [2]]
    held.keep((2,))
    assert set(leases.owners()) == {"uuid-2"}
    with pytest.raises(ZeroDivisionError), held.until_failure():
        raise ZeroDivisionError
    assert leases.owners() == {}


def test_a_gpu_that_has_our_memory_is_leased_and_not_looked_at(
    looked_at: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda gpu: gpu)
    held = Leases()
    held.take((0, 1))
    assert looked_at == [[0]]
    assert set(leases.owners()) == {"uuid-0", "uuid-1"}
    held.keep(())


def test_a_run_whose_gpu_another_has_is_refused(
    another: Callable[[int], int], trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = another(2)
    made = trainer()
    made._inputs = replace(made._inputs, places=places(actor=(0,), critic=(2,)))
    with pytest.raises(ConfigError, match=rf"GPU 2 = uuid-2: leased by pid {pid} of "):
        made.train()
    assert made._leases.gpus == ()
    assert "uuid-0" not in leases.owners()


def test_leases_end_with_the_training(
    trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[set[str]] = []

    def failing(made: PPOTrainer, step: int, _: Any) -> None:
        seen.append(set(leases.owners()))
        raise ZeroDivisionError

    # Its models are on the CPU: only what is leased goes by what is said here.
    monkeypatch.setattr(Places, "gpus", (1, 3))
    made = trainer(callbacks=[failing])
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert seen == [{"uuid-1", "uuid-3"}]
    assert leases.owners() == {}


def test_the_table() -> None:
    roles = dict(places(actor=(0, 1), critic=(1,), reward=("cpu",)).roles)
    roles["ref"] = replace(roles["actor"], devices=(2,))
    shown = as_text(100, owners.owners(Places(False, (0, 1, 2, 3), roles, roles), ALONE))
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line.startswith("│")
    ]
    assert rows == [
        ["GPU 0", "actor (device_map), rollout (device_map)"],
        ["GPU 1", "actor (device_map), rollout (device_map), critic"],
        ["GPU 2", "ref"],
        ["GPU 3", "nobody"],
        ["CPU", "reward"],
    ]
