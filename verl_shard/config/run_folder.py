"""The folder of a run: what is in it, whose run it is, and where a killed run goes on.

run.json         what was asked for; its "identity" must be the same to resume
plan.yaml        which role has which device_map
config.yaml      verl's whole configuration, as composed
overrides.txt    what was set in it, a line each
metrics.jsonl    a line for each step that counts: {"step": ..., "data": {verl's metrics}}
memory.jsonl     peaks by role and phase
events.jsonl     notices, failures, launches
rewards.pkl      of a run on Ray: its rewards, for verl's workers; loaded when it is the file that rewards.manifest.json names
progress.png     reward, KL and response length over the steps
checkpoints/     verl's layout; a folder global_step_N with the file WHOLE in it was written to the end, and has a manifest
launches/        verl's output and metrics for each start, killed ones included
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.common.files import append_json_line, check_writable_folder, read_json_lines, write_whole
from verl_shard.common.manifest import check_manifest

SCHEMA = "verl_shard/run/1"
WHOLE = "WHOLE"
"""Name of the file that ends a checkpoint."""


def whole_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """Checkpoints that were written to the end, by step, the oldest first."""
    found = {
        int(path.name.removeprefix("global_step_")): path
        for path in checkpoints.glob("global_step_*")
        if path.name.removeprefix("global_step_").isdigit() and (path / WHOLE).is_file()
    }
    return dict(sorted(found.items()))


def can_start(path: Path, *, where: str = "--out") -> None:
    """Raises ConfigError unless a new run may begin at `path`. Makes nothing."""
    if (path / "run.json").exists():
        raise config_error(
            "folder-of-another-run", where, path, "it is the folder of another run",
            "Add --resume to go on with that run, or name another folder",
        )  # fmt: skip
    if path.is_dir() and any(path.iterdir()):
        raise config_error(
            "folder-not-empty", where, path, "it is not empty and no run's folder", "Name another folder"
        )
    check_writable_folder(path, where)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder that exists. Use `start` or `resume`."""

    path: Path

    @classmethod
    def start(cls, path: Path, identity: Mapping[str, Any], settings: Mapping[str, Any]) -> RunFolder:
        """Begins a run. identity: what makes it this run; settings: what else was asked for.

        Raises ConfigError for a folder of another run, one with something in it, and one that cannot be written.
        """
        can_start(path)
        for name in ("checkpoints", "launches"):
            (path / name).mkdir(parents=True, exist_ok=True)
        run = cls(path)
        run._write({"identity": dict(identity), "settings": dict(settings), "ready": False, "created": time.time()})
        return run

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, Any]) -> RunFolder:
        """Opens the folder of a run to go on with it. Raises ConfigError if it is another run's or no run's.

        identity: what is said of the run now; what is not said is as the run has it.
        """
        if not (path / "run.json").is_file():
            raise config_error(
                "nothing-to-resume",
                "--resume",
                path,
                "there is no run.json in it",
                "Leave out --resume to start a run there",
            )
        check_writable_folder(path, "--out")
        run = cls(path)
        then = run.info["identity"]
        differing = [key for key, value in identity.items() if then.get(key) != value]
        if differing:
            raise ConfigError(
                Finding(
                    "error", "another-run", f"--{key}", str(identity[key]),
                    f"the run in {path} has {then.get(key)}",
                    f"Give --{key} as that run has it, or start a run in another folder",
                )
                for key in differing
            )  # fmt: skip
        return run

    @property
    def info(self) -> dict[str, Any]:
        """The content of run.json. Raises ConfigError when it cannot be read as one."""
        file = self.path / "run.json"
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise config_error(
                "bad-run-file", str(file), None, f"not JSON ({error})", "Start a run in another folder"
            ) from None
        if not isinstance(info, dict) or info.get("schema") != SCHEMA:
            raise config_error(
                "bad-run-file", str(file), None, f"its schema is not {SCHEMA}", "Start a run in another folder"
            )
        return info

    def _write(self, info: Mapping[str, Any]) -> None:
        write_whole(self.path / "run.json", json.dumps({"schema": SCHEMA, **info}, indent=2, default=str) + "\n")

    def update(self, **fields: Any) -> None:
        """Changes fields of run.json."""
        self._write({**self.info, **fields})

    @property
    def metrics_file(self) -> Path:
        """A line for each step that counts."""
        return self.path / "metrics.jsonl"

    def new_launch(self) -> Launch:
        """A place for the output of one more start of verl, which begins after the last whole checkpoint.

        Raises ConfigError when that checkpoint's files are not those that were saved: loading them would run what is in them.
        """
        checkpoints = whole_checkpoints(self.path / "checkpoints")
        number = 1 + max((launch.number for launch in self.launches()), default=0)
        launch = Launch(self.path / "launches", number)
        step, checkpoint = max(checkpoints.items(), default=(0, None))
        if checkpoint is not None:
            check_manifest(checkpoint)
        write_whole(launch.start_file, json.dumps({"after_step": step, "checkpoint": checkpoint and str(checkpoint)}))
        return launch

    def launches(self) -> list[Launch]:
        """The starts of verl so far, in order."""
        files = (self.path / "launches").glob("*.start.json")
        return [Launch(self.path / "launches", number) for number in sorted(int(f.name.split(".")[0]) for f in files)]

    def metrics(self) -> list[dict[str, Any]]:
        """One record for each step that counts, from all launches.

        A launch that begins after step s makes what earlier ones logged beyond s undone.
        """
        kept: list[dict[str, Any]] = []
        for launch in self.launches():
            # The validation before the first step is logged as the step it begins after, and is already there on a resume.
            after = launch.after_step
            kept = [record for record in kept if record["step"] <= after]
            kept += [record for record in launch.records() if record["step"] > after or (after == 0 and not kept)]
        return kept

    def write_metrics(self) -> None:
        """Writes metrics.jsonl anew from the launches."""
        write_whole(self.metrics_file, "".join(json.dumps(record) + "\n" for record in self.metrics()))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Adds the record of a step that has just ended to metrics.jsonl."""
        append_json_line(self.metrics_file, record)


@dataclass(frozen=True)
class Launch:
    """The files of one start of verl."""

    folder: Path
    number: int

    @property
    def start_file(self) -> Path:
        return self.folder / f"{self.number}.start.json"

    @property
    def log_file(self) -> Path:
        """What verl and its workers print."""
        return self.folder / f"{self.number}.log"

    @property
    def metrics_file(self) -> Path:
        """What verl's file logger writes."""
        return self.folder / f"{self.number}.metrics.jsonl"

    @property
    def after_step(self) -> int:
        """The step whose checkpoint this launch begins with; 0 for the very beginning."""
        return int(json.loads(self.start_file.read_text(encoding="utf-8"))["after_step"])

    @property
    def checkpoint(self) -> str | None:
        """The folder of that checkpoint."""
        path = json.loads(self.start_file.read_text(encoding="utf-8"))["checkpoint"]
        return None if path is None else str(path)

    def records(self) -> list[dict[str, Any]]:
        """The steps that it logged."""
        return list(read_json_lines(self.metrics_file))
