"""The folder of a PPOTrainer's run: made by the first process, known to all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.config.run_folder import RunFolder, can_start
from verl_shard.verl_plugin.local.group import Processes

RUNS = Path("runs")


def open_folder(
    processes: Processes,
    given: str | os.PathLike[str] | None,
    identity: Mapping[str, Any],
    *,
    resume: bool,
    runner: str,
) -> Path:
    """The run's folder, begun, or with `resume` that of a run that is there; by default the next free runs/ppo-N.

    Raises ConfigError in all processes when it is another run's.
    """
    if resume and given is None:
        raise config_error("nothing-to-resume", "resume", True, "no output_dir is given", "Name the run's folder")

    def choose() -> list[Path]:
        path = Path(given) if given is not None else _next_folder()
        try:
            if processes.first and resume:
                RunFolder.resume(path, identity)
            elif processes.first:
                can_start(path)
                RunFolder.start(path, identity, {"runner": runner})
        except ConfigError as error:
            raise _in_python(error) from None
        return [path.resolve()]

    return processes.gather(choose)[0]


def _in_python(error: ConfigError) -> ConfigError:
    """What a run's folder says of command-line flags, said of arguments."""

    def said(text: str) -> str:
        text = text.replace("--out", "output_dir").replace("Add --resume", "Set resume=True")
        return text.replace("Leave out --resume", "Leave out resume").replace("--resume", "resume")

    found = [replace(f, where=said(f.where), fix=said(f.fix)) for f in error.findings]
    return ConfigError(
        replace(f, where=f"ppo_config['{f.where[2:]}']", fix=f.fix.replace(f.where, f.where[2:]))
        if f.where.startswith("--")
        else f
        for f in found
    )


def _next_folder() -> Path:
    """The first runs/ppo-N after all that are there."""
    numbers = [int(n) for path in RUNS.glob("ppo-*") if (n := path.name.removeprefix("ppo-")).isdecimal()]
    return RUNS / f"ppo-{max(numbers, default=0) + 1}"
