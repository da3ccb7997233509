"""devices="process": each process of a launcher takes its own GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from verl_shard import build_device_map
from verl_shard.common.errors import ConfigError

_CONFIG = AutoConfig.for_model(
    "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
)


def _map(monkeypatch: pytest.MonkeyPatch, rank: object, processes: object, n_gpus: int = 8) -> Any:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    return build_device_map(_CONFIG, n_gpus, devices="process")


def test_eight_gpus_and_four_processes_give_each_two(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [list(_map(monkeypatch, rank, 4).loads) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [dict(_map(monkeypatch, rank, 8)) for rank in range(8)] == [{"": rank} for rank in range(8)]


def test_without_a_launcher_it_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert list(build_device_map(_CONFIG, 3, devices="process").loads) == [0, 1, 2]


@pytest.mark.parametrize(
    ("rank", "processes", "n_gpus", "message"),
    [
        (0, 4, 2, "each process needs a GPU of its own. Start 2 or fewer"),
        (0, 3, 8, r"8 is not a multiple of 3. Start 1, 2, 4, 8 processes, or hide 2"),
        (4, 4, 8, "LOCAL_RANK is not below LOCAL_WORLD_SIZE"),
        ("one", 4, 8, "LOCAL_RANK=one"),
    ],
)
def test_what_cannot_be_shared(
    rank: object, processes: object, n_gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        _map(monkeypatch, rank, processes, n_gpus)
