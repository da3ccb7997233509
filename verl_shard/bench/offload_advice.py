"""Whether to keep weights in host memory: each way measured in a whole PPO step, and the planner's advice held against it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from verl_shard.bench.elastic_roles import CPU_LOAD, QUICK_LOAD, ROLES, Load, Place, Roles, import_early, plan_roles
from verl_shard.bench.frame import NOT_REACHED, Asked, Setting, Sizes, finish, keep, left_out_words, opened
from verl_shard.bench.gpus_meter import GpusMeter
from verl_shard.bench.machine import TINY, HostPeak, Machine, cap_memory, card_for, in_a_process
from verl_shard.bench.offload_advice_shown import advice_table, draw, ways_tables
from verl_shard.common.errors import RunError
from verl_shard.common.tables import err
from verl_shard.common.units import format_bytes
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import Role
from verl_shard.config.workload import Workload
from verl_shard.planning.backends import Engine, engine_for
from verl_shard.planning.offload import advise
from verl_shard.planning.plan import Advice
from verl_shard.planning.settings import Settings, fill, read_roles

SCHEMA = "verl_shard/bench-offload-advice/1"
MODELS = Sizes(full="llama-1b", quick="qwen2-0.5b", on_cpu=TINY)
LOADS = Sizes(
    full=Load(sequences=16, micro_batch=4, prompt=448, response=64), quick=QUICK_LOAD, on_cpu=CPU_LOAD,
)  # fmt: skip
STEPS = 3
"""Of each way: the first makes the optimizers' states, and the median of the others is told."""
OURS: dict[str, tuple[Role, ...]] = {
    "nothing offloaded": (), "ref streamed": ("ref",), "reward streamed": ("reward",),
    "ref and reward streamed": ("ref", "reward"),
}  # fmt: skip
"""What our engine can keep on the host: it never offloads a role that trains."""


@dataclass(frozen=True)
class PhaseRow:
    """A phase. Seconds and bytes at most on the GPU, measured (none where there is no GPU) and predicted."""

    phase: str
    seconds: float
    predicted_s: float | None
    peak: int | None
    predicted: int | None


@dataclass(frozen=True)
class WayRow:
    """One way to offload. failed: in which phase memory ran out; then there are no phases. step_s: of a whole step.

    host: bytes that the process took on the host at most, beside what it took before there was a model; predicted_host: the
    weights that the planner counts there.
    """

    backend: str
    way: str
    phases: tuple[PhaseRow, ...]
    step_s: float | None
    predicted_step_s: float | None
    host: int | None
    predicted_host: int
    failed: str = ""

    @property
    def peak(self) -> int | None:
        return max((row.peak for row in self.phases if row.peak is not None), default=None)


@dataclass(frozen=True)
class AdviceRow:
    """A piece of the planner's advice. room: bytes that torch may allocate on the card it is for. saved: bytes of the fullest
    GPU in `phase`, seconds: what a step takes longer, both predicted and measured.

    right: whether it says on where, and only where, the step runs with it and not without; None where that was not run.
    """

    backend: str
    room: int
    role: str
    what: str
    on: bool
    why: str
    phase: str
    saved: int
    measured_saved: int | None
    seconds: float
    measured_seconds: float | None
    fits_without: bool | None
    fits_with: bool | None
    right: bool | None


def bench_offload_advice(asked: Asked) -> list[WayRow]:
    """Measures every way and judges the advice on this GPU, and on it with so little memory that offloading decides.

    The model is llama-1b by default, qwen2-0.5b with `quick`, and the tiny one without a GPU.
    Stock verl's param_offload and optimizer_offload are measured too where verl is installed, with its fsdp2 engine.
    Raises ConfigError for an unknown model and a limit that cannot be; RunError when nothing runs.
    """
    setting = opened(asked, MODELS, LOADS)
    found, room, steps = setting.found, setting.room, 2 if asked.quick else STEPS
    missing = left_out(found)
    import_early(setting.config)
    plans = plan_apart(setting) if found.gpus else None
    ways: list[WayRow] = []
    advice: list[AdviceRow] = []

    def content(missing: Mapping[str, str]) -> dict[str, Any]:
        return {
            "model": setting.name, "load": asdict(setting.load), "room": room, "left_out": dict(missing),
            "ways": [{**asdict(way), "peak": way.peak} for way in ways], "advice": [asdict(row) for row in advice],
        }  # fmt: skip

    def add(way: WayRow) -> None:
        ways.append(way)
        keep(asked, setting, SCHEMA, content({**missing, "what follows these": NOT_REACHED}))

    for way in measured_ways(setting, steps, {} if plans is None else plans.ways):
        add(way)
    if plans is not None:
        advice += judged(plans.ways["nothing offloaded"], room, ways)
        if plans.small_room < room:
            small = on_small(replace(setting, limit=plans.small_room))
            advice += judged(plans.on_small, plans.small_room, small)
        if "stock verl" not in missing:
            from verl_shard.bench.offload_advice_stock import bench_stock_ways

            said, failed = bench_stock_ways(setting.config, setting.load, card_for(found, room), steps, add)
            advice, missing = [*advice, *said], {**missing, **failed}
    if all(way.failed for way in ways):
        raise RunError("; ".join(f"{way.way}: {way.failed}" for way in ways))
    record = content(missing)
    shown = [*ways_tables(record), *([advice_table(record)] if advice else []), *left_out_words(record)]
    finish(asked, setting, SCHEMA, record, shown, draw)
    return ways


