"""What a run loads, in its folder: data, and models that were given as loaded modules. The first process writes it."""

from __future__ import annotations

from pathlib import Path

from verl_shard.config.data_files import DataFiles
from verl_shard.training.data import write_rows
from verl_shard.training.inputs import Inputs
from verl_shard.training.models import as_folder, load_tokenizer
from verl_shard.training.rewards import Part, Rewards
from verl_shard.verl_plugin.local.group import Processes


def save_inputs(
    inputs: Inputs, folder: Path, processes: Processes, *, own_tokenizer: bool
) -> tuple[DataFiles, dict[str, str]]:
    """The data, and where each role's model is loaded from. own_tokenizer: one was given, and is saved too."""

    def work() -> list[tuple[DataFiles, dict[str, str]]]:
        if not processes.first:
            return [(DataFiles(Path(), Path()), {})]
        files = write_rows(inputs.rows, inputs.held_out, folder / "data")
        if own_tokenizer:
            inputs.tokenizer.save_pretrained(folder / "tokenizer")
        models: dict[str, str] = {}
        for role in ("actor", "critic", "ref"):
            given = inputs.models[role] if inputs.models[role] is not None else inputs.models["actor"]
            own = role == "actor" or given is not inputs.models["actor"]
            models[role] = (
                as_folder(role, given, inputs.tokenizer, folder / "models" / role) if own else models["actor"]
            )
        return [(files, models)]

    return processes.gather(work)[0]


def with_saved_models(inputs: Inputs, folder: Path, processes: Processes) -> Rewards | None:
    """The rewards with loaded reward models saved and named by their folders."""
    rewards, given = inputs.rewards, inputs.models["reward"]
    if rewards is None or given is None:
        return rewards
    parts: list[Part] = []
    for index, (part, item) in enumerate(
        zip(rewards.parts, given if isinstance(given, list) else [given], strict=True)
    ):
        module = item[0] if isinstance(item, tuple) else item
        if not hasattr(module, "state_dict"):
            parts.append(part)
            continue
        saved = folder / "models" / f"reward-{index}"
        if processes.first:
            as_folder("reward", module, load_tokenizer(module, None), saved)
        parts.append(Part(saved.name, str(saved), part.weight, part.model))
    processes.gather(list)
    return Rewards(tuple(parts))
