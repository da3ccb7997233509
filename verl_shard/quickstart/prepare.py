"""From options to all that verl needs on disk: data, model, device maps, and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.common.tables import err
from verl_shard.common.units import format_seconds
from verl_shard.config.data_files import DataFiles, hold_out
from verl_shard.config.run_folder import RunFolder
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.mapping.devices import DeviceId
from verl_shard.quickstart import checks
from verl_shard.quickstart.check_names import check_reward, check_tasks
from verl_shard.quickstart.check_reward_model import check_reward_model, choose_dtype
from verl_shard.quickstart.lengths import OWN_RESPONSE, Lengths, choose_lengths
from verl_shard.quickstart.model_reward import FUNCTION, add_messages
from verl_shard.quickstart.options import DEMO, QuickstartOptions
from verl_shard.quickstart.warmup import MAX_RESPONSE_LENGTH
from verl_shard.training.check_overrides import check_overrides
from verl_shard.training.data_of_tasks import write_data
from verl_shard.verl_plugin.overrides import RunSettings, to_overrides

N_TRAIN, N_VAL = 8192, 256

# Found on the default tasks over several seeds; a user's own model gets the rates that are usual for full-size models.
DEFAULTS: dict[str, Any] = {
    "batch_size": 8, "n": 2, "micro_batch_size": 16, "lr": 1e-4, "critic_lr": 1e-3, "kl_coef": 0.01, "save_freq": 20,
}  # fmt: skip
# A group of two says little of which response was better.
GRPO = {"batch_size": 4, "n": 4}
# A reward model is right only near the answers that it was trained on, and a policy finds the others: with 0.01 a demo that was
# right of 78 % of pairs gained 1.9 in score at a KL of 2.4, while the exact reward fell from 0.24 to 0.10.
REWARD_MODEL = {"kl_coef": 0.1}
OWN_MODEL = {"lr": 1e-6, "critic_lr": 1e-5, "micro_batch_size": 8}
REWARD = "pkg://verl_shard.quickstart.reward:compute_score"


@dataclass(frozen=True)
class Device:
    """Where the run happens: on GPUs by id, or on the CPU."""

    gpus: tuple[int, ...]

    @property
    def cpu(self) -> bool:
        return not self.gpus


def choose_device(gpus: int | None) -> Device:
    """All visible GPUs, the first `gpus` of them, or the CPU. Raises ConfigError for more than there are."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus is not None and gpus > there:
        seen = f"torch sees {there} GPU{'' if there == 1 else 's'}"
        fix = f"Give {there} or fewer" if there else "Leave out --gpus to run on the CPU"
        raise config_error("more-gpus-than-there-are", "--gpus", gpus, seen, fix)
    return Device(tuple(range(there if gpus is None else gpus)))


def check_inputs(options: QuickstartOptions) -> None:
    """Raises ConfigError with all that is wrong with the models, the data and the reward. Makes nothing."""
    faults: list[Finding] = []
    if options.data and options.model is None:
        why = "the small model knows only the reasoning-gym tasks"
        faults.append(Finding("error", "no-model", "--data", str(options.data[0]), why, "Give --model with --data"))
    calls: list[Callable[[], None]] = [lambda: check_tasks(options.task)]
    if options.model is not None:
        calls.append(partial(_check_model, options.model))
    if options.data:
        calls.append(partial(checks.check_data, [*options.data, *options.val_data]))
    if options.reward is not None:
        calls.append(partial(check_reward, options.reward))
    if options.reward_model not in (None, DEMO):
        calls.append(partial(check_reward_model, str(options.reward_model)))
    for call in calls:
        try:
            call()
        except ConfigError as error:
            faults += error.findings
    if faults:
        raise ConfigError(faults)


def _check_model(model: str) -> None:
    checks.check_model(model)
    checks.check_loads(model)


