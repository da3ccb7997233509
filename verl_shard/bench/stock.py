"""Phases of a step held against engines on the GPU at hand, verl's FSDP ones and ours: all roles in one process."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verl_shard.bench.machine import in_a_process
from verl_shard.bench.record import machine, tell
from verl_shard.bench.stock_cells import CELLS, FLASH, LARGE, OURS, Cell, config_of
from verl_shard.common.errors import RunError, config_error
from verl_shard.common.tables import err, table
from verl_shard.common.units import format_bytes

SCHEMA = "verl_shard/bench-stock/1"
STEPS = 3
"""The last is the one that is measured: optimizer states are made by the first."""


@dataclass(frozen=True)
class Measured:
    """Bytes that torch has allocated at most in a phase of the third step: predicted and measured."""

    cell: Cell
    phase: str
    predicted: int
    measured: int
    parts: dict[str, int]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Meter(Protocol):
    """Measures a phase."""

    def __call__(self, run: Callable[[], object]) -> int:
        """Runs it; the most bytes that were allocated meanwhile."""


def flash_attn_is_installed() -> bool:
    """Whether verl finds flash-attn, and takes its cross-entropy."""
    return importlib.util.find_spec("flash_attn") is not None


def cuda_meter(run: Callable[[], object]) -> int:
    """torch.cuda.max_memory_allocated of a call."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def bench_stock(*, result: Path | None, large: bool = False, only: int | None = None) -> list[Measured]:
    """Runs verl's FSDP engine, and ours, over the cells; prints each phase beside its prediction, and writes JSON.

    only: the number of one cell. Raises ConfigError without a GPU, RunError when no cell could be run; a cell that
    fails is named and left out.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asked otherwise, CUDA starts and nothing can fork
    import torch

    if not torch.cuda.is_available():
        fix = "Run it on a machine with a GPU; the prediction itself needs none"
        raise config_error("no-gpu", "bench stock", None, "it measures on a GPU, and torch sees none", fix)
    from verl_shard.verl_plugin.stock_engine import import_early

    import_early()
    flash = flash_attn_is_installed()
    cells: Sequence[Cell] = (*OURS, *CELLS, *(FLASH if flash else ()), *(LARGE if large else ()))
    cells = [replace(cell, flash_attn=flash) for cell in (cells if only is None else [cells[only % len(cells)]])]
    if not flash:
        err.print(f"flash-attn is not installed: {len(FLASH)} configurations with it are left out")
    measured: list[Measured] = []
    failed: dict[str, str] = {}
    where: dict[str, Any] = {}
    for cell in cells:
        began = time.perf_counter()
        ran = in_a_process(partial(_run, cell))  # of its own: FSDP gives memory back only with its process
        seconds = time.perf_counter() - began
        if ran.made is None:
            failed[f"{cell.model}: {cell.words}"] = ran.why
            err.print(f"{cell.model}: {cell.words}: {ran.why}", style="red")
            continue
        rows, where = ran.made
        measured += rows
        worst = max(rows, key=lambda row: abs(row.error))
        err.print(f"{cell.model}: {cell.words}: worst {worst.phase} {worst.error:+.2%} ({seconds:.0f} s)")
        tell(SCHEMA, _content(measured, failed), [], result=result, facts=where)  # as far as it has come
    if not measured:
        raise RunError("; ".join(f"{cell}: {why}" for cell, why in failed.items()))
    shown = [_table(measured), _summary(measured)]
    tell(SCHEMA, _content(measured, failed), shown, result=result, facts=where)
    return measured


def compare_stock(recorded: Path, *, result: Path | None) -> list[Measured]:
    """What was measured elsewhere beside what is predicted now: no GPU is needed.

    recorded: a file that `bench_stock` wrote. Raises ConfigError for another file.
    """
    try:
        known = json.loads(recorded.read_text())
        rows = [
            (Cell(**{**row["cell"], "roles": tuple(row["cell"]["roles"])}), row["phase"], row["measured"])
            for row in known["rows"]
        ]
        made = {cell: predict(cell, config_of(cell.model)) for cell in dict.fromkeys(cell for cell, *_ in rows)}
        measured = [
            Measured(cell, phase, made[cell][phase][0], size, made[cell][phase][1]) for cell, phase, size in rows
        ]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        why = f"it cannot be read as what bench stock writes ({type(error).__name__}: {error})"
        raise config_error("recorded", "--compare", str(recorded), why, "Give a file of bench stock --out") from error
    when = {name: known[name] for name in ("date", "command") if name in known}
    content = {**_content(measured, known.get("failed") or {}), **when}
    tell(SCHEMA, content, [_table(measured), _summary(measured)], result=result, facts=known.get("machine") or {})
    return measured


def _content(measured: Sequence[Measured], failed: dict[str, str]) -> dict[str, Any]:
    return {"rows": [{**asdict(m), "error": m.error} for m in measured], "failed": failed}


def _run(cell: Cell) -> tuple[list[Measured], dict[str, Any]]:
    """A cell, and the machine: CUDA must not start in the process that begins others."""
    from verl_shard.verl_plugin.stock_engine import one_process

    with one_process("cuda"):
        return run_cell(cell, cuda_meter), machine()


def run_cell(cell: Cell, meter: Meter, config: Any = None) -> list[Measured]:
    """The phases of the third step, measured and predicted. config: of the model, by default that of the cell's name."""
    config = config_of(cell.model) if config is None else config
    rows = predict(cell, config)
    with tempfile.TemporaryDirectory(prefix="verl_shard_stock_") as folder:
        found = measure(cell, config, Path(folder), meter)
    return [Measured(cell, phase, rows[phase][0], size, rows[phase][1]) for phase, size in found.items()]


