"""verl-shard run"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_shard.cli.options import default

if TYPE_CHECKING:
    from verl_shard.planning.plan import Plan

HELP = """Trains as a plan says: on verl's trainer on Ray, or in this process.

verl-shard plan --actor MODEL --gpus 8 --gpu h100-80g --backend fsdp2 --save plan.yaml
verl-shard run plan.yaml --train-data train.parquet --val-data val.parquet --dry-run

What comes after the plan is handed to verl as it is, key=value, and wins. Exit code 1 when the run fails, 2 for what was given.
"""


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What verl-shard plan --save wrote.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="More of verl's configuration.")
    ] = None,
    runner: Annotated[str, typer.Option(help="verl: its main program on Ray. local: in this process.")] = "verl",
    train_data: Annotated[list[Path] | None, typer.Option(help="A parquet file (repeat for several).")] = None,
    val_data: Annotated[list[Path] | None, typer.Option(help="A parquet file of the validation.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train; by default what the runner has.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder." + default("the next free runs/plan-N"))] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and start nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where the plan does not fit.")] = False,
) -> int:
    """Starts a run."""
    from verl_shard.cli.plan import check_fits
    from verl_shard.common.errors import Faults
    from verl_shard.planning.plan import Plan

    faults = Faults()
    made: Plan | None = None
    extra = [str(text) for text in overrides or []]
    with faults.gathering():
        _check(runner, dry_run=dry_run, files=[*(train_data or []), *(val_data or [])])
    for flag, files in (("--train-data", train_data), ("--val-data", val_data)):
        with faults.gathering():
            _check_data(flag, files or [], runner, extra)
    with faults.gathering():
        made = Plan.load(plan)
    with faults.gathering():
        _check_overrides(extra)
    if made is not None:
        with faults.gathering():
            if runner == "local" and made.backend != "device_map":
                _refuse_local(made.backend)
        with faults.gathering():
            _check_keys(made, plan, extra)
    faults.check()
    assert made is not None, "a fault was raised otherwise"
    if not force:
        check_fits(made)
    if runner == "local":
        _locally(made, extra, train_data, val_data, steps, out)
    else:
        _on_verl(made, plan, extra, train_data, val_data, steps, out, dry_run=dry_run)
    return 0


def _on_verl(
    plan: Plan,
    plan_file: Path,
    extra: list[str],
    train: list[Path] | None,
    val: list[Path] | None,
    steps: int | None,
    out: Path | None,
    *,
    dry_run: bool,
) -> None:
    from verl_shard.common.tables import err
    from verl_shard.config.run_folder import RunFolder, can_start
    from verl_shard.verl_plugin.launch import overrides_of_run, run_plan
    from verl_shard.verl_plugin.overrides import hydra_value
    from verl_shard.verl_plugin.overrides_plan import to_verl_overrides, verl_command

    folder = out or _next_folder()
    given: dict[str, Any] = {"data.train_files": train, "data.val_files": val, "trainer.total_training_steps": steps}
    data = [f"{key}={hydra_value(value)}" for key, value in given.items() if value]
    named = {text.split("=", 1)[0].lstrip("+") for text in (*data, *extra)}
    ours = plan.backend == "device_map"
    if dry_run:
        shown = [*to_verl_overrides(plan, plan_file=plan_file if ours else None), *overrides_of_run(folder)]
        typer.echo(verl_command([*shown, *data, *extra], backend=plan.backend, data=_lacking(named)))
        return
    if lacking := _lacking(named):
        _refuse_without_data(lacking)
    can_start(folder)
    lease = _lease(plan)
    made = to_verl_overrides(plan, plan_file=folder / "plan.yaml" if ours else None)
    run = RunFolder.start(folder, {"runner": "verl", "backend": plan.backend}, {"plan": str(plan_file)})
    plan.save(folder / "plan.yaml")
    err.print(f"Run folder: {folder}. Starting verl; its output is in {folder / 'launches'}")
    with lease:
        run_plan(plan, [*made, *overrides_of_run(folder), *data, *extra], run, _say)


def _lease(plan: Plan) -> AbstractContextManager[object]:
    """Holds this machine's GPUs for the run. Raises ConfigError where they are not there, or in use.

    Not of a plan for several machines, nor for a Ray cluster: its head may have no GPU, and it counts them.
    """
    import torch

    from verl_shard.common.errors import config_error
    from verl_shard.resources.pin import reserve

    needed, there = len(plan.inventory), torch.cuda.device_count()
    if os.environ.get("RAY_ADDRESS") or len(plan.inventory.nodes) > 1:
        return nullcontext()
    if there < needed:
        why = f"the plan is for {needed}, and torch sees {there} on this machine"
        fix = "Run it where they are, plan for what is here, or name a Ray cluster that has them (RAY_ADDRESS=...)"
        raise config_error("too-few-gpus", "GPUs", there, why, fix)
    return reserve(range(needed))


def _locally(
    plan: Plan, extra: list[str], train: list[Path] | None, val: list[Path] | None, steps: int | None, out: Path | None
) -> None:
    from verl_shard.training.ppo_trainer import PPOTrainer

    w, roles = plan.workload, plan.roles
    micro = [own.settings.get("micro_batch_size") or 1 for role, own in roles.items() if role in ("actor", "critic")]
    ppo: dict[str, Any] = {
        "adv_estimator": "gae" if w.algorithm == "ppo" else w.algorithm,
        "batch_size": w.train_batch_size,
        "mini_batch_size": w.ppo_mini_batch_size or w.train_batch_size,
        "micro_batch_size": min(micro),
        "n": w.n,
        "max_epochs": w.ppo_epochs,
        "max_prompt_length": w.prompt_length,
        "lora_rank": roles["actor"].settings.get("lora_rank") or 0,
        **({"kl_coef": 0} if w.kl == "none" else {"kl_in": w.kl}),
        **({} if steps is None else {"steps": steps}),
    }
    config: dict[str, dict[str, Any]] = {role: dict(entry) for role, entry in plan.model_config.items()}
    for role, entry in config.items():
        if roles[role].settings.get("offload", "none") != "none":
            entry["offload"] = roles[role].settings["offload"]
    models: dict[str, Any] = {
        f"{role}_model": roles[role].model for role in ("critic", "reward", "ref") if role in roles
    }
    trainer = PPOTrainer(
        roles["actor"].model,
        **models,
        model_config=config,
        generation_config={
            "max_new_tokens": w.response_length,
            "batch_size": roles["rollout"].settings.get("micro_batch_size") or w.sequences,
        },
        ppo_config=ppo,
        use_gradient_checkpointing=bool(roles["actor"].settings.get("gradient_checkpointing")),
        train_data=_files(train),
        val_data=_files(val),
        output_dir=out,
        overrides=extra,
    )
    trainer.train()


def _files(paths: list[Path] | None) -> list[str] | str | None:
    if not paths:
        return None
    return str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]


def _say(record: dict[str, Any]) -> None:
    from verl_shard.common.tables import err

    data = record["data"]
    shown = {"reward": "critic/score/mean", "seconds": "timing_s/step"}
    parts = [f"{name} {data[key]:.3g}" for name, key in shown.items() if key in data]
    err.print(f"step {record['step']}  {'  '.join(parts)}")


def _lacking(named: set[str]) -> list[str]:
    """Of the two data files, those that nothing names."""
    return [name for name in ("train", "val") if f"data.{name}_files" not in named]


def _check(runner: str, *, dry_run: bool, files: list[Path]) -> None:
    from verl_shard.common.errors import ConfigError, Finding

    faults = []
    if runner not in ("verl", "local"):
        faults.append(Finding("error", "unknown-runner", "--runner", runner, "no such runner", "Use verl or local"))
    if runner == "local" and dry_run:
        why = "the local runner starts no command"
        faults.append(Finding("error", "no-effect", "--dry-run", "", why, "Leave it out, or use --runner verl"))
    if not dry_run:
        faults += [
            Finding("error", "no-such-file", "data", str(path), "there is no such file", "Name a parquet file")
            for path in files
            if not path.is_file()
        ]
    if faults:
        raise ConfigError(faults)


def _check_overrides(extra: list[str]) -> None:
    from verl_shard.common.errors import ConfigError, Finding

    fix = "Write key=value, with verl's key"
    wrong = [text for text in extra if "=" not in text and not text.startswith("~")]
    if wrong:
        raise ConfigError(
            Finding("error", "not-an-override", "overrides", text, "it is no key=value", fix) for text in wrong
        )


def _check_data(flag: str, files: list[Path], runner: str, extra: list[str]) -> None:
    """Of files that are not here nothing is said: a dry run's may be on the cluster."""
    if any(text.lstrip("+").startswith("data.custom_cls.path=") for text in extra):
        return  # a dataset of their own reads what it likes
    from verl_shard.training.check_files import check_files

    check_files(files, flag, only_parquet=runner == "local")


