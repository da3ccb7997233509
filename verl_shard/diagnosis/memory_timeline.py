"""What memory a run took, phase by phase, beside what its plan expected: from memory.jsonl, for a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.common.files import read_json_lines
from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.config.roles import PHASE_OF_PASS

_BANDS = {
    "generate": "#d8ecdc", "reward": "#f6e3c5", "old_log_prob": "#e3e8f4", "ref_log_prob": "#eee3f2", "values": "#e2f0f0",
    "update_critic": "#f5dcd6", "update_actor": "#f2cfc6",
}  # fmt: skip
GIB = 2**30


@dataclass(frozen=True)
class Moment:
    """A phase of a step, as one process recorded it. began, ended: seconds since the first record began; sizes in bytes.

    allocated: by GPU, when it ended. peak, reserved: by GPU, at most in the phase. host: the process's largest resident set.
    used: by GPU, what all processes hold of it, by the driver; empty where nobody asked it.
    """

    step: int
    phase: str
    began: float
    ended: float
    pid: int
    allocated: Mapping[int, int]
    peak: Mapping[int, int]
    reserved: Mapping[int, int]
    host: int
    used: Mapping[int, int]


@dataclass(frozen=True)
class PhaseMemory:
    """A phase over all its steps on one GPU: the largest peak, and what the plan expected; None without a plan of it."""

    phase: str
    gpu: int
    times: int
    peak: int
    reserved: int
    planned: int | None

    @property
    def off(self) -> float | None:
        """How much more was taken than expected, as a part of it."""
        return None if self.planned is None else self.peak / self.planned - 1


def read_moments(run: Path) -> list[Moment]:
    """The moments of a run, in order. Raises ConfigError for a folder without any."""
    path = run / "memory.jsonl"
    lines = list(read_json_lines(path))
    if not lines:
        why = "it is no run's folder" if not (run / "run.json").is_file() else "nothing has been recorded there yet"
        raise config_error("no-memory-record", "run", str(run), why, "Name a run's folder, such as runs/ppo-1")
    zero = min(line["time"] - line["seconds"] for line in lines)
    return sorted((_moment(line, zero) for line in lines), key=lambda moment: moment.began)


def _moment(line: Mapping[str, Any], zero: float) -> Moment:
    gpus = {int(gpu): sizes for gpu, sizes in line.get("gpus", {}).items()}

    def of(key: str) -> dict[int, int]:
        return {gpu: sizes[key] for gpu, sizes in gpus.items() if key in sizes}

    ended = line["time"] - zero
    phase = PHASE_OF_PASS.get((line["role"], line["phase"]), f"{line['role']} {line['phase']}")
    return Moment(
        line["step"], phase, ended - line["seconds"], ended, line["pid"],
        of("allocated"), of("peak"), of("peak_reserved"), line["host_peak"], of("used"),
    )  # fmt: skip


def expected_peaks(run: Path) -> dict[str, dict[int, int]]:
    """By phase and GPU, what the run's plan expects; empty where its plan.yaml says only where models are."""
    from verl_shard.planning.plan import Plan

    try:
        plan = Plan.load(run / "plan.yaml")
    except ConfigError:
        return {}
    return {row.phase: dict(row.peaks) for row in plan.phases}


def by_phase(moments: Sequence[Moment], expected: Mapping[str, Mapping[int, int]]) -> list[PhaseMemory]:
    """A row for each phase and GPU, phases in the order in which they first began."""
    order = dict.fromkeys(moment.phase for moment in moments)
    rows = []
    for phase in order:
        own = [moment for moment in moments if moment.phase == phase]
        for gpu in sorted({gpu for moment in own for gpu in moment.peak}):
            there = [moment for moment in own if gpu in moment.peak]
            peak, reserved = max(m.peak[gpu] for m in there), max(m.reserved[gpu] for m in there)
            rows.append(PhaseMemory(phase, gpu, len(there), peak, reserved, expected.get(phase, {}).get(gpu)))
    return rows


def last_steps(moments: Sequence[Moment], n: int) -> list[Moment]:
    """Those of the last n steps that were recorded."""
    steps = sorted({moment.step for moment in moments})[-n:]
    return [moment for moment in moments if moment.step in steps]


