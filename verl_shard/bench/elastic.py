"""All components on the same GPUs, separated by hand, and where our placement puts them: what a PPO step takes with each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_shard.bench.elastic_roles import CPU_LOAD, QUICK_LOAD, ROLES, Load, Place, Roles, plan_roles
from verl_shard.bench.frame import Asked, Setting, Sizes, each_alone, finish, keep, left_out_words, opened
from verl_shard.bench.gpus_meter import GpusMeter
from verl_shard.bench.machine import TINY, Machine, cap_memory, card_for, in_a_process
from verl_shard.common.errors import RunError
from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.common.tables import table
from verl_shard.common.units import GIB, format_bytes
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.planning.models import PHASES

SCHEMA = "verl_shard/bench-elastic/1"
MODELS = Sizes(full="qwen2-0.5b", quick="qwen2-0.5b", on_cpu=TINY, several="llama-1b")
LOADS = Sizes(
    full=Load(sequences=16, micro_batch=4, prompt=384, response=128), quick=QUICK_LOAD, on_cpu=CPU_LOAD,
)  # fmt: skip
STEPS = 3
"""Of each placement: the first makes the optimizers' states, and the median of the others is told."""
TOGETHER, BY_HAND, OURS = "all on the same GPUs", "separated by hand", "our placement"
STABLE = "stable"


@dataclass(frozen=True)
class Layout:
    """Where a placement has each role, and what the planner expects: seconds of a step and of each phase, and bytes on the
    fullest GPU, none where nothing was planned."""

    places: Mapping[str, Place]
    step_s: float | None = None
    peak: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """ "actor on 0, 1; ref, reward on 1 (streamed)"."""
        by_place: dict[str, list[str]] = {}
        for role, place in self.places.items():
            where = ", ".join(map(str, place.devices)) + (" (streamed)" if place.offload == "stream" else "")
            by_place.setdefault(where, []).append(role)
        return "; ".join(f"{', '.join(roles)} on {where}" for where, roles in by_place.items())


@dataclass(frozen=True)
class PlacementRow:
    """One placement. outcome: "stable", or in which phase memory ran out; then there is no time and no peak.

    peaks: bytes by GPU that torch had allocated at most, none without a GPU. phases: seconds of each phase in a step of its
    own, after those that step_s is of, in which a phase ends when its GPUs are done. Sets of roles work side by side, so that
    phases may add up to more than a step.
    """

    placement: str
    where: str
    step_s: float | None
    tokens_per_s: float | None
    peaks: tuple[int, ...]
    outcome: str
    predicted_step_s: float | None
    predicted_peak: int | None
    phases: Mapping[str, float] = field(default_factory=dict)
    predicted_phases: Mapping[str, float] = field(default_factory=dict)


def bench_elastic(asked: Asked) -> list[PlacementRow]:
    """Measures the placements that there are on this machine, each in a process of its own, and says what was left out.

    On one GPU, by hand is what people can do there: the reward model on the CPU. On the CPU there is one placement.
    The model is qwen2-0.5b by default on one GPU, llama-1b on several, and the tiny one without any.
    Raises ConfigError for an unknown model and a limit that cannot be; RunError when nothing runs.
    """
    setting = opened(asked, MODELS, LOADS)
    wanted = layouts_of(setting)
    missing = left_out(setting.found, wanted)
    runs = {
        placement: partial(_row, setting, placement, layout, 2 if asked.quick else STEPS)
        for placement, layout in wanted.items()
        if placement != OURS or not _same(layout, wanted[TOGETHER])
    }

    def content(rows: Sequence[PlacementRow], missing: Mapping[str, str]) -> dict[str, Any]:
        return {
            "model": setting.name, "load": asdict(setting.load), "gpus": setting.found.gpus, "room": setting.room,
            "left_out": dict(missing), "rows": [asdict(row) for row in rows],
        }  # fmt: skip

    made = each_alone(runs, _said, missing, lambda *so_far: keep(asked, setting, SCHEMA, content(*so_far)))
    rows = list(made.values())
    record = content(rows, missing)
    shown = [elastic_table(record), phases_table(record), *left_out_words(record)]
    finish(asked, setting, SCHEMA, record, shown, draw)
    return rows


def _said(placement: str, row: PlacementRow) -> str:
    how = row.outcome if row.step_s is None else f"{row.step_s:.2f} s a step, {row.tokens_per_s:.0f} tokens/s"
    return f"{placement} ({row.where}): {how}"