def left_out(found: Machine) -> dict[str, str]:
    """What cannot be measured here, and why."""
    import importlib.util

    if not found.gpus:
        return {"offloading, GPU memory and the advice": "there is no GPU: weights are in host memory anyway"}
    if importlib.util.find_spec("verl") is None:
        return {
            "stock verl": 'param_offload and optimizer_offload are its own, and it is not installed ("verl_shard[verl]")'
        }
    return {}


@dataclass(frozen=True)
class Planned:
    """Of a plan: bytes on the fullest GPU and seconds by phase, seconds of a step, bytes on the host, and the advice."""

    peaks: Mapping[str, int]
    seconds: Mapping[str, float]
    step_s: float
    host: int
    advice: tuple[Advice, ...]

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


@dataclass(frozen=True)
class Plans:
    """By way, what is planned on the GPU there is; a room in which one streamed role decides; what is planned there."""

    ways: Mapping[str, Planned]
    small_room: int
    on_small: Planned


def planned(engine: Engine, settings: Settings, streamed: Sequence[Role]) -> Planned:
    """What is planned with these roles streamed, and nothing for the planner to choose."""
    for role in streamed:
        settings = settings.changed(role, offload="stream")
    rows, evaluation = engine.phases(settings), engine.evaluate(settings)
    return Planned(
        {row.phase: max(row.peaks.values()) for row in rows},
        {row.phase: row.seconds for row in rows},
        evaluation.seconds,
        max(evaluation.host.values(), default=0),
        tuple(advise(engine, settings)),
    )


def planner(config: Any, load: Load, card: Card) -> tuple[Engine, Settings]:
    """The planner's engine for a step on one such card, and its settings, none of them left to choose.

    build_plan would come to the same; but where the step does not fit, it would look for what mends it, which takes long.
    """
    workload = Workload(**load.workload)
    settings = fill(read_roles(plan_roles(config, load, mixed=True)), workload)
    inventory = Inventory.declared(1, card=card)
    engine = engine_for(settings, workload, inventory, None, side_by_side=False, trust_remote_code=False)
    return engine, engine.completed(settings)


def plan_apart(setting: Setting[Load]) -> Plans:
    """all_plans, in a process of its own. Raises RunError when it cannot be planned."""
    ran = in_a_process(partial(all_plans, setting.config, setting.load, card_for(setting.found, setting.room)))
    if ran.made is None:
        raise RunError(f"the step cannot be planned: {ran.why}")
    return ran.made


def all_plans(config: Any, load: Load, card: Card) -> Plans:
    """All that is predicted. Traces run backwards, after which no process could be forked that runs them: call it in one."""
    from verl_shard.memory.constants import CUDA_CONTEXT

    engine, settings = planner(config, load, card)
    ways = {way: planned(engine, settings, streamed) for way, streamed in OURS.items()}
    alone = [ways[f"{role} streamed"].peak for role in ("ref", "reward")]
    without = ways["nothing offloaded"].peak
    room = (
        without - (without - min(alone)) // 4
    )  # torch reserves more than it allocates: most of the way is left for that
    small = engine.over(Inventory.declared(1, card=replace(card, memory=room + CUDA_CONTEXT.n_bytes)))
    return Plans(ways, room, planned(small, settings, ()))


def measured_ways(setting: Setting[Load], steps: int, plans: Mapping[str, Planned]) -> Iterator[WayRow]:
    """Every way of our engine that there is here, each in a process of its own."""
    for way in OURS if setting.found.gpus else ["nothing offloaded"]:
        began = time.perf_counter()
        done = _way(setting, steps, way, plans.get(way))
        peak = "" if done.peak is None else f", {format_bytes(done.peak)}"
        err.print(f"{way}: {done.failed or f'{done.step_s:.2f} s a step{peak}'}{measured_in(began)}")
        yield done


