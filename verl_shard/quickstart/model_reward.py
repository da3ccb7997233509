"""A reward model as the reward of a quick start, with the exact reward measured beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_shard.common.errors import config_error
from verl_shard.common.notices import notice
from verl_shard.config.data_files import DataFiles
from verl_shard.config.run_folder import RunFolder
from verl_shard.mapping.devices import parse_device
from verl_shard.training.rewards import MESSAGES, Part, Rewards

FUNCTION = "pkg://verl_shard.training.handed_reward:compute_score"
"""verl's custom reward function of such a run."""
DEVICE = "--reward-device"
EXACT = "exact"
"""The name, among verl's validation metrics, of the reward that is measured and not trained on."""


_RESIDENT = 0.02
"""The part of a GPU that a reward model's weights may take beside what trains there; larger ones are streamed."""


def rewards_of(scoring: Mapping[str, Any]) -> Rewards:
    """scoring: the model's folder and dtype, and the function to measure by, or None, as run.json keeps it; and the device
    that was asked for, if one was. Raises as `loading_of`."""
    parts = [Part("model", scoring["folder"], 1.0, loading_of(scoring))]
    if scoring["exact"] is not None:
        parts.append(Part(EXACT, scoring["exact"], 0.0))
    return Rewards(tuple(parts))


def loading_of(scoring: Mapping[str, Any]) -> dict[str, Any]:
    """How the reward model is loaded: on the device asked for, else on the run's first GPU, which a notice says, or on the CPU
    where there is none. On a GPU a small one is resident, and a large one streamed from host memory in bfloat16.

    Raises ConfigError for a device that is not there.
    """
    import torch

    from verl_shard.models.read import read_spec

    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = scoring.get("device")
    device = parse_device(asked, DEVICE) if asked is not None else 0 if n_gpus else "cpu"
    if not isinstance(device, int):
        return {"device_map": "cpu", "dtype": scoring["dtype"]}
    if device >= n_gpus:
        fix = f"Use one of {', '.join(f'cuda:{n}' for n in range(n_gpus))}, or cpu" if n_gpus else "Leave it out"
        raise config_error("device-missing", DEVICE, asked, f"torch sees {n_gpus} GPUs here", fix)
    room = _RESIDENT * torch.cuda.get_device_properties(device).total_memory
    size = read_spec(scoring["folder"], task="reward").n_params * 4
    how: dict[str, Any] = {"dtype": scoring["dtype"]} if size <= room else {"dtype": "bfloat16", "offload": "stream"}
    if asked is None:
        where = "its weights streamed from host memory" if "offload" in how else "its weights there"
        notice("reward-device", DEVICE, "", "it is left to us", f"the run's first GPU, cuda:{device}, {where}")
    return {"device_map": f"cuda:{device}", **how}


def hand_over_model(scoring: Mapping[str, Any], folder: Path) -> None:
    """Writes into the run's folder what verl's reward worker scores with. Raises as `loading_of`."""
    from verl_shard.training.handed_reward import hand_over

    if "device" not in scoring and (folder / "run.json").is_file():
        scoring = {**scoring, "device": RunFolder(folder).info["settings"].get("reward_device")}
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
