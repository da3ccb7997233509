"""A named part of the memory of a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Part:
    """Bytes of one kind. how: taken from a traced pass, or from a closed formula of `terms`.

    measured: whether a measurement on a GPU covers it: one rank, without a rollout engine. What several ranks, NCCL, vLLM
    and SGLang take is read from their source or reported by users.
    """

    name: str
    n_bytes: int
    how: Literal["trace", "formula"]
    measured: bool
