"""The tables of README.md and of docs/benchmarks.md, made from docs/results so that they cannot drift.

    python -m verl_shard.bench.readme_tables --check     # ends with 1 where a table is not what the results say
    python -m verl_shard.bench.readme_tables --write     # writes them

A page holds `<!-- table NAME -->`, the table, and `<!-- end of table -->`; what stands between the two is made.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from verl_shard.common.errors import ShardError, config_error
from verl_shard.common.files import write_whole
from verl_shard.common.units import GIB

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/benchmarks.md")
RESULTS = Path("docs") / "results"
_PLACE = re.compile(r"<!-- table (?P<name>[\w-]+) -->\n(?P<made>.*?)<!-- end of table -->", re.DOTALL)
_OTHERS = {
    "accelerate estimate-memory": "accelerate estimate-memory",
    "hf-vram-calc": "hf-vram-calc",
    "gpu-estimator": "gpu-estimator, training only",
    "DeepSpeed ZeRO formula": "DeepSpeed's ZeRO formula, training only",
}
_PHASES = ("generate", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor", "weight_sync")


def percent(share: float) -> str:
    """ "0.35 %", "5.4 %", "30 %": two digits, or as many as there are before the point."""
    size = 100 * abs(share)
    return f"{size:.2f} %" if size < 1 else f"{size:.1f} %" if size < 10 else f"{size:.0f} %"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown, with its last line's end."""
    lines = [f"| {' | '.join(map(str, line))} |\n" for line in (columns, *rows)]
    return "".join([lines[0], "|---" * len(columns) + "|\n", *lines[1:]])


def memory(results: Path) -> str:
    """Errors of estimates, ours and others', over all recorded passes."""
    dense, more = _rows(results, "h200_memory"), _rows(results, "h200_memory_moe_packed")

    def of_phase(*phases: str) -> list[float]:
        return [_off(row) for row in dense if row["row"]["phase"] in phases]

    packed = [_off(row) for row in more if row["row"]["fields"].get("packed")]
    experts = [_off(row) for row in more if not row["row"]["fields"].get("packed")]
    reserved = [row["reserved"] / row["measured_reserved"] - 1 for row in (*dense, *more)]
    lines: dict[str, list[float]] = {
        "training step": of_phase("train"), "forward pass": of_phase("forward"), "generation": of_phase("generate"),
        "mixtures of experts, training and forward": experts, "packed inputs, training and forward": packed,
        "reserved by torch, instead of the peak": reserved,
    }  # fmt: skip
    for name, words in _OTHERS.items():
        lines[words] = [row["others"][name] / row["measured_peak"] - 1 for row in dense if name in row["others"]]
    rows = [
        (words, percent(median(map(abs, errors))), percent(max(map(abs, errors))), len(errors))
        for words, errors in lines.items()
    ]
    return markdown(("error of the peak", "median", "worst", "rows"), rows)


def _off(row: Mapping[str, Any]) -> float:
    return float(row["peak"] / row["measured_peak"] - 1)


def stock(results: Path) -> str:
    """The worst error of each phase, of our engine and of verl's."""
    rows = [*_rows(results, "h200_stock"), *_rows(results, "h200_stock_flash")]

    def worst(phase: str, ours: bool) -> str:
        errors = [
            abs(row["error"])
            for row in rows
            if row["phase"] == phase and (row["cell"]["strategy"] == "device_map") == ours
        ]
        return percent(max(errors)) if errors else "-"

    lines = [(phase, worst(phase, True), worst(phase, False)) for phase in _PHASES]
    return markdown(("error of the peak", "our engine", "verl's fsdp and fsdp2"), lines)


def maps(results: Path) -> str:
    """How even maps are, ours and others' over published models; those that came to the same share a row."""
    record = _record(results, "maps")
    alike: dict[tuple[object, ...], tuple[list[str], Mapping[str, Any]]] = {}
    for name, made in record["quality"].items():
        words = f"{name} {record['machine']['packages']['accelerate']}" if name == "accelerate" else name
        alike.setdefault(tuple(made.values()), ([], made))[0].append(words)
    rows = []
    for names, of in alike.values():
        ratios = (f"{of[key]:.3f}" for key in ("median", "p90", "worst"))
        rows.append((", ".join(names), *ratios, of["empty"], of["spilled"]))
    feasible = next(iter(record["quality"].values()))["feasible"]  # a split fits or not, whoever makes the map
    columns = (
        "maps of", "median", "p90", "worst", f"leaves a GPU empty (of {record['cells']})",
        f"spills to the CPU though a split fits (of {feasible})",
    )  # fmt: skip
    return markdown(columns, rows)


def training_maps(results: Path) -> str:
    """GiB at the peak of each GPU, with a map even in weights and one even in the peak."""
    rows = [
        (row["words"], *(", ".join(f"{size / GIB:.1f}" for size in row[which]) for which in ("weights", "peak")))
        for row in _record(results, "maps")["training"]
    ]
    return markdown(("model, bf16 unless said", "even in weights", "even in the peak"), rows)