def check_settings(options: QuickstartOptions, extra: Sequence[str], device: Device) -> None:
    """Raises ConfigError for batch sizes that do not go together, and for overrides that verl would refuse. Makes nothing."""
    folder = Path("run")
    files = DataFiles(folder / "train.parquet", folder / "val.parquet")
    # Prompts are measured later; nothing is found to be too short for the shortest.
    lengths = Lengths(options.max_prompt_length or 1, options.max_response_length or 1)
    own = to_overrides(_settings(options, folder, files, options.model or folder / "model", device, lengths))
    check_overrides(extra, own)


def make_inputs(options: QuickstartOptions, run: RunFolder) -> tuple[DataFiles, Path | str]:
    """Data and model; what is not given is made in the run folder, the model without its warm-up."""
    if options.data:
        files = own_data(options, run.path / "data")
    else:
        err.print("Writing prompts of reasoning-gym tasks")
        files = write_data(
            run.path / "data",
            seed=options.seed,
            n_train=N_TRAIN,
            n_val=N_VAL,
            **({"tasks": options.task} if options.task else {}),
        )
    if options.reward_model is not None:
        add_messages(files)
    if options.model is not None:
        folder = Path(options.model).expanduser()
        return files, folder.resolve() if folder.is_dir() else options.model
    from verl_shard.quickstart.model import make_model

    return files, make_model(run.path / "model", files, seed=options.seed).resolve()


def teach(model: Path | str, files: DataFiles, seed: int) -> None:
    """The supervised warm-up of the small model, with a progress bar."""
    from verl_shard.quickstart.warmup import warm_up

    err.print(
        "Teaching the small model on worked answers; a share of them lacks the answer's tags, which RL then has to learn"
    )
    with _progress("warm-up on worked answers") as progress:
        result = warm_up(Path(model), files, seed=seed, progress=progress)
    err.print(
        f"Warm-up on worked answers: {result.steps} steps, {format_seconds(result.seconds)}, "
        f"validation reward {result.val_reward:.3f}"
    )


def make_scoring(options: QuickstartOptions, run: RunFolder, files: DataFiles, model: Path | str) -> dict[str, Any]:
    """How the rewards of a run with a reward model are made, as run.json keeps it: its folder, which the demo's is trained
    for first, its dtype, and the reward function that is measured beside it, if there is one.

    model: the policy; where it is the quick start's own, the demo begins with what its warm-up learned.
    """
    if options.reward_model == DEMO:
        base = Path(model)
        if options.model is not None:
            from verl_shard.quickstart.model import make_model

            err.print("The demo reward model begins with the small model, which is made for it")
            base = make_model(run.path / "reward_model", files, seed=options.seed)
            teach(base, files, options.seed)
        folder = _train_demo(base, run.path / "reward_model", files, options.seed)
    else:
        folder = Path(str(options.reward_model)).expanduser()
    return {"folder": str(folder.resolve()), "dtype": choose_dtype(folder), "exact": _function(options)}


def _train_demo(base: Path, folder: Path, files: DataFiles, seed: int) -> Path:
    """Trains the demo reward model, with a progress bar; returns its folder."""
    from verl_shard.quickstart.demo_reward import train_demo

    err.print("Training a reward model on right and wrong answers to the tasks")
    with _progress("reward model on pairs of answers") as progress:
        result = train_demo(base, folder, files, seed=seed, progress=progress)
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(result.by_kind.items(), key=lambda item: item[1]))
    err.print(
        f"Reward model: {result.steps} steps, {format_seconds(result.seconds)}; it ranks the right answer first in "
        f"{result.accuracy:.0%} of {result.pairs} held-out pairs (by what is wrong: {kinds}). It is in {folder}",
        soft_wrap=True,
    )
    return folder


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, float], None]]:
    """A bar for a training of ours, which is told of each step, all steps and the loss."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn(title),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]}"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("", total=None, loss="")
        yield lambda step, total, loss: progress.update(bar, completed=step, total=total, loss=f"{loss:.3f}")


def _function(options: QuickstartOptions) -> str | None:
    """The reward function of a run as verl takes it; None is verl's own by data_source."""
    if options.reward is not None:
        path, _, name = options.reward.rpartition(":")
        return f"{Path(path).resolve()}:{name}"
    return None if options.data else REWARD