def draw(moments: Sequence[Moment], expected: Mapping[str, Mapping[int, int]], path: Path, title: str) -> None:
    """Writes a PNG: a panel for each GPU and one for the host, phases as bands, what the plan expects as a line."""
    gpus = sorted({gpu for moment in moments for gpu in moment.peak})
    figure = new_figure(11, 1.2 + 2.4 * (len(gpus) + 1), title)
    panels = figure.subplots(len(gpus) + 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes, gpu in zip(panels, gpus, strict=False):
        _panel(axes, moments, gpu, expected)
    _host_panel(panels[-1], moments)
    shown = dict.fromkeys(moment.phase for moment in moments)
    for axes in panels:
        for moment in moments:
            axes.axvspan(moment.began, moment.ended, color=_BANDS.get(moment.phase, "#eeeeee"), linewidth=0, zorder=0)
        for step in sorted({moment.step for moment in moments}):
            first = min(moment.began for moment in moments if moment.step == step)
            axes.axvline(first, color="#999999", linewidth=0.6, zorder=1)
        axes.set_ylim(bottom=0)
        axes.set_xlim(min(m.began for m in moments), max(m.ended for m in moments))
        axes.set_ylabel("GiB")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds since the first phase; thin lines: steps")
    handles = [panels[0].fill_between([], [], color=_BANDS.get(phase, "#eeeeee"), label=phase) for phase in shown]
    lines, names = panels[0].get_legend_handles_labels()
    kept = [(h, n) for h, n in zip(lines, names, strict=True) if h not in handles]
    figure.legend(
        [*(h for h, _ in kept), *handles], [*(n for _, n in kept), *shown],
        loc="outside lower center", ncol=6, fontsize=8, frameon=False,
    )  # fmt: skip
    save_png(figure, path)


def _panel(axes: Any, moments: Sequence[Moment], gpu: int, expected: Mapping[str, Mapping[int, int]]) -> None:
    there = [moment for moment in moments if gpu in moment.peak]
    spans = [(moment.began, moment.ended) for moment in there]
    for name, sizes, style in (
        ("reserved by torch", [m.reserved[gpu] for m in there], {"color": SOFT, "linewidth": 1.2}),
        ("peak", [m.peak[gpu] for m in there], {"color": STRONG, "linewidth": 2.2}),
        (
            "allocated at the end",
            [m.allocated[gpu] for m in there],
            {"color": STRONG, "linewidth": 1, "linestyle": ":"},
        ),
    ):
        _levels(axes, spans, sizes, name, **style)
    if all(gpu in moment.used for moment in there) and there:
        used = [moment.used[gpu] for moment in there]
        _levels(axes, spans, used, "used by all (driver)", color="#666666", linewidth=1, linestyle="-.")
    planned = [(m, expected[m.phase][gpu]) for m in there if gpu in expected.get(m.phase, {})]
    sizes = [size for _, size in planned]
    _levels(axes, [(m.began, m.ended) for m, _ in planned], sizes, "plan", color=ACCENT, linewidth=1.6, linestyle="--")
    axes.set_title(f"GPU {gpu}", fontsize=10, loc="left")


def _host_panel(axes: Any, moments: Sequence[Moment]) -> None:
    for n, pid in enumerate(sorted({moment.pid for moment in moments})):
        own = [moment for moment in moments if moment.pid == pid]
        spans, sizes = [(m.began, m.ended) for m in own], [m.host for m in own]
        _levels(axes, spans, sizes, "host, a process" if n == 0 else "_", color="#5a9367", linewidth=1.6)
    axes.set_title("Host, largest resident set of each process so far", fontsize=10, loc="left")


def _levels(axes: Any, spans: Sequence[tuple[float, float]], sizes: Sequence[int], name: str, **style: Any) -> None:
    """A level for each span."""
    for n, ((began, ended), size) in enumerate(zip(spans, sizes, strict=True)):
        axes.plot([began, ended], [size / GIB] * 2, label=name if n == 0 else "_", solid_capstyle="butt", **style)
