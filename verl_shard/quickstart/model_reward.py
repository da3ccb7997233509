"""A reward model as the reward of a quick start, with the exact reward measured beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_shard.config.data_files import DataFiles
from verl_shard.training.rewards import MESSAGES, Part, Rewards

FUNCTION = "pkg://verl_shard.training.handed_reward:compute_score"
"""verl's custom reward function of such a run."""
EXACT = "exact"
"""The name, among verl's validation metrics, of the reward that is measured and not trained on."""


def rewards_of(scoring: Mapping[str, Any]) -> Rewards:
    """scoring: the model's folder and dtype, and the function to measure by, or None; as run.json keeps it."""
    parts = [Part("model", scoring["folder"], 1.0, {"device_map": "cpu", "dtype": scoring["dtype"]})]
    if scoring["exact"] is not None:
        parts.append(Part(EXACT, scoring["exact"], 0.0))
    return Rewards(tuple(parts))


def hand_over_model(scoring: Mapping[str, Any], folder: Path) -> None:
    """Writes into the run's folder what verl's reward worker scores with."""
    from verl_shard.training.handed_reward import hand_over

    hand_over(rewards_of(scoring), folder)


def add_messages(files: DataFiles) -> None:
    """Adds each row's prompt to its extra_info, as text: verl hands a reward function the response, and not the question."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (files.train, files.val):
        table = pq.read_table(path)
        rows = table.select([name for name in ("prompt", "extra_info") if name in table.column_names]).to_pylist()
        extra = pa.array([{**(row.get("extra_info") or {}), MESSAGES: json.dumps(row["prompt"])} for row in rows])
        if "extra_info" in table.column_names:
            table = table.set_column(table.column_names.index("extra_info"), "extra_info", extra)
        else:
            table = table.append_column("extra_info", extra)
        pq.write_table(table, path)
