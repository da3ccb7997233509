"""Stock verl's own offloads, for bench offload-advice: its fsdp2 engine on one GPU, without Ray and without vLLM."""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from verl_shard.bench.elastic_roles import Load
from verl_shard.bench.gpus_meter import GpusMeter
from verl_shard.bench.machine import HostPeak, in_a_process
from verl_shard.bench.offload_advice import AdviceRow, PhaseRow, WayRow, measured_in
from verl_shard.common.errors import ShardError
from verl_shard.common.tables import err
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.planning.layout import limit_of
from verl_shard.planning.plan import Advice, Plan

BACKEND: Literal["fsdp2"] = "fsdp2"
WAYS: dict[str, dict[str, Any]] = {
    "no offload": {}, "param_offload": {"param_offload": True}, "optimizer_offload": {"optimizer_offload": True},
    "both": {"param_offload": True, "optimizer_offload": True},
}  # fmt: skip
TOLERANCE, LEAST = 0.05, 64 * 2**20
"""How far what is freed may be from what the advice says, as a share and in bytes."""


@dataclass(frozen=True)
class StockMeasured:
    """Of one way: seconds and peaks by phase, bytes that stay on the GPU between phases, bytes of the host at most."""

    seconds: Mapping[str, float]
    peaks: Mapping[str, int]
    between: int
    host: int


def bench_stock_ways(
    config: Any, load: Load, card: Card, steps: int, add: Callable[[WayRow], None]
) -> tuple[list[AdviceRow], dict[str, str]]:
    """(the advice about all ways, what could not be run and why). add: gets each way as soon as it is measured."""
    from verl_shard.verl_plugin.stock_engine import import_early

    import_early()  # once for all processes
    measured: dict[str, StockMeasured] = {}
    failed = {"stock verl's rollout": "vLLM is not started; what the actor leaves it of the GPU is measured"}
    plan: Plan | None = None
    # One process for all plans: they share what is traced.
    plans = in_a_process(partial(stock_plans, config, load, card))
    with tempfile.TemporaryDirectory(prefix="verl_shard_offload_") as folder:
        saved = in_a_process(partial(_save, config, Path(folder)))
        for way, offload in WAYS.items():
            began = time.perf_counter()
            planned = plans.why if plans.made is None else plans.made[way]
            why = saved.why or (planned if isinstance(planned, str) else "")
            ran = None if why else in_a_process(partial(_run, config, load, offload, steps, Path(folder)))
            if ran is None or ran.made is None or isinstance(planned, str):
                failed[f"{BACKEND}, {way}"] = why if ran is None else ran.why
                err.print(f"{BACKEND}, {way}: {failed[f'{BACKEND}, {way}']}", style="red")
                continue
            plan = planned if not offload else plan
            measured[way] = ran.made
            row = way_row(way, planned, ran.made)
            err.print(f"{BACKEND}, {way}: {row.step_s:.2f} s in all phases{measured_in(began)}")
            add(row)
    advice = []
    if plan is not None:
        for one in plan.advice:
            if one.role == "actor" and one.what in measured:
                advice.append(judge_stock(one, limit_of(card), measured["no offload"], measured[one.what]))
    return advice, failed


