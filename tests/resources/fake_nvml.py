"""NVIDIA's library without a driver: what `pynvml` answers, from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


@dataclass
class Card:
    """processes: (pid, bytes or None). silent: questions that this card does not answer."""

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    used: int = GIB // 2
    utilization: int = 0
    temperature: int = 30
    processes: Sequence[tuple[int, int | None]] = ()
    silent: set[str] = field(default_factory=set)


class FakeNvml:
    """Takes the place of the module."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, cards: Sequence[Card], *, driver: bool = True) -> None:
        self.cards, self.driver, self.open = list(cards), driver, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:  # noqa: N802
        assert self.open == 1
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:  # noqa: N802
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> bytes:  # noqa: N802
        return card.name.encode()

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(total=card.total, used=card.used, free=card.total - card.used)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        self._answers(card, "utilization")
        return SimpleNamespace(gpu=card.utilization, memory=0)

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:  # noqa: N802
        self._answers(card, "temperature")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return card.temperature

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:  # noqa: N802
        self._answers(card, "processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[Any]:  # noqa: N802
        self._answers(card, "graphics")
        return []

    def _answers(self, card: Card, question: str) -> None:
        if question in card.silent:
            raise self.NVMLError("Not Supported")
