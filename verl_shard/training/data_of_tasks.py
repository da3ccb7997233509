"""Prompts of the quick start's tasks as the parquet files verl reads: train and validation, apart and split by seed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.seeds import derive_seed
from verl_shard.config.data_files import DataFiles
from verl_shard.training.data_tasks import INSTRUCTION, SOURCE, TASKS, Entry, Task

Row = dict[str, Any]

VAL_ONE_IN = 5
"""One question in so many is for validation."""


def write_data(out_dir: Path, *, seed: int, n_train: int, n_val: int, tasks: Sequence[str] = ()) -> DataFiles:
    """Writes train.parquet and val.parquet below `out_dir`: the tasks in turn, the same rows for the same seed.

    No question is in both files. Within one a question may come back, as small number ranges have only so many.
    `tasks` are names of ours; without any, all take part.
    """
    assert n_train > 0, "nothing to train on"
    assert n_val > 0, "nothing to validate on"
    chosen = [task for task in TASKS if task.name in tasks or not tasks]
    assert len(chosen) >= len(set(tasks)), f"not all of {tasks} are tasks"
    out_dir.mkdir(parents=True, exist_ok=True)
    files = DataFiles(out_dir / "train.parquet", out_dir / "val.parquet")
    _write(files.train, _rows("train", seed, n_train, chosen))
    _write(files.val, _rows("val", seed, n_val, chosen))
    return files


def read_rows(path: Path) -> list[Row]:
    """The rows of a parquet file, nested columns as dicts and lists."""
    import pyarrow.parquet

    rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def entry_of(row: Row) -> Entry:
    """The reasoning-gym entry that a row was made of."""
    entry: Entry = json.loads(row["extra_info"]["entry"])
    return entry


def _rows(split: str, seed: int, count: int, tasks: Sequence[Task]) -> list[Row]:
    streams = [(task, task.entries(derive_seed(seed, "data", split, task.name))) for task in tasks]
    rows: list[Row] = []
    while len(rows) < count:
        task, entries = streams[len(rows) % len(streams)]
        entry = next(entry for entry in entries if _split_of(entry["question"], seed) == split)
        rows.append(_row(task, entry, split, len(rows)))
    return rows


def _split_of(question: str, seed: int) -> str:
    """Each question belongs to one split, whatever else is drawn: so the two files cannot share one."""
    return "val" if derive_seed(seed, "split", question) % VAL_ONE_IN == 0 else "train"


def _row(task: Task, entry: Entry, split: str, index: int) -> Row:
    return {
        "data_source": SOURCE + task.name,
        "prompt": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": entry["question"]},
        ],
        "ability": task.ability,
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"split": split, "index": index, "entry": json.dumps(entry)},
    }


def _write(path: Path, rows: list[Row]) -> None:
    import pyarrow
    import pyarrow.parquet

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
