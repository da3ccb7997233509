"""What the page of results shows of each kind of result: a title, tables and a plot, by the schema of its file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench import elastic, generate, ladder, maps, offload_advice, report_plots
from verl_shard.bench.frame import left_out_words
from verl_shard.bench.ladder_rungs import Batch
from verl_shard.bench.offload_advice_shown import advice_table, ways_tables
from verl_shard.bench.offload_advice_shown import draw as draw_offload_advice
from verl_shard.common.units import format_bytes

Draw = Callable[[Mapping[str, Any], Path], None]


class UnknownSchemaError(ValueError):
    """The file is of no bench that the page knows."""


@dataclass(frozen=True)
class Rows:
    """A table: the first column is text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Section:
    """One result. notes: sentences below the tables."""

    title: str
    tables: Sequence[Rows]
    draw: Draw | None = None
    notes: Sequence[str] = ()


def section_of(record: Any) -> Section:
    """The section of a file's content. Raises UnknownSchemaError for another schema; KeyError and the like where it is not as
    its schema says."""
    schema = record.get("schema") if isinstance(record, dict) else None
    make = _SECTIONS.get(schema) if isinstance(schema, str) else None
    if make is None:
        raise UnknownSchemaError(f"its schema is not known: {schema}")
    return make(record)


def _of_rich(made: Any) -> Rows:
    """A rich table as plain cells."""
    columns = [str(column.header) for column in made.columns]
    cells = [[getattr(cell, "plain", cell) for cell in column.cells] for column in made.columns]
    return Rows(str(made.title), columns, list(zip(*cells, strict=True)))


def _ladder(record: Mapping[str, Any]) -> Section:
    rows = [ladder.RungRow(**{k: v for k, v in row.items() if k != "error"}) for row in record["rows"]]
    batch = Batch(**record["batch"])
    shown = _of_rich(ladder.ladder_table(record["model"], batch, rows))
    return Section("One PPO update, remedy by remedy", [shown], ladder.draw, ladder.notes(record))


def _offload_advice(record: Mapping[str, Any]) -> Section:
    shown = [_of_rich(made) for made in ways_tables(record)]
    shown += [_of_rich(advice_table(record))] if record["advice"] else []
    return Section("Offloading, and the planner's advice", shown, draw_offload_advice, left_out_words(record))


def _elastic(record: Mapping[str, Any]) -> Section:
    shown = [_of_rich(elastic.elastic_table(record))]
    if any(row.get("phases") for row in record["rows"]):
        shown.append(_of_rich(elastic.phases_table(record)))
    return Section("Where the components are", shown, elastic.draw, left_out_words(record))


def _maps(record: Mapping[str, Any]) -> Section:
    shown = [
        _of_rich(maps.quality_table({name: maps.Quality(**row) for name, row in record["quality"].items()})),
        _of_rich(maps.even_table([maps.Even(**row) for row in record["training"]])),
        _of_rich(maps.speed_table({name: maps.Speed(**row) for name, row in record["seconds"].items()})),
    ]
    return Section("How even device maps are", shown, report_plots.maps)


def _memory(record: Mapping[str, Any]) -> Section:
    rows = []
    for name, errors in sorted(report_plots.memory_errors(record).items()):
        rows.append((name, *_errors(errors)))
    return Section(
        "Estimates of memory beside real passes",
        [Rows("Error of the peak", ("", "median", "worst", "rows"), rows)],
        report_plots.memory,
    )


def _stock(record: Mapping[str, Any]) -> Section:
    rows = [
        (
            f"{row['cell']['model']}, {row['cell']['strategy']}", row["phase"], format_bytes(row["measured"]),
            format_bytes(row["predicted"]), f"{row['error']:+.2%}",
        )
        for row in record["rows"]
    ]  # fmt: skip
    columns = ("model, engine", "phase", "measured", "predicted", "error")
    failed = [f"Failed: {cell}: {why}." for cell, why in record["failed"].items()]
    return Section("Phases of verl's engines and ours", [Rows("", columns, rows)], report_plots.stock, failed)