def left_out(found: Machine, wanted: Mapping[str, Layout]) -> dict[str, str]:
    """What cannot be measured here, and why."""
    if not found.gpus:
        return {f"{BY_HAND}, {OURS}": "there is no GPU: all components are on the one CPU"}
    out = {}
    if found.gpus == 1:
        out["components on GPUs of their own"] = "there is one GPU; by hand, the reward model is on the CPU"
    if _same(wanted[OURS], wanted[TOGETHER]):
        out[OURS] = f"it is the same as {TOGETHER}, which is what it finds fastest here"
    return out


def _same(one: Layout, other: Layout) -> bool:
    return dict(one.places) == dict(other.places)


def layouts_of(setting: Setting[Load]) -> dict[str, Layout]:
    """The placements that there are here. Raises RunError when they cannot be planned."""
    if not setting.found.gpus:
        return {TOGETHER: Layout({role: Place({"": "cpu"}) for role in ROLES})}
    card = card_for(setting.found, setting.room)
    ran = in_a_process(partial(planned_layouts, setting.config, setting.load, card, setting.found.gpus))
    if ran.made is None:
        raise RunError(f"the placements cannot be planned: {ran.why}")
    return ran.made


def planned_layouts(config: Any, load: Load, card: Card, gpus: int) -> dict[str, Layout]:
    """The three placements on so many GPUs, each with what the planner expects of it."""
    free: dict[str, Any] = {"offload": None}
    return {
        TOGETHER: layout(config, load, card, gpus, {}, side_by_side=False),
        BY_HAND: layout(config, load, card, gpus, dict(by_hand(gpus)), side_by_side=True),
        OURS: layout(config, load, card, gpus, {"ref": free, "reward": free}, side_by_side=True),
    }


