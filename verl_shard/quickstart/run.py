"""The quick start, from options to a report."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.notices import record_event
from verl_shard.common.tables import err, out
from verl_shard.common.units import format_seconds
from verl_shard.config.data_files import DataFiles
from verl_shard.config.run_folder import RunFolder, can_start, whole_checkpoints
from verl_shard.quickstart import prepare, report
from verl_shard.quickstart.check_reward_model import check_reward_model
from verl_shard.quickstart.model_reward import hand_over_model
from verl_shard.quickstart.options import QuickstartOptions
from verl_shard.quickstart.watch import watching
from verl_shard.resources.limits import usable_cores
from verl_shard.verl_plugin.fork_server import ForkServer, can_fork, fork_server
from verl_shard.verl_plugin.launch import environment, run_verl
from verl_shard.verl_plugin.overrides import RunSettings, to_overrides

RUNS = Path("runs")
NAME = "quickstart"


def quickstart(given: Mapping[str, Any], extra: Sequence[str] = ()) -> Path:
    """Runs it. given: the options that were set; extra: more overrides for verl. Returns the run folder.

    Raises ConfigError with all that is wrong with them before anything is made.
    """
    began = time.monotonic()
    # Read when torch is imported. Threads that spin while they wait take the core from the one they wait for, so the
    # warm-up's do not, beside the fork server; verl's processes compute in turn and are a third quicker with spinning.
    own_policy = "OMP_WAIT_POLICY" in os.environ
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    run, options, device = check_given(given, extra)
    # The processes of a run compute in turn, so each may have all cores.
    env = environment(cpu=device.cpu, threads=usable_cores())
    if not own_policy:
        del env["OMP_WAIT_POLICY"]
    new = run is None
    if run is None:
        run = RunFolder.start(options.out or next_folder(), options.identity(), options.settings())
    with ExitStack() as stack:
        # It imports verl while data, model and warm-up are made.
        server = stack.enter_context(fork_server(env)) if device.cpu and can_fork() else None
        try:
            files, settings = make_ready(run, options, device)
        except ConfigError:
            if new:
                shutil.rmtree(run.path)
            raise
        if not run.info["ready"]:
            if options.model is None:
                prepare.teach(settings.model, files, options.seed)
            if options.reward_model is not None:
                run.update(scoring=prepare.make_scoring(options, run, files, settings.model))
            run.update(ready=True, files=[str(files.train), str(files.val)], model=str(settings.model))
        if options.reward_model is not None:
            hand_over_model({**run.info["scoring"], "device": options.reward_device}, run.path)
        train(run, settings, env, server, extra)
    finish(run, options, time.monotonic() - began)
    return run.path


def check_given(
    given: Mapping[str, Any], extra: Sequence[str], astray: Sequence[str] = ()
) -> tuple[RunFolder | None, QuickstartOptions, prepare.Device]:
    """The run to go on with, if any, its options and where it is. astray: what was typed and is neither option nor override.

    Makes nothing. Raises ConfigError with all faults; anything astray is one.
    """
    faults = Faults()
    run: RunFolder | None = None
    options: QuickstartOptions | None = None
    # Without a GPU that was asked for, the overrides are looked at all the same.
    device = prepare.Device(())
    with faults.gathering():
        run, options = open_run(given)
    with faults.gathering():
        _refuse_astray(astray)
    if options is not None:
        with faults.gathering():
            device = prepare.choose_device(options.gpus)
        with faults.gathering():
            if run is None:
                prepare.check_inputs(options)
            elif run.info.get("scoring"):
                # It may have been moved since.
                check_reward_model(run.info["scoring"]["folder"])
    with faults.gathering():
        prepare.check_settings(options or QuickstartOptions(), extra, device)
    faults.check()
    assert options is not None, "a fault was raised otherwise"
    return run, options, device


def _refuse_astray(words: Sequence[str]) -> None:
    why = 'it is no option, and only what follows "--" goes to verl'
    if words:
        raise ConfigError(
            Finding(
                "error", "not-an-option", "arguments", word, why, f"Write -- {word if '=' in word else 'KEY=VALUE'}"
            )
            for word in words
        )


def make_ready(run: RunFolder, options: QuickstartOptions, device: prepare.Device) -> tuple[DataFiles, RunSettings]:
    """Data, model, device maps and settings. Raises ConfigError for what does not go together, before anything long."""
    done = max(whole_checkpoints(run.path / "checkpoints"), default=0)
    if done >= options.steps:
        fix = f"Give --steps {done + 1} or more to train on"
        raise config_error("nothing-left", "--steps", options.steps, f"the run in {run.path} has {done} steps", fix)
    err.print(f"Run folder: {run.path}")
    if run.info["ready"]:
        files, model = DataFiles(*map(Path, run.info["files"])), run.info["model"]
    else:
        files, model = prepare.make_inputs(options, run)
    settings = prepare.settings_for(options, run, files, model, device)
    actors = prepare.lay_out(run, settings, device)
    out.print(actors.report(out.width), end="", soft_wrap=True, markup=False)
    return files, settings


def train(
    run: RunFolder, settings: RunSettings, env: Mapping[str, str], server: ForkServer | None, extra: Sequence[str]
) -> None:
    """Runs verl's trainer from the last whole checkpoint, or from the beginning, to its end."""
    launch = run.new_launch()
    overrides = to_overrides(replace(settings, resume_from=launch.checkpoint), extra)
    (run.path / "overrides.txt").write_text("\n".join(overrides) + "\n", encoding="utf-8")
    # Hydra writes what it composed into the launch's folder.
    overrides += [
        f"hydra.run.dir={(run.path / 'launches' / f'{launch.number}.hydra').resolve()}",
        "hydra.output_subdir=.",
    ]
    run.write_metrics()
    if launch.after_step:
        err.print(f"Going on after step {launch.after_step}")

    err.print("Starting verl (its output: " + str(launch.log_file) + ")")
    with watching(settings.steps, launch.after_step) as watch:

        def on_record(record: dict[str, Any]) -> None:
            # verl logs the validation before the first step as the step it begins after.
            if record["step"] < launch.after_step:
                return
            run.append_metrics(record)
            watch.on_record(record)

        run_verl(overrides, run, env=env, launch=launch, on_record=on_record, server=server)


