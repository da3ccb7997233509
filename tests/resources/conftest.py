from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from resources.fake_nvml import Card, FakeNvml

from verl_shard.resources import leases


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Leases of this test alone."""
    folder = tmp_path / "leases"
    monkeypatch.setenv(leases.FOLDER_VARIABLE, str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    yield folder
    for uuid in list(leases._held):
        leases._held[uuid].times = 1
        leases._give_back(uuid)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """machine(cards): a machine with these."""

    def make(cards: Sequence[Card], **more: bool) -> FakeNvml:
        fake = FakeNvml(cards, **more)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        return fake

    return make
