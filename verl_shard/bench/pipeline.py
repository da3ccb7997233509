"""A model over this machine's GPUs by a device_map: what a step takes with our dispatch, accelerate's, and on one GPU.

Of a machine with one GPU, or with gpus=1: pipeline_one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.gpus_meter import GpusMeter
from verl_shard.bench.maps import zoo
from verl_shard.bench.pipeline_one import OneRow, measure_dispatch, measure_update, one_table, why_no_update
from verl_shard.bench.rates import need_gpu
from verl_shard.bench.record import tell
from verl_shard.common.errors import config_error
from verl_shard.common.tables import err, table

SCHEMA = "verl_shard/bench-pipeline/1"
BATCH = (16, 1024)
"""Sequences and tokens of each."""
KINDS = ("forward", "forward + backward", "with gradient checkpointing")
MICRO = (1, 2, 4, 8)


@dataclass(frozen=True)
class Way:
    """A way to run micro-batches. prepare: lays a model out, in place, in the order in which ways are given. step: takes
    the model, the micro-batches and whether a backward follows; returns a number for each micro-batch, on its device."""

    name: str
    prepare: Callable[[Any], object]
    step: Callable[[Any, Sequence[Mapping[str, Any]], bool], Sequence[Any]]


@dataclass(frozen=True)
class PipelineRow:
    """One way, kind of step and number of micro-batches. Peaks in bytes by GPU; none and no time when it ran out."""

    way: str
    kind: str
    micro_batches: int
    seconds: float | None
    peaks: tuple[int, ...]
    loss: float | None


def bench_pipeline(
    *, result: Path | None, model: str = "qwen2-7b", runs: int = 4, gpus: int | None = None, as_json: bool = False
) -> list[PipelineRow] | list[OneRow]:
    """Measures a causal model of a model of the zoo's shape, with random weights in bf16, over the first GPUs, by default
    all; prints a table for each kind of step, or JSON, and writes JSON when `result` is given. On one GPU what is measured
    is the cost of our dispatch and, where verl is installed, of our engine.

    Raises ConfigError without a GPU, for more GPUs than there are and for an unknown model.
    """
    if model not in (known := [entry["name"] for entry in zoo()]):
        raise config_error("model", "--model", model, "not in the zoo", f"Use one of {', '.join(known)}")
    need_gpu("pipeline", "the tests run pipelines on devices of the host")
    import torch
    from transformers import AutoModelForCausalLM

    from verl_shard.bench.stock import config_of

    there = torch.cuda.device_count()
    n_gpus = there if gpus is None else gpus
    if n_gpus > there:
        raise config_error("gpus", "--gpus", n_gpus, f"there are {there}", "Give fewer")
    config = config_of(model)
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = torch.randint(1, config.vocab_size, BATCH, generator=torch.Generator().manual_seed(1)).to("cuda:0")
    content: dict[str, Any] = {"model": model, "gpus": n_gpus, "batch": BATCH}
    meter = GpusMeter(n_gpus)
    rows: list[PipelineRow] | list[OneRow]
    if n_gpus == 1:
        rows, left_out = on_one(made, ids, "cuda", meter, runs=runs)
        content["left_out"] = left_out
        shown = [one_table(model, BATCH, rows, left_out)]
    else:
        content["device_map"] = device_map = even_map(made, n_gpus)
        rows = measure(made, ids, ways(device_map), meter, runs=runs)
        shown = tables(model, rows)
    content["rows"] = [asdict(row) for row in rows]
    tell(SCHEMA, content, shown, result=result, as_json=as_json)
    return rows


def on_one(made: Any, ids: Any, device: str, meter: Any, *, runs: int) -> tuple[list[OneRow], str | None]:
    """Both parts on one device, and why the second was left out. The model is then on the host, for the engine to load."""
    rows = measure_dispatch(made, ids, 0 if device == "cuda" else device, meter, runs=runs)
    if (left_out := why_no_update()) is not None:
        return rows, left_out
    with tempfile.TemporaryDirectory(prefix="verl_shard_pipeline_") as folder:
        made.cpu().save_pretrained(folder)
        meter.empty()
        precision = "bf16" if device == "cuda" else "fp32"
        rows += measure_update(Path(folder), tuple(ids.shape), device, meter, runs=runs, precision=precision)
    return rows, None


def even_map(model: Any, n_gpus: int) -> dict[str, int]:
    """A map by arithmetic, not by memory: the head counts as many blocks as it has times a block's parameters."""
    from verl_shard.models.chain import no_split_classes, parts_in_order

    named = dict(model.named_modules())
    parts = parts_in_order(model, no_split_classes(model, None))
    sizes = [0 if p.place == "before" else sum(w.numel() for w in named[p.name].parameters()) for p in parts]
    tied = model.config.tie_word_embeddings
    placed, done = {}, 0
    for part, size in zip(parts, sizes, strict=True):
        middle = (done + size / 2) / sum(sizes)
        done += size
        placed[part.name] = min(int(middle * n_gpus), n_gpus - 1)
    if tied:  # the head is where the embedding is
        placed[parts[-1].name] = 0
    return placed


