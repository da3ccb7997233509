"""A model over this machine's GPUs by a device_map: what a step takes with our dispatch, accelerate's, and on one GPU.

Of a machine with one GPU, or with gpus=1: pipeline_one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verl_shard.bench.gpus_meter import GpusMeter
from verl_shard.bench.maps import zoo
from verl_shard.bench.pipeline_checks import Gradients, compare_gradients, estimated_peaks, gradients_words, peaks_table
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
class Stepped:
    """What a step gave: a number for each micro-batch, on its device, and how many were in flight at most."""

    values: Sequence[Any]
    in_flight: int = 1


Step = Callable[[Any, Sequence[Mapping[str, Any]], bool], Stepped]
"""Takes the model, the micro-batches and whether a backward follows."""


@dataclass(frozen=True)
class Way:
    """A way to run micro-batches. prepare: lays a model out, in place, in the order in which ways are given. device_map: its
    own, whose memory is estimated; None where it is not. kinds, micro: what it is run with, by default all."""

    name: str
    prepare: Callable[[Any], object]
    step: Step
    device_map: Mapping[str, int] | None = None
    kinds: tuple[str, ...] = KINDS
    micro: tuple[int, ...] = MICRO


@dataclass(frozen=True)
class PipelineRow:
    """One way, kind of step and number of micro-batches. Peaks in bytes by GPU; none and no time when it ran out.

    in_flight: micro-batches at a time, at most. estimates: of the peaks, where they are estimated.
    """

    way: str
    kind: str
    micro_batches: int
    seconds: float | None
    peaks: tuple[int, ...]
    loss: float | None
    in_flight: int = 1
    estimates: tuple[int, ...] = ()


def bench_pipeline(
    *, result: Path | None, model: str = "qwen2-7b", runs: int = 4, gpus: int | None = None, as_json: bool = False
) -> list[PipelineRow] | list[OneRow]:
    """Measures a causal model of a model of the zoo's shape, with random weights in bf16, over the first GPUs, by default
    all; prints a table for each kind of step, one of the peaks beside their estimates, and how far gradients are from one
    GPU's; or JSON. JSON goes to `result` too, as soon as there is something: what was measured is there when it is cut off.
    On one GPU what is measured is the cost of our dispatch and, where verl is installed, of our engine.

    Raises ConfigError without a GPU, for more GPUs than there are and for an unknown model.
    """
    if model not in (known := [entry["name"] for entry in zoo()]):
        raise config_error("model", "--model", model, "not in the zoo", f"Use one of {', '.join(known)}")
    need_gpu("pipeline", "the tests run pipelines on devices of the host")
    import torch
    from transformers import AutoModelForCausalLM

    from verl_shard.bench.stock_cells import config_of

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

    def keep(rows: Sequence[PipelineRow] | Sequence[OneRow]) -> None:
        content["rows"] = [asdict(row) for row in rows]
        tell(SCHEMA, content, [], result=result)

    rows: list[PipelineRow] | list[OneRow]
    if n_gpus == 1:
        rows, left_out = on_one(made, ids, "cuda", meter, runs=runs, keep=keep)
        content["left_out"] = left_out
        shown = [one_table(model, BATCH, rows, left_out)]
    else:
        content["device_map"] = device_map = even_map(made, n_gpus)
        content["maps"] = maps = offered_maps(config, n_gpus)
        found = measure(made, ids, ways(device_map, maps), meter, runs=runs, keep=keep)
        rows = found = with_estimates(config, found, {"": device_map, **maps})
        keep(rows)
        content["gradients"] = gradients = asdict(check_gradients(made, ids, device_map))
        keep(rows)
        shown = [*tables(model, found), peaks_table(found), gradients_words(Gradients(**gradients))]
    tell(SCHEMA, content, shown, result=result, as_json=as_json)
    return rows


def on_one(
    made: Any, ids: Any, device: str, meter: Any, *, runs: int, keep: Callable[[Sequence[OneRow]], None]
) -> tuple[list[OneRow], str | None]:
    """Both parts on one device, and why the second was left out. The model is then on the host, for the engine to load."""
    rows = measure_dispatch(made, ids, 0 if device == "cuda" else device, meter, runs=runs)
    keep(rows)
    if (left_out := why_no_update()) is not None:
        return rows, left_out
    with tempfile.TemporaryDirectory(prefix="verl_shard_pipeline_") as folder:
        made.cpu().save_pretrained(folder)
        meter.empty()
        precision = "bf16" if device == "cuda" else "fp32"
        rows += measure_update(Path(folder), tuple(ids.shape), device, meter, runs=runs, precision=precision)
    keep(rows)
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


def offered_maps(config: Any, n_gpus: int) -> dict[str, dict[str, int]]:
    """The maps of build_device_map that are compared, by words: of equal weights, and of the peak of a training step of the
    most micro-batches, with checkpointing and without."""
    from verl_shard.mapping.build import build_device_map

    made = {"equal weights": build_device_map(config, n_gpus, purpose="inference", task="causal-lm")}
    for kind in KINDS[1:]:
        made[f"training, {kind}"] = build_device_map(
            config,
            n_gpus,
            purpose="training",
            task="causal-lm",
            in_flight=n_gpus,
            **training_pass(kind, MICRO[-1], n_gpus),
        )
    return {name: {key: int(gpu) for key, gpu in placed.items()} for name, placed in made.items()}


def training_pass(kind: str, micro_batches: int, in_flight: int) -> dict[str, Any]:
    """Of a micro-batch, in the words of estimate_memory. Where all are in flight, none begins when there are gradients."""
    return {
        "batch_size": BATCH[0] // micro_batches, "seq_len": BATCH[1], "precision": "bf16", "loss": "causal-lm",
        "optimizer": "sgd", "accumulating": micro_batches > in_flight, "gradient_checkpointing": kind == KINDS[2],
    }  # fmt: skip


def ways(device_map: Mapping[str, int], maps: Mapping[str, Mapping[str, int]] | None = None) -> list[Way]:
    """One GPU, accelerate's dispatch, and ours with as many micro-batches in flight as by default and with twice as many; with
    each other map, the most micro-batches, one at a time and as many in flight as there are GPUs."""
    import accelerate

    from verl_shard.runtime.micro_batches import run_micro_batches
    from verl_shard.runtime.pipeline import dispatch_model

    n_gpus = len(set(device_map.values()))

    def ours(in_flight: Any) -> Step:
        def step(model: Any, batches: Sequence[Mapping[str, Any]], train: bool) -> Stepped:
            if train:
                ran = run_micro_batches(model, batches, in_flight=in_flight)
                return Stepped(ran.losses, ran.in_flight)
            ran = run_micro_batches(model, batches, lambda o, b: o.loss, in_flight=in_flight, forward_only=True)
            return Stepped(ran.results, ran.in_flight)

        return step

    def lay_out(placed: Mapping[str, int]) -> Callable[[Any], object]:
        return lambda model: dispatch_model(model, placed, force_hooks=n_gpus == 1)

    def plain(model: Any, batches: Sequence[Mapping[str, Any]], train: bool) -> Stepped:
        return Stepped(one_by_one(model, batches, train))

    offered = [
        Way("one GPU", lambda model: None, plain, {"": 0}),
        Way(
            "accelerate's dispatch_model",
            lambda model: accelerate.dispatch_model(model, dict(device_map), force_hooks=True),
            plain,
        ),
        Way("ours", lay_out(device_map), ours("auto"), device_map),
        Way("ours, two in flight a GPU", lay_out(device_map), ours(2 * n_gpus), device_map),
    ]
    for name, placed in (maps or {}).items():
        kinds = tuple(kind for kind in KINDS[1:] if not name.startswith("training") or name.endswith(f", {kind}"))
        for number, words in ((1, "one at a time"), (n_gpus, "one in flight a GPU")):
            of_map = f"ours, map of {name.split(', ')[0]}, {words}"
            offered.append(Way(of_map, lay_out(placed), ours(number), placed, kinds, MICRO[-1:]))
    return offered


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


def measure(
    model: Any, ids: Any, offered: Sequence[Way], meter: Any, *, runs: int, keep: Callable[[list[PipelineRow]], None]
) -> list[PipelineRow]:
    """All ways in turn, each with all kinds of steps. ids: (sequences, tokens), divided into micro-batches. keep: told all
    rows that there are, after each way."""
    rows: list[PipelineRow] = []
    for way in offered:
        way.prepare(model)
        meter.empty()
        for kind in way.kinds:
            train = kind != KINDS[0]
            model.train(train)
            if kind == KINDS[2]:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for n in [n for n in way.micro if n > 1 or not train]:
                rows.append(_timed(model, way, kind, micro_batches(ids, n), meter, runs))
                shown = "out of memory" if rows[-1].seconds is None else f"{rows[-1].seconds:.3f} s"
                err.print(f"{way.name}, {kind}, {n} micro-batches: {shown}")
        model.gradient_checkpointing_disable()
        keep(rows)
    return rows


def micro_batches(ids: Any, n: int) -> list[dict[str, Any]]:
    return [{"input_ids": part, "labels": part, "use_cache": False} for part in ids.chunk(n)]


def with_estimates(
    config: Any, rows: Sequence[PipelineRow], maps: Mapping[str, Mapping[str, int]]
) -> list[PipelineRow]:
    """Training rows with what their peaks were estimated to be. maps: of ours by what their ways say, "" is the first."""
    made = []
    for row in rows:
        placed: Mapping[str, int] | None = {"": 0} if row.way == "one GPU" else None
        if row.way.startswith("ours"):
            named = row.way.removeprefix("ours, map of ").split(", ")[0] if "map of" in row.way else ""
            placed = maps.get(named) or maps[f"{named}, {row.kind}"]
        if placed is None or row.kind == KINDS[0] or not row.peaks:
            made.append(row)
            continue
        wanted = training_pass(row.kind, row.micro_batches, row.in_flight)
        peaks = estimated_peaks(config, placed, row.in_flight, **wanted)
        made.append(replace(row, estimates=tuple(peaks.get(gpu, 0) for gpu in range(len(row.peaks)))))
    return made


def check_gradients(model: Any, ids: Any, device_map: Mapping[str, int], *, micro: int = 4) -> Gradients:
    """Gradients of our pipeline beside those of one GPU, on which the model is in the end."""
    from verl_shard.runtime.micro_batches import run_micro_batches
    from verl_shard.runtime.pipeline import dispatch_model

    batches = micro_batches(ids, micro)
    model.train()
    dispatch_model(model, device_map)

    def alone() -> object:
        dispatch_model(model, {"": 0})
        return one_by_one(model, batches, True)

    return compare_gradients(model, lambda: run_micro_batches(model, batches), alone, micro)


def _timed(model: Any, way: Way, kind: str, batches: Sequence[Mapping[str, Any]], meter: Any, runs: int) -> PipelineRow:
    """One step to warm up, and the median of the others; of an even number the lower one."""
    import torch

    taken = []
    loss, in_flight = 0.0, 1
    meter.begin_peak()
    try:
        for _ in range(1 + runs):
            meter.wait()
            began = time.perf_counter()
            made = way.step(model, batches, kind != KINDS[0])
            meter.wait()
            taken.append(time.perf_counter() - began)
            loss, in_flight = sum(float(part) for part in made.values) / len(batches), made.in_flight
            del made
            model.zero_grad(set_to_none=True)
    except torch.cuda.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        meter.empty()
        return PipelineRow(way.name, kind, len(batches), None, (), None)
    return PipelineRow(way.name, kind, len(batches), statistics.median_low(taken[1:]), meter.peaks(), loss, in_flight)


def tables(model: str, rows: Sequence[PipelineRow]) -> list[Any]:
    """A table for each kind of step: seconds by number of micro-batches, and the fullest GPU at the most of them."""
    made = []
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        counts = sorted({row.micro_batches for row in of_kind})
        shown = []
        for name in dict.fromkeys(row.way for row in of_kind):
            by_count = {row.micro_batches: row for row in of_kind if row.way == name}
            measured = [by_count.get(n) for n in counts]  # maps are compared at the most micro-batches only
            seconds = [None if row is None else row.seconds for row in measured]
            peaks = ["-" if row is None or not row.peaks else f"{max(row.peaks) / 1e9:.1f}" for row in measured]
            shown.append((name, *("-" if s is None else f"{s:.3f}" for s in seconds), " ".join(peaks)))
        columns = ("", *(f"M={n}" for n in counts), "fullest GPU, GB")
        title = f"{model}, {BATCH[0]} x {BATCH[1]} tokens in M micro-batches, {kind}: seconds"
        made.append(table(title, columns, shown))
    return made
