"""Random weights at the cost of a copy: benches make models of billions of parameters that only have to be finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DRAWN = 1_000_003
"""Numbers that are drawn; weights are copies of them. A prime, so that no two rows of a matrix are the same."""
_STEP = 611_953
"""How many numbers later each weight begins than the one before."""


@contextmanager
def quick_weights(seed: int) -> Iterator[None]:
    """While it lasts, what fills a tensor with normal or uniform numbers copies some that were drawn once.

    Drawing those of one billion parameters takes a CPU about a minute. They are the same on each device, up to its rounding.
    """
    chance = torch.Generator().manual_seed(seed)
    normal = torch.empty(_DRAWN, device="cpu").normal_(generator=chance)
    uniform = torch.empty(_DRAWN, device="cpu").uniform_(generator=chance)
    n_filled = 0

    def fill(tensor: torch.Tensor, drawn: torch.Tensor, factor: float, added: float) -> torch.Tensor:
        nonlocal n_filled
        if tensor.device.type == "meta":
            return tensor
        start = n_filled * _STEP % _DRAWN
        n_filled += 1
        numbers = (torch.cat([drawn[start:], drawn[:start]]) * factor + added).to(tensor.device, tensor.dtype)
        n = tensor.numel()
        whole = n // _DRAWN * _DRAWN
        flat = tensor.detach().reshape(-1)  # a copy where it is not contiguous
        flat[:whole].view(-1, _DRAWN).copy_(numbers.expand(whole // _DRAWN, _DRAWN))
        flat[whole:].copy_(numbers[: n - whole])
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))
        return tensor

    def normal_(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        return fill(tensor, normal, std, mean)

    def uniform_(
        tensor: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None, **ends: float
    ) -> Any:
        start, end = ends.get("from", low), ends.get("to", high)
        return fill(tensor, uniform, end - start, start)

    # torch.Tensor inherits both, so that taking these away is enough.
    for name, filled in (("normal_", normal_), ("uniform_", uniform_)):
        setattr(torch.Tensor, name, filled)
    try:
        yield
    finally:
        for name in ("normal_", "uniform_"):
            delattr(torch.Tensor, name)
