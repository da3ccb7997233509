"""How even device maps are, and how long they take: ours, accelerate's, and transformers' "auto" of two versions; and what a
map that is even in the peak of training is worth."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.record import tell
from verl_shard.bench.rivals import accelerate_map, answer, build, build_from, quiet
from verl_shard.common.errors import DoesNotFitError, RunError, config_error
from verl_shard.common.tables import err, table
from verl_shard.common.units import GIB

SCHEMA = "verl_shard/bench-maps/1"
GPUS = (2, 3, 4, 5, 6, 8)
TIGHT = 1.1
"""The tight limit of a GPU, over an even share of the model."""
_MANY = 40_000
_LONG = {"batch_size": 4, "seq_len": 2048, "precision": "bf16"}
TRAINING: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Qwen2-7B shape, 4 x 2048 tokens", "qwen2-7b", _LONG),
    ("the same with gradient checkpointing", "qwen2-7b", {**_LONG, "gradient_checkpointing": True}),
    ("Qwen2-0.5B shape, 8 x 1024 tokens, bf16-mixed", "qwen2-0.5b", {
        "batch_size": 8, "seq_len": 1024, "precision": "bf16-mixed",
    }),
)  # fmt: skip
"""In words, the model, and fields of the pass: of a step with AdamW over two GPUs."""


@dataclass(frozen=True)
class Quality:
    """Over all cells: the fullest GPU's bytes over the optimum's (median, 90th percentile, worst) where the whole model
    is on GPUs; maps with an empty GPU; tight cells in which it left a part for the CPU, or raised, though a split fits."""

    median: float
    p90: float
    worst: float
    empty: int
    spilled: int
    feasible: int


@dataclass(frozen=True)
class Even:
    """A training step over GPUs. weights, peak: of a map that is even in the weights, and of one that is even in the peak: the
    estimated bytes at the peak of each GPU, which tests/mapping/test_training.py holds against what was measured."""

    words: str
    model: str
    fields: Mapping[str, Any]
    weights: tuple[int, ...]
    peak: tuple[int, ...]


@dataclass(frozen=True)
class Speed:
    """Seconds from a configuration to a map of four GPUs, the fastest of several turns in one warm process."""

    ours: float
    accelerate: float


def zoo() -> list[dict[str, Any]]:
    """Configurations of published models, with their published numbers of parameters."""
    text = (Path(__file__).with_name("data") / "zoo.json").read_text(encoding="utf-8")
    models: list[dict[str, Any]] = json.loads(text)
    return models


def optimum(sizes: Sequence[int], n_gpus: int) -> int:
    """The smallest largest sum of any contiguous split, by bisection and a greedy fill: not how ours is found."""

    def fits(limit: int) -> bool:
        used, room = 1, limit
        for size in sizes:
            if size > room:
                used, room = used + 1, limit
            room -= size
        return used <= n_gpus

    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def bench_maps(*, quick: bool, other_transformers: str | None, result: Path | None) -> None:
    """Runs all of it, prints the tables, and writes JSON when `result` is given. Raises ConfigError for what is no version."""
    check_version(other_transformers)
    quiet()
    models = zoo()[:6] if quick else zoo()
    err.print("Timing maps")
    speeds = {entry["name"]: _speed(entry, turns=3 if quick else 7) for entry in models}
    err.print("Making maps")
    quality = _qualities(models, other_transformers)
    more = _more_times()
    err.print("Making maps for training")
    even = [training_maps(*row) for row in (TRAINING[-1:] if quick else TRAINING)]
    content = {
        "models": len(models), "cells": len(models) * len(GPUS),
        "quality": {name: asdict(value) for name, value in quality.items()},
        "seconds": {name: asdict(value) for name, value in speeds.items()},
        "more_seconds": more, "training": [asdict(row) for row in even],
    }  # fmt: skip
    times = table("and", ("", "seconds"), [(name, f"{seconds:.2f}") for name, seconds in more.items()])
    tell(SCHEMA, content, [quality_table(quality), speed_table(speeds), times, even_table(even)], result=result)


def check_version(other_transformers: str | None) -> None:
    """Raises ConfigError for text that names no version of a package, which pip would only say after all maps are made."""
    from packaging.version import InvalidVersion, Version

    if other_transformers is None:
        return
    try:
        Version(other_transformers)
    except InvalidVersion as error:
        fix = "Give one such as 5.24.0, or leave it out"
        raise config_error(
            "not-a-version", "--other-transformers", other_transformers, "it is no version", fix
        ) from error


def training_maps(words: str, model: str, fields: Mapping[str, Any], gpus: int = 2) -> Even:
    """Both maps of a training step, and what each GPU would take with them. fields: of the pass."""
    from transformers import AutoConfig

    from verl_shard.mapping.build import build_device_map
    from verl_shard.memory.estimate import estimate_memory

    entry = next(entry for entry in zoo() if entry["name"] == model)
    config, task = AutoConfig.for_model(entry["model_type"], **entry["kwargs"]), _task(entry)

    def peaks(**asked: Any) -> tuple[int, ...]:
        made = build_device_map(config, gpus, task=task, **asked)
        estimate = estimate_memory(config, phase="train", task=task, device_map=made, **fields)
        return tuple(estimate.gpus[gpu].peak for gpu in range(gpus))

    return Even(words, model, fields, peaks(), peaks(purpose="training", **fields))


def _speed(entry: dict[str, Any], turns: int) -> Speed:
    """Turn by turn, so that both meet the same machine."""
    from transformers import AutoConfig

    from verl_shard.mapping.build import build_device_map

    auto, fields = entry["auto"], entry["kwargs"]
    task = _task(entry)
    times: dict[str, list[float]] = {"ours": [], "accelerate": []}
    for _ in range(turns):
        config = AutoConfig.for_model(entry["model_type"], **fields)
        began = time.perf_counter()
        build_device_map(config, 4, task=task)
        times["ours"].append(time.perf_counter() - began)
        began = time.perf_counter()
        accelerate_map(build_from(config, auto), 4, None)
        times["accelerate"].append(time.perf_counter() - began)
    return Speed(min(times["ours"]), min(times["accelerate"]))


def _task(entry: dict[str, Any]) -> str:
    if entry["auto"].endswith("ForCausalLM"):
        return "causal-lm"
    return "reward" if "Sequence" in entry["auto"] else "process-reward"


def _qualities(models: Sequence[dict[str, Any]], other: str | None) -> dict[str, Quality]:
    import transformers
    from transformers import AutoConfig

    from verl_shard.mapping.build import build_device_map
    from verl_shard.models.read import read_spec

    specs, cells = [], []
    for entry in models:
        config = AutoConfig.for_model(entry["model_type"], **entry["kwargs"])
        spec = read_spec(config, task=_task(entry))
        specs.append(spec)
        wanted: list[tuple[int, int | None]] = []
        for n in GPUS:
            wanted += [(n, None), (n, int(TIGHT * spec.n_bytes / n))]
        cells.append((entry["model_type"], entry["auto"], entry["kwargs"], wanted))

    def ours(spec: Any, n: int, cap: int | None) -> Any:
        try:
            return dict(build_device_map(spec, n, max_memory=None if cap is None else dict.fromkeys(range(n), cap)))
        except DoesNotFitError as error:
            return str(error)

    made: dict[str, list[list[Any]]] = {
        "verl_shard": [[ours(spec, n, cap) for n, cap in cell[3]] for spec, cell in zip(specs, cells, strict=True)],
        "accelerate": [
            [_or_text(accelerate_map, model, n, cap) for n, cap in cell[3]]
            for cell in cells
            if (model := build(*cell[:3]))
        ],
        f'transformers {transformers.__version__} "auto"': answer(cells),
    }
    if other is not None:
        made[f'transformers {other} "auto"'] = _answer_of(other, cells)
    return {name: _judge(specs, cells, answers) for name, answers in made.items()}


def _or_text(make: Callable[..., Any], *given: Any) -> Any:
    try:
        return make(*given)
    except Exception as error:  # noqa: BLE001 - what a rival raises is its answer
        return f"{type(error).__name__}: {error}"


def _judge(specs: Sequence[Any], cells: Sequence[Any], answers: Sequence[Sequence[Any]]) -> Quality:
    ratios: list[float] = []
    empty = spilled = feasible = 0
    for spec, cell, made in zip(specs, cells, answers, strict=True):
        sizes = [block.n_bytes for block in spec.blocks]
        useful = sum(block.stands_alone for block in spec.blocks)
        for (n, cap), answered in zip(cell[3], made, strict=True):
            best = optimum(sizes, n)
            fits = cap is None or best <= cap
            feasible += cap is not None and fits
            loads = {} if isinstance(answered, str) else spec.loads(answered)
            on_gpus = loads and not any(device in ("cpu", "disk") for device, held in loads.items() if held)
            spilled += fits and cap is not None and not on_gpus
            if cap is None and on_gpus:
                ratios.append(max(loads.values()) / best)
                empty += sum(1 for held in loads.values() if held) < min(n, useful)
    ratios.sort()
    p90 = ratios[int(0.9 * (len(ratios) - 1))]
    return Quality(statistics.median(ratios), p90, ratios[-1], empty, spilled, feasible)


def _answer_of(version: str, cells: Any) -> list[list[Any]]:
    """The maps of another transformers, put into a folder of its own and asked in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="verl_shard_bench_") as folder:
        err.print(f"Installing transformers {version} beside")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            folder,
            f"transformers=={version}",
        ]
        if subprocess.run(pip).returncode:
            raise RunError(f"transformers {version} could not be installed; leave --other-transformers out")
        script = str(Path(__file__).with_name("rivals.py"))
        done = subprocess.run(
            [sys.executable, script],
            input=json.dumps(cells),
            capture_output=True,
            text=True,
            env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"},
        )
        if done.returncode:
            last = (done.stderr.strip() or "it was killed").splitlines()[-1]
            raise RunError(f"transformers {version} made no maps: {last}")
        answers: list[list[Any]] = json.loads(done.stdout)
        if all(isinstance(made, str) for row in answers for made in row):
            raise RunError(f"transformers {version} made no maps: {answers[0][0]}")
        return answers


