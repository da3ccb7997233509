"""Tables and the picture of bench offload-advice, from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.common.tables import table
from verl_shard.common.units import GIB, format_bytes

_SHOWN = ("generate", "update_actor")
"""Phases that the first table names; it has the whole step beside them."""


def ways_tables(record: Mapping[str, Any]) -> list[Any]:
    """One table of whole steps a backend, and one of phases: measured, and predicted in brackets."""
    made = []
    load = record["load"]
    words = f"{load['sequences']} sequences of {load['prompt']} + {load['response']} tokens in {load['micro_batch']}s"
    for backend in dict.fromkeys(way["backend"] for way in record["ways"]):
        ways = [way for way in record["ways"] if way["backend"] == backend]
        rows = []
        for way in ways:
            if way["failed"]:
                rows.append((way["way"], way["failed"], *["-"] * 4))
                continue
            by_name = {row["phase"]: row for row in way["phases"]}
            seconds = [_seconds(by_name.get(name)) for name in _SHOWN]
            whole = _beside(way["step_s"], way["predicted_step_s"], lambda s: f"{s:.2f}")
            fullest = _beside(way["peak"], _predicted_peak(way), _gib)
            rows.append((way["way"], *seconds, whole, fullest, _beside(way["host"], way["predicted_host"], _gib)))
        columns = ("", "rollout s", "actor update s", "step s", "GPU peak GiB", "host GiB")
        title = f"{record['model']}, {backend}, {words}: measured (predicted)"
        made.append(table(title, columns, rows))
        names = list(dict.fromkeys(row["phase"] for way in ways for row in way["phases"]))
        rows = [(name, *(_beside(*_peaks(way, name), _gib) for way in ways if not way["failed"])) for name in names]
        if any(row["peak"] is not None for way in ways for row in way["phases"]):
            columns = ("peak GiB in", *(way["way"] for way in ways if not way["failed"]))
            made.append(table(f"{backend}, phase by phase: measured (predicted)", columns, rows))
    return made


def advice_table(record: Mapping[str, Any]) -> Any:
    """Each piece of advice, and whether it was right."""
    rows = [
        (
            f"{row['backend']}, {format_bytes(row['room'])}", f"{row['role']}: {row['what']}",
            "on" if row["on"] else "off", row["why"],
            _beside(row["measured_saved"], row["saved"], format_bytes),
            _beside(row["measured_seconds"], row["seconds"], lambda s: f"{s:+.2f}"),
            {True: "right", False: "wrong", None: "-"}[row["right"]],
        )
        for row in record["advice"]
    ]  # fmt: skip
    columns = ("torch has", "what", "advice", "why", "saves (predicted)", "s a step (predicted)", "it was")
    return table("The planner's advice", columns, rows)


def _seconds(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else _beside(row["seconds"], row["predicted_s"], lambda s: f"{s:.2f}")


def _peaks(way: Mapping[str, Any], name: str) -> tuple[int | None, int | None]:
    return next(((row["peak"], row["predicted"]) for row in way["phases"] if row["phase"] == name), (None, None))


def _predicted_peak(way: Mapping[str, Any]) -> int | None:
    return max((row["predicted"] for row in way["phases"] if row["predicted"] is not None), default=None)


def _beside(measured: Any, predicted: Any, shown: Any) -> str:
    text = "-" if measured is None else shown(measured)
    return text if predicted is None else f"{text} ({shown(predicted)})"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A PNG: the peak of the fullest phase, host memory and seconds of a step of each way, beside what was predicted."""
    ways = [way for way in record["ways"] if not way["failed"]]
    figure = new_figure(10, 1.8 + 0.6 * len(ways), f"A PPO step of {record['model']}, offloaded in every way")
    panels = figure.subplots(1, 3, sharey=True)
    at = list(range(len(ways), 0, -1))
    columns = (
        (
            "GPU peak, GiB",
            [_or_nan(way["peak"], GIB) for way in ways],
            [_or_nan(_predicted_peak(way), GIB) for way in ways],
        ),
        ("host, GiB", [_or_nan(way["host"], GIB) for way in ways], [way["predicted_host"] / GIB for way in ways]),
        ("seconds a step", [_or_nan(w["step_s"], 1) for w in ways], [_or_nan(w["predicted_step_s"], 1) for w in ways]),
    )
    for number, (axes, (words, measured, predicted)) in enumerate(zip(panels, columns, strict=True)):
        _bars(axes, at, measured, 0.2, STRONG, "measured" if number == 0 else None)
        _bars(axes, at, predicted, -0.2, SOFT, "predicted" if number == 0 else None)
        axes.set_xlabel(words)
        axes.set_xlim(0, 1.25 * max([v for v in (*measured, *predicted) if v == v] or [1]) or 1)
        axes.spines[["top", "right"]].set_visible(False)
    if record["room"]:
        panels[0].axvline(record["room"] / GIB, color=ACCENT, linestyle="--", label="torch may take")
        panels[0].set_xlim(0, max(panels[0].get_xlim()[1], 1.05 * record["room"] / GIB))
    panels[0].set_yticks(at, [f"{way['backend']}:\n{way['way']}" for way in ways], fontsize=8)
    figure.legend(loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    save_png(figure, path)


def _bars(axes: Any, at: Sequence[int], values: Sequence[float], shift: float, colour: str, label: str | None) -> None:
    shown = [value if value == value else 0.0 for value in values]
    axes.barh([y + shift for y in at], shown, height=0.36, color=colour, label=label)
    for y, value in zip(at, values, strict=True):
        axes.text(
            value if value == value else 0,
            y + shift,
            f" {value:.2f}" if value == value else " -",
            va="center",
            fontsize=7,
        )


def _or_nan(value: float | None, unit: int) -> float:
    return float("nan") if value is None else value / unit