def pipeline(results: Path) -> str:
    """Seconds of a step over two GPUs by number of micro-batches."""
    rows = _rows(results, "h200x2_pipeline")
    counts = sorted({row["micro_batches"] for row in rows})
    by = {(row["kind"], row["way"], row["micro_batches"]): row["seconds"] for row in rows}
    lines = [
        (f"{kind}, {way}", *(_number(by.get((kind, way, n)), 3) for n in counts))
        for kind, way in dict.fromkeys((row["kind"], row["way"]) for row in rows)
    ]
    return markdown(("seconds", *(f"M = {n}" for n in counts)), lines)


def pipeline_one_gpu(results: Path) -> str:
    """Seconds of a step on one GPU by number of micro-batches, and beside them what they are of the plain way's."""
    rows = _rows(results, "h200_pipeline")
    counts = sorted({row["micro_batches"] for row in rows})
    by = {(row["kind"], row["way"], row["micro_batches"]): row for row in rows}
    lines = []
    for kind, way in dict.fromkeys((row["kind"], row["way"]) for row in rows):
        made = [by.get((kind, way, n)) for n in counts]
        words = ("-" if row is None else f"{row['seconds']:.3f} ({row['ratio']:.3f})" for row in made)
        lines.append((f"{kind}, {way}", *words))
    return markdown(("seconds (of the plain way's)", *(f"M = {n}" for n in counts)), lines)


def ladder(results: Path) -> str:
    """The rungs of the ladder."""
    return _ladder(results, "h200_ladder")


def ladder_80(results: Path) -> str:
    """The same where torch may take 80 GiB."""
    return _ladder(results, "h200_ladder_80")


def _ladder(results: Path, name: str) -> str:
    lines = [
        (
            _rung(number, row), _gib(max(row["peaks"], default=None)), _gib(row["estimate"]),
            "-" if row["error"] is None else percent(row["error"]), _number(row["sequences_per_s"], 1), row["outcome"],
            row["expected"] or "-",
        )
        for number, row in enumerate(_rows(results, name))
    ]  # fmt: skip
    columns = ("", "peak, GiB", "estimated", "error", "sequences/s", "outcome", "expected")
    return markdown(columns, lines)


def ladder_short(results: Path) -> str:
    """The rungs on the whole card, and how each ends where torch may take 80 GiB."""
    limited = {row["adds"]: row["outcome"] for row in _rows(results, "h200_ladder_80")}
    lines = [
        (
            _rung(number, row), _gib(max(row["peaks"], default=None)), _gib(row["estimate"]),
            _number(row["sequences_per_s"], 1), limited.get(row["adds"], "-"),
        )
        for number, row in enumerate(_rows(results, "h200_ladder"))
    ]  # fmt: skip
    return markdown(("", "peak, GiB", "estimated", "sequences/s", "within 80 GiB"), lines)


def _rung(number: int, row: Mapping[str, Any]) -> str:
    return ("+ " if number > 1 else "") + str(row["adds"])


def generation(results: Path) -> str:
    """Seconds of a batch of prompts, ours and others' ways."""
    lines = [
        (
            row["way"], _number(row["seconds"], 2), _number(row["tokens_per_second"], 0), _gib(row["cache_bytes"]),
            _gib(row["peak_bytes"]), "-" if row["same"] is None else percent(row["same"]),
        )
        for row in _rows(results, "h200_generate")
    ]  # fmt: skip
    return markdown(("", "seconds", "tokens/s", "cache, GiB", "peak, GiB", "same tokens"), lines)


def attention(results: Path) -> str:
    """Kernels over padded and packed rows: time, memory, and how far from fp32."""
    lines = [
        (
            row["model"], "packed" if row["packed"] else "padded", row["way"], _number(1e3 * row["seconds"], 1),
            _gib(row["peak"]), f"{row['output_error']:.2e}", f"{row['gradient_error']:.2e}",
        )
        for row in _rows(results, "h200_attention")
    ]  # fmt: skip
    columns = ("", "rows", "attention", "ms", "peak, GiB", "error of the output", "of gradients")
    return markdown(columns, lines)


def _predicted_peak(way: Mapping[str, Any]) -> int | None:
    return max((row["predicted"] for row in way["phases"] if row["predicted"] is not None), default=None)


def offload_ways(results: Path) -> str:
    """Whole steps with every way to offload, measured and predicted."""
    lines = []
    for way in _record(results, "h200_offload_advice")["ways"]:
        by_name = {row["phase"]: row for row in way["phases"]}
        lines.append(
            (
                f"{way['backend']}: {way['way']}", way["failed"] or _number(_of(by_name, "generate"), 2),
                _number(_of(by_name, "update_actor"), 2), _number(way["step_s"], 2), _gib(way["peak"]),
                _gib(_predicted_peak(way)), _gib(way["host"]), _gib(way["predicted_host"]),
            )
        )  # fmt: skip
    columns = (
        "", "rollout, s", "actor update, s", "step, s", "GPU peak, GiB", "predicted", "host, GiB", "predicted",
    )  # fmt: skip
    return markdown(columns, lines)