def stock_plans(config: Any, load: Load, card: Card) -> dict[str, Plan | str]:
    """The plan of each way, or in words why there is none: one that cannot be planned costs only itself."""
    made: dict[str, Plan | str] = {}
    for way, offload in WAYS.items():
        try:
            made[way] = stock_plan(config, load, card, offload)
        except ShardError as error:
            made[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return made


def stock_plan(config: Any, load: Load, card: Card, offload: Mapping[str, Any]) -> Plan:
    """A GRPO step of stock verl with an actor and a reference, and nothing for the planner to choose."""
    from verl_shard.planning.build import build_plan

    common = {"micro_batch_size": load.micro_batch, "attn_implementation": "sdpa", "logits": "full"}
    off = {"param_offload": False, "optimizer_offload": False}
    actor = {
        "model": config, "precision": "bf16-mixed", "gradient_checkpointing": True, "optimizer": "adamw", "lora_rank": 0,
        **common, **off, **offload,
    }  # fmt: skip
    return build_plan(
        {"actor": actor, "ref": {**common, "precision": "bf16-mixed"}, "rollout": {"gpu_memory_utilization": 0.3}},
        gpus=Inventory.declared(1, card=card),
        workload={**load.workload, "algorithm": "grpo", "kl": "loss"},
        backend=BACKEND,
    )


def way_row(way: str, plan: Plan, measured: StockMeasured) -> WayRow:
    """One way, measured beside planned; of the plan only what torch allocates in the engine's process."""
    from verl_shard.memory.stock.phases import OUTSIDE

    planned = {
        row.phase: (row.seconds, sum(size for part, size in row.parts.items() if part not in OUTSIDE))
        for row in plan.phases
    }
    rows = []
    for phase, seconds in measured.seconds.items():
        guessed_s, guessed = planned.get(phase, (None, None))
        rows.append(PhaseRow(phase, seconds, guessed_s, measured.peaks[phase], guessed))
    total = sum(measured.seconds.values())
    host = max(plan.host.values(), default=0)
    return WayRow(BACKEND, way, tuple(rows), total, None, measured.host, host)


def judge_stock(advice: Advice, room: int, without: StockMeasured, with_it: StockMeasured) -> AdviceRow:
    """Right where it frees what the advice says: whether the whole step fits depends on vLLM, which is not run here.

    Of a phase in which vLLM works or begins, what is freed is what the actor does not keep between its own phases.
    """
    before, after = (one.peaks.get(advice.phase, one.between) for one in (without, with_it))
    saved = before - after
    seconds = sum(with_it.seconds.values()) - sum(without.seconds.values())
    right = abs(saved - advice.saved) <= max(LEAST, TOLERANCE * advice.saved)
    return AdviceRow(
        BACKEND, room, advice.role, advice.what, advice.on, advice.why, advice.phase, advice.saved, saved, advice.seconds,
        seconds, None, None, right,
    )  # fmt: skip


def _save(config: Any, folder: Path) -> str:
    from verl_shard.verl_plugin.stock_engine import save_model

    return str(save_model(config, folder))


def _run(config: Any, load: Load, offload: Mapping[str, Any], steps: int, folder: Path) -> StockMeasured:
    from verl_shard.verl_plugin.stock_engine import one_process

    with one_process("cuda"):
        return measure(folder, load, offload, steps, GpusMeter(1))


def measure(folder: Path, load: Load, offload: Mapping[str, Any], steps: int, meter: Any) -> StockMeasured:
    """Runs the phases of an actor and a reference; needs `one_process` around it. folder: holds the model, as save_model
    saves it. meter: as GpusMeter."""
    import psutil

    from verl_shard.verl_plugin.stock_engine import Setup, StockRole

    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # verl prints what nobody asked for
        setup = Setup(
            folder=folder, strategy=BACKEND, lengths=[(load.prompt, load.response)] * load.sequences,
            micro_batch_size_per_gpu=load.micro_batch, **offload,
        )  # fmt: skip
        before = psutil.Process().memory_info().rss
        ref, actor = StockRole("ref", setup), StockRole("actor", setup)
        phases: list[tuple[str, Callable[[], object]]] = [
            ("old_log_prob", actor.score), ("ref_log_prob", ref.score), ("update_actor", actor.update),
        ]  # fmt: skip
        with HostPeak() as host:  # what loading takes is gone by now
            for step in range(steps):
                for name, run in phases:
                    meter.wait()
                    meter.begin_peak()
                    began = time.perf_counter()
                    run()
                    meter.wait()
                    if step:
                        seconds.setdefault(name, []).append(time.perf_counter() - began)
                        peaks[name] = max(peaks.get(name, 0), *meter.peaks())
        meter.empty()
        meter.begin_peak()  # from here on nothing is allocated: the peak is what stays
        between = max(meter.peaks())
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return StockMeasured(medians, peaks, between, max(host.peak - before, 0))