def _check_keys(plan: Plan, plan_file: Path, extra: list[str]) -> None:
    """Raises ConfigError for overrides that verl would refuse once it has started, which takes it a minute."""
    words = [text for text in extra if "=" in text or text.startswith("~")]
    if not words:
        return
    from verl_shard.training.check_overrides import check_overrides
    from verl_shard.verl_plugin.launch import overrides_of_run
    from verl_shard.verl_plugin.overrides_plan import to_verl_overrides

    own = to_verl_overrides(plan, plan_file=plan_file if plan.backend == "device_map" else None)
    check_overrides(words, [*own, *overrides_of_run(Path("run"))])


def _refuse_local(backend: str) -> None:
    from verl_shard.common.errors import config_error

    why = f"the plan is for {backend}, which runs on verl's trainer only"
    raise config_error("local-is-device-map", "--runner", "local", why, "Use --runner verl, or plan for device_map")


def _refuse_without_data(lacking: list[str]) -> None:
    from verl_shard.common.errors import ConfigError, Finding

    why = "a plan says nothing of data, and verl's default is a file that few have"
    raise ConfigError(
        Finding("error", "no-data", f"data.{name}_files", "", why, f"Add --{name}-data FILE.parquet")
        for name in lacking
    )


def _next_folder() -> Path:
    """The first runs/plan-N after all that are there."""
    runs = Path("runs")
    numbers = [int(n) for path in runs.glob("plan-*") if (n := path.name.removeprefix("plan-")).isdecimal()]
    return runs / f"plan-{max(numbers, default=0) + 1}"


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("run", help=HELP)(run)
