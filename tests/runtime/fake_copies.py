"""A device for streaming on the CPU, whose copies come as late as they may, and which watches their order."""

from __future__ import annotations

from typing import Any

import torch


class FakeCopies:
    """Copies are done when they are waited for and not before; until then a buffer holds NaN or other rubbish.

    Each buffer is a tensor of its own, so that weights that were not copied are seen. A copy into a buffer that was used
    must begin after a mark that is later than its last use: on a GPU it would overwrite what is still read.
    """

    made: list[FakeCopies] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, device: torch.device = torch.device("cpu"), can_pin: int = 2**62) -> None:  # noqa: B008
        self.name = device
        self.device = torch.device("cpu")
        self.now = 0
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.used: dict[int, int] = {}
        """When a buffer (its address) was last waited for: from then on it is read."""
        self.log: list[tuple[str, int]] = []
        self.buffers: list[torch.Tensor] = []
        self.pinned = 0
        self.can_pin = can_pin
        self.peak = 0
        FakeCopies.made.append(self)

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def pin(self, buffer: torch.Tensor) -> bool:
        if self.pinned + buffer.numel() > self.can_pin:
            return False
        self.pinned += buffer.numel()
        return True

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned -= buffer.numel()

    def mapped(self, buffer: torch.Tensor) -> torch.Tensor | None:
        return None

    def buffer(self, n_bytes: int) -> torch.Tensor:
        made = torch.full((n_bytes,), 255, dtype=torch.uint8)
        self.log.append(("buffer", n_bytes))
        self.buffers.append(made)
        return made

    def mark(self) -> Any:
        return self._tick()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        assert after > self.used.get(target.data_ptr(), 0), "a copy would overwrite weights that are still in use"
        target.fill_(255)
        mark = self._tick()
        self.pending.append((mark, target, source))
        self.log.append(("copy", source.data_ptr()))
        return mark

    def wait(self, mark: Any) -> None:
        while self.pending and self.pending[0][0] <= mark:
            _, target, source = self.pending.pop(0)
            target.copy_(source)
            self.used[target.data_ptr()] = self._tick()

    def settle(self) -> None:
        self.wait(self.now)
