"""Plots of results for the page of all results: each takes a record and where to write the PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.common.units import GIB

_COLOURS = (STRONG, ACCENT, "#5a9367", "#8a7fb5", SOFT)


def memory_errors(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """By estimator, ours first by what runs, the errors of its peaks: estimate over measured, less 1."""
    found: dict[str, list[float]] = {}
    for row in record["rows"]:
        fields = row["row"]["fields"]
        kind = "packed, " if fields.get("packed") else ""
        ours = f"estimate_memory: {kind}{row['row']['phase']}"
        found.setdefault(ours, []).append(row["peak"] / row["measured_peak"] - 1)
        for name, size in row["others"].items():
            found.setdefault(name, []).append(size / row["measured_peak"] - 1)
    return found


def memory(record: Mapping[str, Any], path: Path) -> None:
    """Estimated against measured peaks, ours and others'."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        for name, size in row["others"].items():
            points.setdefault(name, []).append((row["measured_peak"], size))
    points["estimate_memory"] = [(row["measured_peak"], row["peak"]) for row in record["rows"]]
    _scatter("Peak of a pass, GiB", {name: [(a / GIB, b / GIB) for a, b in p] for name, p in points.items()}, path)


def stock(record: Mapping[str, Any], path: Path) -> None:
    """Predicted against measured peaks of phases, by engine."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        at = row["measured"] / GIB, row["predicted"] / GIB
        points.setdefault(row["cell"]["strategy"], []).append(at)
    _scatter("Peak of a phase, GiB", points, path)


def maps(record: Mapping[str, Any], path: Path) -> None:
    """How much fuller than the optimum the fullest GPU is at worst, by way to make maps."""
    rows = record["quality"]
    _bars("Fullest GPU over the optimum, at worst", list(rows), [row["worst"] for row in rows.values()], path)


def times(record: Mapping[str, Any], path: Path) -> None:
    """Predicted against measured seconds, by model."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        points.setdefault(row["model"], []).append((row["measured_s"], row["predicted_s"]))
    _scatter("Seconds", points, path)


def attention(record: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of a forward and a backward by way."""
    rows = record["rows"]
    names = [f"{row['model']}, {'packed' if row['packed'] else 'padded'}: {row['way']}" for row in rows]
    _bars("Forward and backward, ms", names, [1e3 * row["seconds"] for row in rows], path)


def offload(record: Mapping[str, Any], path: Path) -> None:
    """Seconds a call by way and shape."""
    rows = record["rows"]
    names = [f"{row['way']}: {row['sequences']} x {row['tokens']}" for row in rows]
    _bars("Seconds a call", names, [row["seconds"] for row in rows], path)


def offload_phases(record: Mapping[str, Any], path: Path) -> None:
    """Seconds a phase, resident and streamed."""
    rows = record["rows"]
    names = [f"{row['phase']}, {row['offload']}: {row['sequences']} x {row['tokens']}" for row in rows]
    _bars("Seconds a phase", names, [row["seconds"] for row in rows], path)


def generate(record: Mapping[str, Any], path: Path) -> None:
    """Tokens a second by way."""
    rows = record["rows"]
    names = [row["way"] + (" (did not run)" if row["seconds"] is None else "") for row in rows]
    _bars("Tokens a second", names, [row["tokens_per_second"] or 0.0 for row in rows], path)


def pipeline(record: Mapping[str, Any], path: Path) -> None:
    """Seconds by number of micro-batches, a panel for each kind of step."""
    rows = record["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure = new_figure(4 * len(kinds), 3.8)
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for colour, way in zip(_COLOURS, dict.fromkeys(row["way"] for row in rows), strict=False):
            mine = [row for row in rows if (row["kind"], row["way"]) == (kind, way) and row["seconds"] is not None]
            at = [row["micro_batches"] for row in mine]
            axes.plot(at, [row["seconds"] for row in mine], marker="o", color=colour, label=way)
        axes.set_title(kind, fontsize=10)
        axes.set_xlabel("micro-batches")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    save_png(figure, path)


def _scatter(words: str, points: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Measured to the right, predicted upwards, both logarithmic, and the line on which they are equal."""
    figure = new_figure(6.5, 5)
    axes = figure.subplots()
    values = [value for some in points.values() for point in some for value in point]
    ends = [min(values) / 1.3, max(values) * 1.3]
    axes.plot(ends, ends, color="#b9bec6", linewidth=1, zorder=0)
    others = [colour for colour in _COLOURS if colour != STRONG] if "estimate_memory" in points else _COLOURS
    for number, (name, some) in enumerate(points.items()):
        colour = STRONG if name == "estimate_memory" else others[number % len(others)]
        across, up = zip(*some, strict=True)
        axes.scatter(across, up, s=18, color=colour, label=name, alpha=0.8)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set(xlabel=f"{words}, measured", ylabel=f"{words}, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    save_png(figure, path)


def _bars(words: str, names: Sequence[str], values: Sequence[float], path: Path) -> None:
    """A bar a row, in the order of the rows."""
    figure = new_figure(9, 0.9 + 0.28 * len(names))
    axes = figure.subplots()
    at = list(range(len(names), 0, -1))
    axes.barh(at, values, color=STRONG, height=0.7)
    for y, value in zip(at, values, strict=True):
        axes.text(value, y, f" {value:,.0f}" if value >= 1000 else f" {value:.3g}", va="center", fontsize=8)
    axes.set_yticks(at, list(names), fontsize=8)
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(words)
    axes.spines[["top", "right"]].set_visible(False)
    save_png(figure, path)
