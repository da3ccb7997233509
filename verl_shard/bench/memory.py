"""Estimates held against real steps on the GPU at hand, with shapes drawn anew each time."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.estimators import Asked, Estimator, to_ask
from verl_shard.bench.memory_rows import KINDS, Row, draw
from verl_shard.bench.record import machine, tell
from verl_shard.common.errors import RunError, config_error
from verl_shard.common.tables import err, table
from verl_shard.common.units import format_bytes

SCHEMA = "verl_shard/bench-memory/2"
_ROOM = 0.85
"""Of the card's memory, the most that a row may be estimated at."""


@dataclass(frozen=True)
class Measured:
    """Bytes: what was estimated and what torch measured, peak and reserved; others: their estimates of the peak."""

    row: Row
    peak: int
    measured_peak: int
    reserved: int
    measured_reserved: int
    others: dict[str, int]
    estimate_s: float


def bench_memory(
    *, seed: int, n: int, result: Path | None, kinds: Sequence[str] = tuple(KINDS), slow: bool = False
) -> list[Measured]:
    """Estimates and runs `n` rows; prints both side by side, and writes JSON when `result` is given.

    kinds: of rows, taken in turn: some of KINDS. slow: asks the estimators too that take long.
    Raises ConfigError without a GPU or for an unknown kind, RunError when no row fits.
    """
    import torch

    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise config_error("kind", "--kind", unknown[0], "not a kind of rows", f"Use some of {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        fix = "Run it on a machine with a GPU; estimates themselves need none: verl-shard estimate"
        raise config_error("no-gpu", "bench memory", None, "it measures on a GPU, and torch sees none", fix)
    total = torch.cuda.get_device_properties(0).total_memory
    estimators = _ask(slow)
    measured: list[Measured] = []
    skipped = 0
    for row in draw(seed, 4 * n, kinds):
        if len(measured) == n:
            break
        began = time.perf_counter()
        estimate = _estimate(row)
        seconds = time.perf_counter() - began
        if max(estimate.peak, estimate.reserved) > _ROOM * total:
            skipped += 1
            continue
        peak, reserved = measure(row)
        others = _others(row, estimators)
        measured.append(Measured(row, estimate.peak, peak, estimate.reserved, reserved, others, seconds))
        err.print(f"{row.model}: {row.words()}: {format_bytes(estimate.peak)}, measured {format_bytes(peak)}")
    if not measured:
        raise RunError(f"all {skipped} rows are estimated at more than {_ROOM:.0%} of this GPU's {format_bytes(total)}")
    if skipped:
        limit = f"{_ROOM:.0%} of {format_bytes(total)}"
        err.print(f"{len(measured)} of {n} rows; {skipped} were left out, estimated at more than {limit}")
    _tell(measured, machine(), seed, result)
    return measured


def compare_memory(recorded: Path, *, result: Path | None, slow: bool = False) -> list[Measured]:
    """What was measured elsewhere beside what is estimated now, by us and by others: no GPU is needed.

    recorded: a file that `bench_memory` wrote. Raises ConfigError for another file.
    """
    try:
        known = json.loads(recorded.read_text())
        rows = [(Row(**entry["row"]), entry["measured_peak"], entry["measured_reserved"]) for entry in known["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it cannot be read as what bench memory writes ({type(error).__name__}: {error})"
        raise config_error("recorded", "--compare", str(recorded), why, "Give a file of bench memory --out") from error
    estimators = _ask(slow)
    measured = []
    for row, peak, reserved in rows:
        began = time.perf_counter()
        estimate = _estimate(row)
        seconds = time.perf_counter() - began
        measured.append(
            Measured(row, estimate.peak, peak, estimate.reserved, reserved, _others(row, estimators), seconds)
        )
    when = {name: known[name] for name in ("date", "command") if name in known}
    _tell(measured, known.get("machine") or {}, known.get("seed"), result, when)
    return measured


def _tell(
    measured: Sequence[Measured],
    facts: Mapping[str, Any],
    seed: int | None,
    result: Path | None,
    when: Mapping[str, str] | None = None,
) -> None:
    """when: date and command of the measurement, where it is not of now."""
    content = {"seed": seed, "rows": [asdict(m) for m in measured], **(when or {})}
    tell(SCHEMA, content, _tables(measured), result=result, facts=facts)


def _config(row: Row) -> Any:
    from transformers import AutoConfig

    fields = dict(row.config)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def _estimate(row: Row) -> Any:
    from verl_shard.memory.estimate import estimate_memory

    return estimate_memory(_config(row), phase=row.phase, task="causal-lm", **row.fields)


def measure(row: Row) -> tuple[int, int]:
    """Runs a row; the peak of its steady state and what torch had reserved, in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == 0, "nothing is left of the row before"
    f = row.fields
    mixed = row.phase == "train" and f.get("precision") == "bf16-mixed"
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(
            _config(row),
            dtype=torch.float32 if mixed else torch.bfloat16,
            attn_implementation=f.get("attn_implementation", "sdpa"),
        )
    torch.cuda.empty_cache()  # a tied head is made before it is tied
    given = _inputs(f)
    try:
        if row.phase == "train":
            peak = _train(model, given, f, mixed)
        else:
            model.eval().requires_grad_(False)
            peak = _infer(model, given, row)
        return peak, torch.cuda.max_memory_reserved()
    finally:
        del model, given
        gc.collect()


def _inputs(f: dict[str, Any]) -> dict[str, Any]:
    """Token ids, (sequences, tokens); packed, all in one row with positions that begin anew at each sequence."""
    import torch

    ids = torch.randint(0, 1000, (f["batch_size"], f["seq_len"]), device="cuda")
    if not f.get("packed"):
        return {"input_ids": ids}
    positions = torch.arange(f["seq_len"], device="cuda").repeat(f["batch_size"])
    return {"input_ids": ids.reshape(1, -1), "position_ids": positions.reshape(1, -1)}


def _train(model: Any, given: dict[str, Any], f: dict[str, Any], mixed: bool) -> int:
    import torch

    model.train()
    if f.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer: Any
    if f["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=f["optimizer"] == "adamw-fused" or None)
    peak = 0
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
            result = model(**given, labels=given["input_ids"], use_cache=False)
        result.loss.backward()
        del result
        optimizer.step()
        peak = torch.cuda.max_memory_allocated()
        optimizer.zero_grad(set_to_none=True)
    return peak


def _infer(model: Any, given: dict[str, Any], row: Row) -> int:
    import torch

    peak = 0
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            if row.phase == "forward":
                result = model(**given, use_cache=False)
            else:
                n, ids = row.fields["new_tokens"], given["input_ids"]
                result = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False
                )
        peak = torch.cuda.max_memory_allocated()
        del result
    return peak


def _others(row: Row, estimators: Sequence[Estimator]) -> dict[str, int]:
    asked = Asked(_config(row), row.phase, row.fields)
    said = {estimator.name: estimator.of(asked) for estimator in estimators}
    return {name: size for name, size in said.items() if size is not None}


def _ask(slow: bool) -> list[Estimator]:
    asked, missing = to_ask(slow=slow)
    for estimator in missing:
        err.print(f"{estimator.name} is not asked: it is not installed (pip install {estimator.distribution})")
    return asked


def _off(estimate: int, measured: int) -> float:
    return estimate / measured - 1


def _tables(measured: Sequence[Measured]) -> list[Any]:
    rows = [
        (
            m.row.model,
            m.row.words(),
            format_bytes(m.measured_peak),
            f"{_off(m.peak, m.measured_peak):+.2%}",
            f"{_off(m.reserved, m.measured_reserved):+.1%}",
        )
        for m in measured
    ]
    columns = ("model", "pass", "measured peak", "estimate", "reserved")
    return [table("Estimated against measured", columns, rows), _summary(measured)]


def _summary(measured: Sequence[Measured]) -> Any:
    def line(name: str, errors: Sequence[float]) -> tuple[str, str, str, int]:
        off = [abs(error) for error in errors]
        return name, f"{statistics.median(off):.2%}", f"{max(off):.2%}", len(off)

    rows = []
    for kind in KINDS:
        for phase in ("train", "forward", "generate"):
            own = [m for m in measured if (m.row.kind, m.row.phase) == (kind, phase)]
            if own:
                name = phase if kind == "dense" else f"{phase}, {kind}"
                rows.append(line(f"{name}: peak", [_off(m.peak, m.measured_peak) for m in own]))
    rows.append(line("reserved", [_off(m.reserved, m.measured_reserved) for m in measured]))
    for name in dict.fromkeys(name for m in measured for name in m.others):
        asked = [m for m in measured if name in m.others]
        rows.append(line(f"{name}: peak", [_off(m.others[name], m.measured_peak) for m in asked]))
        train = [m for m in asked if m.row.phase == "train"]
        if train and len(train) < len(asked):
            rows.append(line(f"{name}: peak of training", [_off(m.others[name], m.measured_peak) for m in train]))
    return table("Error", ("", "median", "worst", "rows"), rows)
