"""How many threads an actor scores with: all that there are where Ray gave it one, and else those that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_shard.common.notices import ShardNotice
from verl_shard.verl_plugin.fork_server import LAUNCH_MARK
from verl_shard.verl_plugin.reward import threads
from verl_shard.verl_plugin.reward.server import RewardServer
from verl_shard.verl_plugin.reward.threads import take_cores

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.delenv(LAUNCH_MARK, raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    yield
    torch.set_num_threads(before)


def on(*devices: torch.device) -> Any:
    return SimpleNamespace(devices=list(devices))


def test_a_model_on_the_cpu_takes_all_cores_and_says_so() -> None:
    with pytest.warns(ShardNotice, match=r"OMP_NUM_THREADS = .*Ray sets.*Using 3 threads"):
        assert take_cores(on(GPU, CPU)) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("case", ["on a GPU", "more than one thread", "a launch of ours", "one core"])
def test_others_keep_what_they_have(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "more than one thread":
        torch.set_num_threads(2)
    if case == "a launch of ours":
        monkeypatch.setenv(LAUNCH_MARK, "1")
    if case == "one core":
        monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    expected = torch.get_num_threads()
    assert take_cores(on(GPU if case == "on a GPU" else CPU)) == expected == torch.get_num_threads()


def test_each_thread_that_scores_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of threads is a thread's own, and a server scores in others than it is made in."""
    seen: list[int] = []

    class Model:
        devices = [CPU]  # noqa: RUF012

        def score(self, asked: Any) -> list[float]:
            seen.append(torch.get_num_threads())
            return [0.0 for _ in asked]

    server = RewardServer("model", {})
    server._model = Model()

    async def ask() -> None:
        with pytest.warns(ShardNotice):
            await server._conversations.score([[{"role": "user", "content": "a"}]])

    asyncio.run(ask())
    assert seen == [3]