def ways(device_map: Mapping[str, int]) -> list[Way]:
    """One GPU, accelerate's dispatch, and ours with as many micro-batches in flight as by default and as there are GPUs."""
    import accelerate

    from verl_shard.runtime.micro_batches import run_micro_batches
    from verl_shard.runtime.pipeline import dispatch_model

    n_gpus = len(set(device_map.values()))

    def ours(in_flight: Any) -> Callable[[Any, Sequence[Mapping[str, Any]], bool], Sequence[Any]]:
        def step(model: Any, batches: Sequence[Mapping[str, Any]], train: bool) -> Sequence[Any]:
            if train:
                return run_micro_batches(model, batches, in_flight=in_flight).losses
            made = run_micro_batches(model, batches, lambda o, b: o.loss, in_flight=in_flight, forward_only=True)
            return made.results

        return step

    def lay_out(model: Any) -> None:
        dispatch_model(model, device_map, force_hooks=n_gpus == 1)

    return [
        Way("one GPU", lambda model: None, one_by_one),
        Way(
            "accelerate's dispatch_model",
            lambda model: accelerate.dispatch_model(model, dict(device_map), force_hooks=True),
            one_by_one,
        ),
        Way("ours", lay_out, ours("auto")),
        Way("ours, one in flight a GPU", lay_out, ours(n_gpus)),
    ]


def one_by_one(model: Any, batches: Sequence[Mapping[str, Any]], train: bool) -> Sequence[Any]:
    """Each micro-batch with its backward, as a plain loop does it."""
    import torch

    losses = []
    with torch.set_grad_enabled(train):
        for batch in batches:
            loss = model(**batch).loss
            if train:
                loss.backward()
            losses.append(loss.detach())
    return losses


def measure(model: Any, ids: Any, offered: Sequence[Way], meter: Any, *, runs: int) -> list[PipelineRow]:
    """All ways in turn, each with all kinds of steps. ids: (sequences, tokens), divided into micro-batches."""
    rows = []
    for way in offered:
        way.prepare(model)
        meter.empty()
        for kind in KINDS:
            train = kind != KINDS[0]
            model.train(train)
            if kind == KINDS[2]:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for n in MICRO[1:] if train else MICRO:
                batches = [{"input_ids": part, "labels": part, "use_cache": False} for part in ids.chunk(n)]
                rows.append(_timed(model, way, kind, batches, meter, runs))
                shown = "out of memory" if rows[-1].seconds is None else f"{rows[-1].seconds:.3f} s"
                err.print(f"{way.name}, {kind}, {n} micro-batches: {shown}")
        model.gradient_checkpointing_disable()
    return rows


def _timed(model: Any, way: Way, kind: str, batches: Sequence[Mapping[str, Any]], meter: Any, runs: int) -> PipelineRow:
    """One step to warm up, and the median of the others."""
    import torch

    taken = []
    loss = 0.0
    meter.begin_peak()
    try:
        for _ in range(1 + runs):
            meter.wait()
            began = time.perf_counter()
            made = way.step(model, batches, kind != KINDS[0])
            meter.wait()
            taken.append(time.perf_counter() - began)
            loss = sum(float(part) for part in made) / len(batches)
            del made
            model.zero_grad(set_to_none=True)
    except torch.cuda.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        meter.empty()
        return PipelineRow(way.name, kind, len(batches), None, (), None)
    return PipelineRow(way.name, kind, len(batches), statistics.median(taken[1:]), meter.peaks(), loss)


def tables(model: str, rows: Sequence[PipelineRow]) -> list[Any]:
    """A table for each kind of step: seconds by number of micro-batches, and the fullest GPU at the most of them."""
    made = []
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        counts = sorted({row.micro_batches for row in of_kind})
        shown = []
        for name in dict.fromkeys(row.way for row in of_kind):
            by_count = {row.micro_batches: row for row in of_kind if row.way == name}
            seconds = [by_count[n].seconds for n in counts]
            peaks = [f"{max(by_count[n].peaks) / 1e9:.1f}" if by_count[n].peaks else "-" for n in counts]
            shown.append((name, *("-" if s is None else f"{s:.3f}" for s in seconds), " ".join(peaks)))
        columns = ("", *(f"M={n}" for n in counts), "fullest GPU, GB")
        title = f"{model}, {BATCH[0]} x {BATCH[1]} tokens in M micro-batches, {kind}: seconds"
        made.append(table(title, columns, shown))
    return made