def own_data(options: QuickstartOptions, folder: Path) -> DataFiles:
    """The user's files as one file each; a tenth of the rows is held out for validation when none is given."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    files = DataFiles(folder / "train.parquet", folder / "val.parquet")
    train = pa.concat_tables([pq.read_table(path) for path in options.data], promote_options="default")
    if options.val_data:
        val = pa.concat_tables([pq.read_table(path) for path in options.val_data], promote_options="default")
    else:
        kept, held = hold_out(train.num_rows, options.seed)
        err.print(f"No --val-data: {len(held)} of {train.num_rows} rows are held out for validation")
        train, val = train.take(kept), train.take(held)
    pq.write_table(train, files.train)
    pq.write_table(val, files.val)
    return files


def lay_out(run: RunFolder, settings: RunSettings, device: Device) -> DeviceMap:
    """Writes the device map of each role to plan.yaml, as the local loop's are; returns the actor's."""
    from verl_shard.training import placement

    roles = ["actor", *(["critic"] if settings.algorithm == "ppo" else []), "ref"]
    devices: tuple[DeviceId, ...] = device.gpus or ("cpu",)
    precisions = {role: "fp32" if device.cpu else "bf16" if role == "ref" else "bf16-mixed" for role in roles}
    placed = {
        role: placement.RolePlace(devices, None, None, precisions[role], settings.attn_implementation) for role in roles
    }
    places, models = placement.Places(device.cpu, device.gpus, placed), dict.fromkeys(roles, str(settings.model))
    fields = {
        "batch_size": settings.micro_batch_size, "seq_len": settings.max_prompt_length + settings.max_response_length,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }  # fmt: skip
    placement.lay_out(places, models, run.path / "plan.yaml", **fields)
    return placement.made_map("actor", places, models, **fields)


def settings_for(
    options: QuickstartOptions, run: RunFolder, files: DataFiles, model: Path | str, device: Device
) -> RunSettings:
    """verl's settings for a run from its beginning. Raises ConfigError when batch and lengths do not go with data and model."""
    lengths = choose_lengths(
        files,
        model,
        max_prompt_length=options.max_prompt_length,
        max_response_length=options.max_response_length,
        default_response=MAX_RESPONSE_LENGTH if options.model is None else OWN_RESPONSE,
        batch_size=_chosen(options, "batch_size"),
    )
    return _settings(options, run.path, files, model, device, lengths)


def _chosen(options: QuickstartOptions, name: str) -> Any:
    """The value of an option, or its default, which depends on the others."""
    if (given := getattr(options, name)) is not None:
        return given
    defaults = (
        DEFAULTS
        | (GRPO if options.algorithm == "grpo" else {})
        | (REWARD_MODEL if options.reward_model is not None else {})
        | (OWN_MODEL if options.model is not None else {})
    )
    return defaults[name]


def _settings(
    options: QuickstartOptions, folder: Path, files: DataFiles, model: Path | str, device: Device, lengths: Lengths
) -> RunSettings:
    chosen = partial(_chosen, options)
    batch, n = chosen("batch_size"), chosen("n")
    micro = options.micro_batch_size or math.gcd(chosen("micro_batch_size"), batch * n)
    return RunSettings(
        algorithm=options.algorithm,
        model=model,
        train_files=(files.train.resolve(),),
        val_files=(files.val.resolve(),),
        reward=_function(options) if options.reward_model is None else FUNCTION,
        plan=(folder / "plan.yaml").resolve(),
        checkpoints=(folder / "checkpoints").resolve(),
        steps=options.steps,
        seed=options.seed,
        train_batch_size=batch,
        n=n,
        mini_batch_size=batch,
        micro_batch_size=micro,
        max_prompt_length=lengths.prompt,
        max_response_length=lengths.response,
        actor_lr=chosen("lr"),
        critic_lr=chosen("critic_lr"),
        kl_coef=chosen("kl_coef"),
        test_freq=chosen("save_freq"),
        save_freq=chosen("save_freq"),
        cpu=device.cpu,
        gradient_checkpointing=options.gradient_checkpointing,
        attn_implementation=options.attn_implementation,
    )
