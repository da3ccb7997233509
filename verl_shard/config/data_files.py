"""The data of a run: two files in verl's columns, and which rows validate when none are given for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from verl_shard.common.seeds import derive_seed

HELD_OUT = 0.1
"""Share of the rows that validates when no validation data is given, and at most this many rows."""
MOST_HELD_OUT = 256


@dataclass(frozen=True)
class DataFiles:
    """The two parquet files of a run."""

    train: Path
    val: Path


def hold_out(n_rows: int, seed: int) -> tuple[list[int], list[int]]:
    """(rows that train, rows that validate) of so many, each in their order: the same for the same seed."""
    rows = list(range(n_rows))
    random.Random(derive_seed(seed, "held out")).shuffle(rows)
    held = min(max(1, int(n_rows * HELD_OUT)), MOST_HELD_OUT)
    return sorted(rows[held:]), sorted(rows[:held])