def _times(record: Mapping[str, Any]) -> Section:
    rows = [
        (
            f"{row['model']}: {row['what']}", f"{row['measured_s']:.4f}", f"{row['predicted_s']:.4f}",
            f"{row['predicted_s'] / row['measured_s'] - 1:+.1%}", row["bound"],
        )
        for row in record["rows"]
    ]  # fmt: skip
    columns = ("", "measured s", "predicted s", "error", "bound by")
    return Section("Predicted times beside measured", [Rows("", columns, rows)], report_plots.times)


def _generate(record: Mapping[str, Any]) -> Section:
    rows = [generate.GenerateRow(**row) for row in record["rows"]]
    load = generate.Load(tuple((0,) * n for n in record["prompt_tokens"]), tuple(record["response_tokens"]))
    threads = f", threads: {record['threads']}" if record["device"] == "cpu" else ""
    notes = [f"Greedy, with random weights in {record['dtype']}, on {record['device']}{threads}."]
    notes += [f"Did not run: {row.way}." for row in rows if row.seconds is None]
    shown = _of_rich(generate.shown(record["model"], load, rows))
    return Section("Generation", [shown], report_plots.generate, notes)


def _plain(title: str, draw: Draw | None, columns: Mapping[str, str]) -> Callable[[Mapping[str, Any]], Section]:
    """A section with these fields of its rows. columns: by field, its heading."""

    def make(record: Mapping[str, Any]) -> Section:
        rows = [[_cell(field, row.get(field)) for field in columns] for row in record["rows"]]
        model = f" of {record['model']}" if "model" in record else ""
        return Section(title + model, [Rows("", list(columns.values()), rows)], draw)

    return make


def _cell(field: str, value: Any) -> str:
    if value is None:
        return "-"
    if field in ("peak", "idle", "freed", "pinned"):
        return format_bytes(value)
    if field == "peaks":
        return ", ".join(format_bytes(size) for size in value) or "-"
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
    return str(value)


def _errors(errors: Iterable[float]) -> tuple[str, str, int]:
    off = [abs(error) for error in errors]
    return f"{statistics.median(off):.2%}", f"{max(off):.2%}", len(off)


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], Section]] = {
    ladder.SCHEMA: _ladder,
    offload_advice.SCHEMA: _offload_advice,
    elastic.SCHEMA: _elastic,
    maps.SCHEMA: _maps,
    "verl_shard/bench-memory/2": _memory,
    "verl_shard/bench-stock/1": _stock,
    "verl_shard/bench-times/1": _times,
    generate.SCHEMA: _generate,
    "verl_shard/bench-attention/1": _plain(
        "Attention, padded and packed",
        report_plots.attention,
        {
            "model": "model", "way": "attention", "packed": "packed", "seconds": "seconds", "peak": "peak",
            "output_error": "output error", "gradient_error": "gradient error",
        },
    ),
    "verl_shard/bench-offload/1": _plain(
        "A reward model out of GPU memory, every way",
        report_plots.offload,
        {
            "way": "", "sequences": "sequences", "tokens": "tokens", "seconds": "seconds", "ratio": "of the limit",
            "peak": "peak", "idle": "idle", "pinned": "pinned",
        },
    ),
    "verl_shard/bench-offload-phases/1": _plain(
        "Scoring phases with streamed weights",
        report_plots.offload_phases,
        {
            "phase": "phase", "offload": "offload", "sequences": "sequences", "tokens": "tokens", "seconds": "seconds",
            "peak": "peak", "freed": "freed",
        },
    ),
    "verl_shard/bench-pipeline/1": _plain(
        "Several GPUs and micro-batches",
        report_plots.pipeline,
        {"way": "way", "kind": "what", "micro_batches": "micro-batches", "seconds": "seconds", "peaks": "peaks"},
    ),
}  # fmt: skip
"""By schema. A new version of a schema is a new entry: what an old page makes of a new file is nothing."""