def measured_in(began: float) -> str:
    """For a line about a way: what it took to measure."""
    return f" (measured in {time.perf_counter() - began:.0f} s)"


def _way(setting: Setting[Load], steps: int, way: str, plan: Planned | None) -> WayRow:
    ran = in_a_process(partial(_measured, setting, steps, OURS[way]))
    host, step_s = (0, None) if plan is None else (plan.host, plan.step_s)
    if ran.made is None or isinstance(ran.made, str):
        return WayRow("device_map", way, (), None, step_s, None, host, ran.made or ran.why)
    seconds, peaks, taken = ran.made
    guessed_s, guessed = ({}, {}) if plan is None else (plan.seconds, plan.peaks)
    rows = tuple(
        PhaseRow(name, seconds[name], guessed_s.get(name), peaks.get(name), guessed.get(name)) for name in seconds
    )
    return WayRow("device_map", way, rows, sum(seconds.values()), step_s, taken if setting.found.gpus else None, host)


Measured = tuple[dict[str, float], dict[str, int], int]
"""Seconds by phase, peaks by phase (none without a GPU), and what the process took on the host at most."""


def _measured(setting: Setting[Load], steps: int, streamed: Sequence[str]) -> Measured | str:
    """A way on one device, or in words where memory ran out."""
    gpus = setting.found.gpus
    place = {"": 0 if gpus else "cpu"}
    places = {role: Place(place, "stream" if role in streamed else "none") for role in ROLES}
    cap_memory(setting.limit, gpus)
    return run_step(Roles(setting.config, setting.load, places, mixed=bool(gpus)), GpusMeter(1 if gpus else 0), steps)


def run_step(roles: Roles, meter: Any, steps: int) -> Measured | str:
    """Makes roles and runs steps, phase by phase; the first step is not told of. meter: as GpusMeter."""
    import psutil

    from verl_shard.runtime.ladder import is_out_of_memory, one_line

    meter.wait()
    before = psutil.Process().memory_info().rss
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    at = ["while it is loaded"]
    step = 0
    lock = threading.Lock()

    def around(name: str, run: Callable[[], None]) -> None:
        with lock:  # phases of different roles would count each other's memory
            at[0] = f"in {name}"
            meter.wait()
            meter.begin_peak()
            began = time.perf_counter()
            run()
            meter.wait()
            taken = time.perf_counter() - began
            if step:
                seconds.setdefault(name, []).append(taken)
                peaks[name] = max(peaks.get(name, 0), *meter.peaks(), 0)

    try:
        roles.make()
        with HostPeak() as host:  # what making streamed roles takes is gone by now
            for number in range(steps):
                step = number
                roles.step(around)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return f"OOM {at[0]} ({one_line(error)})"
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return medians, peaks if meter.peaks() else {}, max(host.peak - before, 0)


def on_small(setting: Setting[Load]) -> list[WayRow]:
    """Whether the step runs with so little memory: each way that advice is about, for two steps."""
    made = []
    for way in ("nothing offloaded", "ref streamed", "reward streamed"):
        began = time.perf_counter()
        made.append(_way(setting, 2, way, None))
        err.print(f"{way}, {format_bytes(setting.limit or 0)}: {made[-1].failed or 'it runs'}{measured_in(began)}")
    return made


def judged(plan: Planned, room: int, ways: Sequence[WayRow]) -> list[AdviceRow]:
    """The advice for a card with so much room, beside what was measured there."""
    by_name = {way.way: way for way in ways}
    return [judge(one, room, by_name["nothing offloaded"], by_name[f"{one.role} streamed"]) for one in plan.advice]


def judge(advice: Advice, room: int, without: WayRow, with_it: WayRow) -> AdviceRow:
    """One piece of advice beside a step without and with what it is about."""
    fits, fits_with = not without.failed, not with_it.failed
    saved = seconds = None
    if fits and fits_with:
        before, after = (_peak_of(way, advice.phase) for way in (without, with_it))
        saved = None if before is None or after is None else before - after
        assert without.step_s is not None, "it ran"
        assert with_it.step_s is not None, "it ran"
        seconds = with_it.step_s - without.step_s
    return AdviceRow(
        without.backend, room, advice.role, advice.what, advice.on, advice.why, advice.phase, advice.saved, saved,
        advice.seconds, seconds, fits, fits_with, advice.on == (not fits and fits_with),
    )  # fmt: skip


def _peak_of(way: WayRow, phase: str) -> int | None:
    return next((row.peak for row in way.phases if row.phase == phase), None)