def offload_short(results: Path) -> str:
    """Whole steps of our engine with every way to offload, in fewer columns."""
    lines = []
    for way in _record(results, "h200_offload_advice")["ways"]:
        if way["backend"] == "device_map":
            step_s, guessed_s = way["step_s"], way["predicted_step_s"]
            lines.append(
                (
                    way["way"], way["failed"] or _number(step_s, 2), _number(guessed_s, 2), _gib(way["peak"]),
                    _gib(_predicted_peak(way)),
                )
            )  # fmt: skip
    return markdown(("", "s a step", "predicted", "fullest GPU, GiB", "predicted"), lines)


def offload_advice(results: Path) -> str:
    """The planner's advice, and whether it was right."""
    lines = [
        (
            _gib(row["room"]), f"{row['backend']}, {row['role']}: {row['what']}", "on" if row["on"] else "off",
            _gib(row["measured_saved"]), _gib(row["saved"]), _number(row["measured_seconds"], 2),
            _number(row["seconds"], 2), {True: "right", False: "wrong", None: "-"}[row["right"]],
        )
        for row in _record(results, "h200_offload_advice")["advice"]
    ]  # fmt: skip
    columns = (
        "torch has, GiB", "what", "advice", "saves, GiB", "predicted", "s a step", "predicted", "it was",
    )  # fmt: skip
    return markdown(columns, lines)


def elastic(results: Path) -> str:
    """A step with components together, apart, and as placed; on one GPU."""
    return _elastic(results, "h200_elastic")


def elastic_two(results: Path) -> str:
    """The same on two GPUs."""
    return _elastic(results, "h200x2_elastic")


def elastic_short(results: Path) -> str:
    """The same on one GPU, in fewer columns."""
    lines = [
        (
            f"{row['placement']} ({row['where']})", _number(row["step_s"], 2), _number(row["predicted_step_s"], 2),
            _gib(max(row["peaks"], default=None)), _gib(row["predicted_peak"]),
        )
        for row in _rows(results, "h200_elastic")
    ]  # fmt: skip
    return markdown(("", "s a step", "predicted", "fullest GPU, GiB", "predicted"), lines)


def _elastic(results: Path, name: str) -> str:
    lines = [
        (
            row["placement"], row["where"], _number(row["tokens_per_s"], 0), _number(row["step_s"], 2),
            _number(row["predicted_step_s"], 2), _gib(max(row["peaks"], default=None)), _gib(row["predicted_peak"]),
            row["outcome"],
        )
        for row in _rows(results, name)
    ]  # fmt: skip
    columns = (
        "", "where", "tokens/s", "s a step", "predicted", "fullest GPU, GiB", "predicted", "outcome",
    )  # fmt: skip
    return markdown(columns, lines)


TABLES: dict[str, Callable[[Path], str]] = {
    "memory": memory, "maps": maps, "training-maps": training_maps, "stock": stock,
    "pipeline": pipeline, "pipeline-one-gpu": pipeline_one_gpu, "ladder": ladder, "ladder-80": ladder_80,
    "ladder-short": ladder_short, "generate": generation, "attention": attention, "offload-ways": offload_ways,
    "offload-short": offload_short,
    "offload-advice": offload_advice, "elastic": elastic, "elastic-short": elastic_short,
    "elastic-two-gpus": elastic_two,
}  # fmt: skip
"""By the name that a page gives."""


def _of(rows: Mapping[str, Mapping[str, Any]], phase: str) -> float | None:
    return rows[phase]["seconds"] if phase in rows else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _record(results: Path, name: str) -> dict[str, Any]:
    path = results / f"{name}.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"the result that the table is made of cannot be read ({type(error).__name__})"
        raise config_error(
            "no-result", str(path), None, why, "Run its bench with --out, or take the table out"
        ) from error
    return record


def _rows(results: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _record(results, name)["rows"]
    return rows


def with_tables(text: str, results: Path, where: str) -> str:
    """A page with its tables made anew. Raises ConfigError for a table of an unknown name, or one that does not end."""
    if text.count("<!-- table ") != len(_PLACE.findall(text)):
        why = "a table has no <!-- end of table -->, or no name"
        raise config_error("table-end", where, None, why, "End it before the next one begins")

    def made(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in TABLES:
            raise config_error("table", where, name, "no such table", f"Use some of {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n\n{TABLES[name](results)}\n<!-- end of table -->"

    return _PLACE.sub(made, text)


def drifted(root: Path = ROOT, *, write: bool = False) -> list[str]:
    """The pages whose tables are not what the results say; they are written anew with `write`."""
    found = []
    for name in PAGES:
        page = root / name
        if not page.is_file():
            continue
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text, root / RESULTS, name)) != text:
            found.append(name)
            if write:
                write_whole(page, new)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_shard.bench.readme_tables", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="say which pages have tables that the results do not make")
    what.add_argument("--write", action="store_true", help="make the tables anew")
    asked = parser.parse_args(arguments)
    try:
        found = drifted(write=asked.write)
    except ShardError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for name in found:
        print(f"{name}: {'written' if asked.write else 'its tables are not what docs/results says; use --write'}")
    return 1 if found and asked.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