def predict(cell: Cell, config: Any) -> dict[str, tuple[int, dict[str, int]]]:
    """By phase what torch will have allocated at most, and its parts."""
    from verl_shard.config.roles import RoleConfig
    from verl_shard.config.workload import Workload
    from verl_shard.memory.stock.phases import OUTSIDE, stock_phases
    from verl_shard.models.read import read_model

    own = RoleConfig(
        precision="bf16-mixed" if cell.model_dtype == "fp32" else "bf16",
        gradient_checkpointing=cell.gradient_checkpointing,
        micro_batch_size=cell.micro_batch_size,
        attn_implementation=cell.attn_implementation,  # type: ignore[arg-type]
        param_offload=cell.offload,
        optimizer_offload=cell.offload,
    )
    scoring = RoleConfig(
        precision=own.precision, micro_batch_size=own.micro_batch_size, attn_implementation=own.attn_implementation
    )
    roles: dict[Any, RoleConfig] = {name: scoring if name == "ref" else own for name in cell.roles}
    models: dict[Any, Any] = {"actor": read_model(config, task="causal-lm")}
    if "critic" in cell.roles:
        models["critic"] = read_model(config, task="value")
    if cell.strategy == "device_map":
        return _predict_ours(cell, config)
    workload = Workload(
        algorithm="ppo",
        kl="loss",
        train_batch_size=cell.sequences,
        prompt_length=cell.prompt_length,
        response_length=cell.response_length,
        remove_padding=cell.packed,
    )
    made = stock_phases(
        models,
        {**roles, "rollout": RoleConfig(gpu_memory_utilization=0.5)},
        workload,
        backend=cell.strategy,
        n_ranks=1,
        ranks_per_node=1,
        card_memory=0,
        flash_attn=cell.flash_attn,
        compiled=cell.compiled,
    )
    return {
        row.phase: (row.allocated, {part.name: part.n_bytes for part in row.parts if part.name not in OUTSIDE})
        for row in made
    }