def finish(run: RunFolder, options: QuickstartOptions, seconds: float) -> None:
    """The table, the picture and the sentence."""
    run.write_metrics()
    composed = max((run.path / "launches").glob("*.hydra/config.yaml"), key=lambda path: path.stat().st_mtime)
    (run.path / "config.yaml").write_bytes(composed.read_bytes())
    records = run.metrics()
    picture = run.path / "progress.png"
    report.draw(
        records, picture, f"{options.algorithm.upper()} on verl's trainer, device_map engine, seed {options.seed}"
    )
    out.print(report.summary_table(records))
    out.print(f"Picture: {picture}")
    out.print(f"{report.sentence(records)} It took {format_seconds(seconds)}.", soft_wrap=True)
    record_event("finished", folder=run.path, seconds=seconds)


def open_run(given: Mapping[str, Any]) -> tuple[RunFolder | None, QuickstartOptions]:
    """The run to go on with and its options, or None and the options of a new one. Makes nothing."""
    asked = QuickstartOptions(**given)
    if not asked.resume:
        if asked.out is not None:
            can_start(asked.out)
        return None, asked
    folder = asked.out or newest_folder()
    identity = {name.replace("_", "-") for name in given}
    run = RunFolder.resume(folder, {key: value for key, value in asked.identity().items() if key in identity})
    stored = {**run.info["settings"], **{name: getattr(asked, name) for name in given}}
    for name in ("data", "val_data"):
        stored[name] = tuple(map(Path, stored[name]))
    return run, QuickstartOptions(**{**stored, "task": tuple(stored["task"]), "out": folder, "resume": True})


def numbered_folders() -> dict[int, Path]:
    """The runs/quickstart-N that are there, by N."""
    found = {int(m[1]): path for path in RUNS.glob(f"{NAME}-*") if (m := re.fullmatch(rf"{NAME}-(\d+)", path.name))}
    return dict(sorted(found.items()))


def next_folder() -> Path:
    """The first runs/quickstart-N after all that are there."""
    folder = RUNS / f"{NAME}-{max(numbered_folders(), default=0) + 1}"
    can_start(folder)
    return folder


def newest_folder() -> Path:
    """The runs/quickstart-N with the largest N. Raises ConfigError when there is none."""
    folders = numbered_folders()
    if not folders:
        raise config_error(
            "nothing-to-resume",
            "--resume",
            None,
            f"there is no {RUNS}/{NAME}-N here",
            "Name the run's folder with --out",
        )
    return folders[max(folders)]