def _more_times() -> dict[str, float]:
    from transformers import AutoConfig

    from verl_shard.mapping.build import build_device_map

    model = _many_experts()
    began = time.perf_counter()
    build_device_map(model, 8)
    times = {f"a map of a module with {_MANY:,} expert Linears": time.perf_counter() - began}
    large = next(entry for entry in zoo() if entry["name"] == "llama-3.1-70b")
    for checkpointing in (False, True):
        config = AutoConfig.for_model(large["model_type"], **large["kwargs"])
        began = time.perf_counter()
        build_device_map(config, 8, purpose="training", gradient_checkpointing=checkpointing)
        how = " with gradient checkpointing" if checkpointing else ""
        times[f"a training map of a 70B model{how}, from its configuration"] = time.perf_counter() - began
    return times


def _many_experts() -> Any:
    """A module of 40 blocks with 1,000 small Linears each, on meta."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(_MANY // 40))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(32_000, 64)
            self.layers = nn.ModuleList(Block() for _ in range(40))
            self.lm_head = nn.Linear(64, 32_000, bias=False)

    with torch.device("meta"):
        return Model()


def quality_table(quality: Mapping[str, Quality]) -> Any:
    """A row for each way to make maps."""
    rows = [
        (name, f"{q.median:.3f}", f"{q.p90:.3f}", f"{q.worst:.3f}", q.empty, f"{q.spilled} of {q.feasible}")
        for name, q in quality.items()
    ]
    columns = ("maps of", "median", "p90", "worst", "GPU left empty", "spilled though a split fits")
    return table("Fullest GPU over the optimum (bf16 weights)", columns, rows)


def even_table(rows: Sequence[Even]) -> Any:
    """A row for each training step."""

    def sizes(of: Sequence[int]) -> str:
        return ", ".join(f"{size / GIB:.1f}" for size in of)

    shown = [(row.words, sizes(row.weights), sizes(row.peak)) for row in rows]
    return table("A training step on two GPUs: GiB at the peak of each", ("", "even in weights", "in the peak"), shown)


def speed_table(speeds: Mapping[str, Speed]) -> Any:
    """A row for each model, in milliseconds."""
    rows = [
        (name, f"{s.ours * 1000:.0f}", f"{s.accelerate * 1000:.0f}", f"{s.ours / s.accelerate:.2f}")
        for name, s in speeds.items()
    ]
    slowest = max(s.ours / s.accelerate for s in speeds.values())
    rows.append(("worst", "", "", f"{slowest:.2f}"))
    return table("From a configuration to a map", ("model", "ours, ms", "accelerate, ms", "ratio"), rows)