def by_hand(gpus: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """How people part components: those that train first, each scorer on a GPU of its own while there are enough.

    On one GPU the reward model is on the CPU.
    """
    if gpus == 1:
        yield "reward", {"device_type": "cpu", "offload": None}
        return
    last = gpus - 1
    alone = {"critic": max(last - 2, 1), "ref": max(last - 1, 1), "reward": last}
    yield "actor", {"devices": list(range(min(alone.values())))}
    for role, gpu in alone.items():
        yield role, {"devices": [gpu]}


def layout(
    config: Any, load: Load, card: Card, gpus: int, more: Mapping[str, Mapping[str, Any]], *, side_by_side: bool
) -> Layout:
    """A placement as build_plan has it. more: by role, what is asked beside the settings that all placements share."""
    from verl_shard.planning.build import build_plan

    asked = plan_roles(config, load, mixed=True, **more)
    inventory = Inventory.declared(gpus, card=card)
    plan = build_plan(asked, gpus=inventory, workload=load.workload, side_by_side=side_by_side)
    places = {}
    for role in ROLES:
        own = plan.roles[role]
        offload = own.settings.get("offload") or "none"
        if own.device_map is None:
            places[role] = Place({"": "cpu"})
        elif offload == "stream":
            places[role] = Place({"": next(iter(own.device_map.values()))}, "stream")
        else:
            places[role] = Place(own.device_map)
    peak = max(max(row.peaks.values()) for row in plan.phases)
    return Layout(places, plan.step_seconds, peak, {row.phase: row.seconds for row in plan.phases})


Measured = tuple[float | None, tuple[int, ...], str, dict[str, float]]
"""Seconds of a step, peaks by GPU, outcome, seconds by phase."""


def _row(setting: Setting[Load], placement: str, placed: Layout, steps: int) -> PlacementRow:
    gpus = setting.found.gpus
    cap_memory(setting.limit, gpus)
    roles = Roles(setting.config, setting.load, placed.places, mixed=bool(gpus))
    return row_of(placement, placed, setting.load, *measure(roles, GpusMeter(gpus), steps))


def measure(roles: Roles, meter: Any, steps: int) -> Measured:
    """Makes the roles and runs steps, of which the first is not told of, and then one in which each phase is timed.

    The steps before that one wait for the GPUs at their end only, as a training does. meter: as GpusMeter.
    """
    from verl_shard.runtime.ladder import is_out_of_memory

    failed: list[str] = []

    def around(name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except RuntimeError as error:
            if is_out_of_memory(error):
                failed.append(name)
            raise

    seconds = []
    phases: dict[str, float] = {}

    def timed(name: str, run: Callable[[], None]) -> None:
        began = time.perf_counter()
        around(name, run)
        roles.wait_for(name)
        phases[name] = time.perf_counter() - began

    try:
        roles.make()
        for number in range(steps):
            if number == 1:
                meter.begin_peak()
            meter.wait()
            began = time.perf_counter()
            roles.step(around)
            meter.wait()
            seconds.append(time.perf_counter() - began)
        roles.step(timed)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, (), f"OOM in {failed[0]}" if failed else "OOM while it is loaded", {}
    return (
        statistics.median(seconds[1:]),
        meter.peaks(),
        STABLE,
        {name: phases[name] for name in PHASES if name in phases},
    )


def row_of(
    placement: str,
    placed: Layout,
    load: Load,
    step_s: float | None,
    peaks: tuple[int, ...],
    outcome: str,
    phases: Mapping[str, float],
) -> PlacementRow:
    """What was measured of a placement, beside what was expected. Tokens are those of prompts and responses."""
    tokens = load.sequences * (load.prompt + load.response)
    speed = None if step_s is None else tokens / step_s
    return PlacementRow(
        placement, placed.words, step_s, speed, peaks, outcome, placed.step_s, placed.peak, phases, placed.phases
    )


def elastic_table(record: Mapping[str, Any]) -> Any:
    """For people: a row a placement, predictions in brackets."""
    load = record["load"]
    shown = []
    for row in record["rows"]:
        guess = "" if row["predicted_peak"] is None else f" ({format_bytes(row['predicted_peak'])})"
        peak = format_bytes(max(row["peaks"])) if row["peaks"] else "-"
        expected = "" if row["predicted_step_s"] is None else f" ({row['predicted_step_s']:.2f})"
        step = _seconds(row["step_s"])
        speed = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.0f}"
        shown.append((row["placement"], row["where"], speed, step + expected, peak + guess, row["outcome"]))
    words = f"{load['sequences']} sequences of {load['prompt']} + {load['response']} tokens"
    where = f"{record['gpus']} GPUs" if record["gpus"] != 1 else "one GPU"
    title = (
        f"A PPO step of {record['model']} on {where if record['gpus'] else 'the CPU'}, {words}: measured (predicted)"
    )
    return table(title, ("", "where", "tokens/s", "s a step", "fullest GPU", "outcome"), shown)


def phases_table(record: Mapping[str, Any]) -> Any:
    """For people: a row a placement and a column a phase, predictions in brackets; records of before have none."""
    rows = record["rows"]
    measured, planned = ([row.get(key) or {} for row in rows] for key in ("phases", "predicted_phases"))
    names = [name for name in PHASES if any(name in one for one in (*measured, *planned))]
    shown = []
    for row, took, expected in zip(rows, measured, planned, strict=True):
        cells = [_seconds(took.get(name)) + (f" ({expected[name]:.2f})" if name in expected else "") for name in names]
        shown.append((row["placement"], *cells))
    return table("Seconds of each phase, in a step of its own: measured (predicted)", ("", *names), shown)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A PNG: tokens a second of each placement, and the peak of each GPU."""
    rows = record["rows"]
    figure = new_figure(10, 2.2 + 0.6 * len(rows), f"A PPO step of {record['model']}: where the components are")
    left, right = figure.subplots(1, 2, sharey=True)
    at = list(range(len(rows), 0, -1))
    speeds = [row["tokens_per_s"] or 0.0 for row in rows]
    left.barh(at, speeds, height=0.6, color=STRONG)
    for y, row, speed in zip(at, rows, speeds, strict=True):
        words = f" {speed:.0f}" if speed else f" {row['outcome']}"
        left.text(speed, y, words, va="center", fontsize=9, color="black" if speed else ACCENT)
    left.set_xlim(0, max([*speeds, 1e-9]) * 1.25)
    left.set_xlabel("tokens a second")
    left.set_yticks(at, [f"{row['placement']}\n{row['where']}" for row in rows], fontsize=7)
    most = 0.0
    for y, row in zip(at, rows, strict=True):
        peaks = [peak / GIB for peak in row["peaks"]]
        height = 0.6 / max(len(peaks), 1)
        for gpu, peak in enumerate(peaks):
            place = y + 0.3 - (gpu + 0.5) * height
            right.barh(place, peak, height=0.9 * height, color=SOFT)
            right.text(peak, place, f" {peak:.1f} on GPU {gpu}", va="center", fontsize=7)
        if not peaks:
            right.text(
                0, y, " not measured" if row["outcome"] == STABLE else f" {row['outcome']}", va="center", fontsize=9
            )
        most = max([most, *peaks])
    if record["room"]:
        right.axvline(record["room"] / GIB, color=ACCENT, linestyle="--", label="torch may take")
        most = max(most, record["room"] / GIB)
        figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    right.set_xlim(0, (most or 1) * 1.3)
    right.set_xlabel("GiB at the peak")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save_png(figure, path)
