"""Shares of a batch, and what processes tell each other. The group is made up: each test says what the others send."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.common.errors import ConfigError, RunError, config_error
from verl_shard.verl_plugin.local.group import Processes, launched, worker_environment


@given(st.lists(st.integers(), max_size=30), st.integers(1, 6))
def test_shares_put_together_are_the_whole(items: list[int], size: int) -> None:
    shares = [Processes(rank, size, rank).share(items) for rank in range(size)]
    assert sorted(x for share in shares for x in share) == sorted(items)
    # Mini-batch after mini-batch: of any block of a multiple of `size` items each has as many.
    assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def gather(into: list[Any], mine: Any) -> None:
        into[:] = [(share, None) for share in shares]
        assert mine == (shares[0], None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_object", gather)
        assert Processes(0, size, 0).gather(lambda: shares[0]) == items


def test_an_error_of_another_process_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: list[Any], mine: Any) -> None:
        into[:] = [mine, (None, failure)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    failure: Exception = RunError("it broke")
    with pytest.raises(RunError, match="process 1 of 2 failed: it broke"):
        Processes(0, 2, 0).gather(lambda: [1])
    failure = config_error("code", "where", 1, "why", "fix")
    with pytest.raises(ConfigError, match="where = 1: why"):
        Processes(0, 2, 0).gather(lambda: [1])


def test_an_error_of_this_process_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def gather(into: list[Any], mine: Any) -> None:
        told.append(mine)
        into[:] = [mine, ([], None)]

    def broken() -> list[int]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(RunError, match="process 0 of 2 failed: ZeroDivisionError: by zero"):
        Processes(0, 2, 0).gather(broken)
    assert isinstance(told[0][1], RunError)


def test_the_environment_of_a_worker_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with worker_environment(Processes(1, 2, 1)):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("1", "2", "1")
        assert "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" not in os.environ
        assert "MASTER_ADDR" in os.environ
    assert (os.environ["RANK"], os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]) == ("3", "1")
    assert "MASTER_ADDR" not in os.environ


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == (0, 1, 0)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched() == (5, 8, 1)