def _predict_ours(cell: Cell, config: Any) -> dict[str, tuple[int, dict[str, int]]]:
    """The same for our engine, as build_plan has it."""
    from verl_shard.config.inventory import Inventory
    from verl_shard.planning.build import build_plan

    trained = {
        "precision": "bf16-mixed" if cell.model_dtype == "fp32" else "bf16",
        "gradient_checkpointing": cell.gradient_checkpointing,
        "micro_batch_size": cell.micro_batch_size,
        "optimizer": "adamw",
        "logits": cell.logits,
        "lora_rank": 0,
        "attn_implementation": cell.attn_implementation,
    }
    scoring = {name: trained[name] for name in ("micro_batch_size", "logits", "attn_implementation")}
    plan = build_plan(
        {
            "actor": {"model": config, **trained},
            "critic": {name: value for name, value in trained.items() if name != "logits"},
            "ref": {**scoring, "offload": "none", "precision": "bf16"},
            "rollout": {"micro_batch_size": cell.sequences},
        },
        gpus=Inventory.declared(1, memory=2**50),
        workload={
            "train_batch_size": cell.sequences,
            "prompt_length": cell.prompt_length,
            "shortest_prompt_length": cell.prompt_length,
            "response_length": cell.response_length,
            "remove_padding": cell.packed,
        },
    )
    return {row.phase: (row.peaks[0], dict(row.parts)) for row in plan.phases}


def measure(cell: Cell, config: Any, folder: Path, meter: Meter) -> dict[str, int]:
    """Makes the roles and runs three steps; the peaks of the last. Needs `one_process` around it."""
    from verl_shard.memory.stock.terms import BUCKET
    from verl_shard.verl_plugin.stock_engine import Setup, StockRole, save_model

    setup = Setup(
        folder=folder,
        strategy=cell.strategy,
        lengths=cell.lengths,
        micro_batch_size_per_gpu=cell.micro_batch_size,
        model_dtype=cell.model_dtype,
        use_remove_padding=cell.packed,
        enable_gradient_checkpointing=cell.gradient_checkpointing,
        param_offload=cell.offload,
        optimizer_offload=cell.offload,
        use_torch_compile=cell.compiled,
        attn_implementation=cell.attn_implementation,
        logits=cell.logits,
    )
    with _quiet():
        save_model(config, folder)
        order = [role for role in ("critic", "ref", "actor") if role in cell.roles]  # as verl makes them
        roles = {role: StockRole(role, setup) for role in order}
    phases: list[tuple[str, Callable[[], object]]] = [("old_log_prob", roles["actor"].score)]
    if "ref" in roles:
        phases.append(("ref_log_prob", roles["ref"].score))
    if "critic" in roles:
        phases += [("values", roles["critic"].score), ("update_critic", roles["critic"].update)]
    phases.append(("update_actor", roles["actor"].update))
    if cell.strategy == "device_map":
        phases.insert(0, ("generate", roles["actor"].generate))
    else:
        phases.append(("weight_sync", partial(roles["actor"].export_weights, BUCKET.n_bytes)))
    peaks: dict[str, int] = {}
    try:
        for _ in range(STEPS):
            for phase, run in phases:
                with _quiet():
                    peaks[phase] = meter(run)
    finally:
        del phases, roles
        gc.collect()
    return peaks


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """verl and transformers print what nobody asked for."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _table(measured: Sequence[Measured]) -> Any:
    rows = [
        (
            m.cell.model,
            m.cell.words,
            m.phase,
            format_bytes(m.measured),
            format_bytes(m.predicted),
            f"{m.error:+.2%}",
        )
        for m in measured
    ]
    return table(
        "Stock verl's engine, peak of each phase",
        ("model", "settings", "phase", "measured", "predicted", "error"),
        rows,
    )


def _summary(measured: Sequence[Measured]) -> Any:
    rows = []
    for phase in dict.fromkeys(m.phase for m in measured):
        errors = [abs(m.error) for m in measured if m.phase == phase]
        rows.append((phase, f"{statistics.median(errors):.2%}", f"{max(errors):.2%}", len(errors)))
    return table("Error", ("phase", "median", "worst", "rows"), rows)
