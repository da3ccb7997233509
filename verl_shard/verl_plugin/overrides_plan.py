"""A plan as overrides for verl's own main program: stock verl with FSDP and a rollout engine, or the device_map engine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.notices import notice
from verl_shard.config.roles import TRAINED
from verl_shard.planning.plan import Plan
from verl_shard.verl_plugin.overrides import hydra_value
from verl_shard.verl_plugin.overrides_ours import ours
from verl_shard.verl_plugin.overrides_shared import Raw
from verl_shard.verl_plugin.overrides_stock import stock

PAIRS = {"fsdp": ("vllm", "sglang"), "fsdp2": ("vllm", "sglang"), "device_map": ("hf",)}
"""Rollouts by backend."""
ALONE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1"
"""With it Ray leaves the one process of the device_map engine all GPUs."""


def to_verl_overrides(
    plan: Plan,
    *,
    backend: str | None = None,
    rollout: str | None = None,
    plan_file: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Hydra overrides for `python -m verl.trainer.main_ppo`, such that verl does what `plan` says.

    backend: "fsdp", "fsdp2" or "device_map", and rollout: "vllm", "sglang" or, with device_map, "hf"; by default the plan's.
    plan_file: where the plan was saved. The device_map engine reads its maps from there and holds the run to the plan;
        without it the maps stand in the overrides.

    Data, learning rates, loggers and the length of the run are no part of a plan: add data.train_files and the like.
    Whether the plan fits is not asked. A plan that was made for another backend is taken as far as it goes, which a notice
    says. Raises ConfigError with every setting that verl cannot have, by name, with what to set instead.
    """
    backend = plan.backend if backend is None else backend
    rollout = _rollout_of(plan, backend) if rollout is None else rollout
    _check_pair(backend, rollout)
    faults = [*_batch_faults(plan, backend)]
    made: dict[str, Any] = _of_workload(plan)
    if backend == "device_map":
        more, found = ours(plan, None if plan_file is None else Path(plan_file))
    else:
        more, found = stock(plan, backend, rollout)
    faults += found
    if faults:
        raise ConfigError(faults)
    if backend != plan.backend:
        notice(
            "another-backend", "backend", backend, f"the plan was made for {plan.backend}, whose memory and times it has",
            f'the settings that both have; whether they fit, only a plan with backend="{backend}" tells',
        )  # fmt: skip
    written = {key: value if isinstance(value, Raw) else hydra_value(value) for key, value in {**made, **more}.items()}
    return [f"{key}={value}" for key, value in written.items()]


def verl_command(
    overrides: Sequence[str], *, backend: str, data: Sequence[str] = ("train", "val"), python: str = "python3"
) -> str:
    """The command, an override a line, as a shell takes it. data: of the files, those that $TRAIN_FILES or $VAL_FILES names."""
    first = [ALONE] if backend == "device_map" else []
    files = [f'data.{name}_files="${{{name.upper()}_FILES:?name a parquet file}}"' for name in data]
    lines = [" ".join([*first, f"{python} -m verl.trainer.main_ppo"]), *files, *map(shlex.quote, overrides)]
    return " \\\n    ".join(lines)


def _rollout_of(plan: Plan, backend: str) -> str:
    planned = str(plan.roles["rollout"].settings.get("strategy"))
    fitting = PAIRS.get(backend, ())
    return planned if planned in fitting or not fitting else fitting[0]


def _check_pair(backend: str, rollout: str) -> None:
    if rollout in PAIRS.get(backend, ()):
        return
    valid = "; ".join(f"{name} with {' or '.join(fitting)}" for name, fitting in PAIRS.items())
    if backend not in PAIRS:
        raise ConfigError(Finding("error", "unknown-backend", "backend", backend, "no such backend", f"Use {valid}"))
    why = f"backend {backend} does not go with it"
    raise ConfigError(Finding("error", "no-such-pair", "rollout", rollout, why, f"Use {valid}"))


def _of_workload(plan: Plan) -> dict[str, Any]:
    w = plan.workload
    actor = "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "gae" if w.algorithm == "ppo" else w.algorithm,
        "algorithm.use_kl_in_reward": w.kl == "reward",
        f"{actor}.use_kl_loss": w.kl == "loss",
        "data.train_batch_size": w.train_batch_size,
        "data.max_prompt_length": w.prompt_length,
        "data.max_response_length": w.response_length,
        "actor_rollout_ref.rollout.n": w.n,
        f"{actor}.ppo_mini_batch_size": w.ppo_mini_batch_size or w.train_batch_size,
        f"{actor}.ppo_epochs": w.ppo_epochs,
        f"{actor}.use_dynamic_bsz": False,
    }


def _batch_faults(plan: Plan, backend: str) -> list[Finding]:
    """What verl's workers assert of batches, some of it minutes after the start."""
    w = plan.workload
    ranks = 1 if backend == "device_map" else len(plan.inventory)
    mini = w.ppo_mini_batch_size or w.train_batch_size
    found = []

    def fault(where: str, given: int, why: str, fix: str) -> None:
        found.append(Finding("error", "batch-arithmetic", where, str(given), why, fix))

    if w.train_batch_size % mini:
        why = f"train_batch_size {w.train_batch_size} % {mini} = {w.train_batch_size % mini}, not 0"
        fault("ppo_mini_batch_size", mini, why, "Choose a divisor")
    if mini * w.n % ranks:
        why = f"{mini} prompts x {w.n} = {mini * w.n} sequences, % {ranks} GPUs = {mini * w.n % ranks}, not 0"
        fault("ppo_mini_batch_size", mini, why, f"Choose it, or n, so that a multiple of {ranks} comes out")
    if found:
        return found
    for role, own in plan.roles.items():
        scoring = role not in TRAINED
        if role in ("rollout", "reward") or (scoring and plan.roles["actor"].settings.get("lora_rank")):
            continue
        mine, whole = (w.sequences if scoring else mini * w.n) // ranks, w.sequences // ranks
        if role == "critic" and backend != "device_map":
            continue  # its budget is of tokens
        size = own.settings.get("micro_batch_size") or 1
        if backend != "device_map":
            size = min(size, mine)
        if mine % size or whole % size:
            of = mine if mine % size else whole
            what = "a step" if of == whole else "a mini-batch"
            why = f"{of} sequences of {what} on each GPU, % {size} = {of % size}, not 0"
            fault(f"{role}.micro_batch_size", size, why, "Choose a divisor")
    return found
