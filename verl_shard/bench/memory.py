"""Estimates held against real steps on the GPU at hand, with shapes drawn anew each time."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.maps import zoo
from verl_shard.bench.start import machine
from verl_shard.common.errors import RunError, config_error
from verl_shard.common.files import write_whole
from verl_shard.common.seeds import derive_seed
from verl_shard.common.tables import err, out, table
from verl_shard.common.units import format_bytes

SCHEMA = "verl_shard/bench-memory/1"
MODELS = (
    "qwen2-0.5b",
    "qwen3-0.6b",
    "gemma-3-1b",
    "gpt2",
    "gpt2-xl",
    "phi-3-mini",
    "qwen2-7b",
    "llama-3.1-8b",
    "mistral-7b",
)
_ROOM = 0.85
"""Of the card's memory, the most that a row may be estimated at."""


@dataclass(frozen=True)
class Row:
    """One thing that is run. fields: of PassSpec."""

    model: str
    config: dict[str, Any]
    phase: str
    fields: dict[str, Any]

    def words(self) -> str:
        """What it is, in a line."""
        said = {key: value for key, value in self.fields.items() if key not in ("batch_size", "seq_len")}
        return f"{self.phase} {self.fields['batch_size']} x {self.fields['seq_len']}" + "".join(
            f", {value if isinstance(value, str) else key if value is True else f'{key} {value}'}"
            for key, value in said.items()
            if value
        )


@dataclass(frozen=True)
class Measured:
    """Bytes: what was estimated and what torch measured, peak and reserved; accelerate's own estimate of the peak."""

    row: Row
    peak: int
    measured_peak: int
    reserved: int
    measured_reserved: int
    accelerate: int
    estimate_s: float


def draw(seed: int, n: int) -> list[Row]:
    """Rows of published models, with lengths, batches and settings drawn from `seed`."""
    chance = random.Random(derive_seed(seed, "bench", "memory"))
    models = {entry["name"]: entry for entry in zoo()}
    rows: list[Row] = []
    while len(rows) < n:
        name = chance.choice(MODELS)
        entry = models[name]
        config = {"model_type": entry["model_type"], **entry["kwargs"]}
        if entry["model_type"] == "gpt2":
            config.update({"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1})
        phase = chance.choice(("train", "train", "train", "forward", "generate"))
        longest = min(4096, config.get("max_position_embeddings") or config.get("n_positions") or 4096)
        length = 64 * chance.randint(2, longest // 64 - 4)
        fields: dict[str, Any] = {"batch_size": chance.choice((1, 2, 3, 4, 6, 8)), "seq_len": length}
        if phase == "train":
            fields["precision"] = chance.choice(("bf16", "bf16-mixed"))
            fields["gradient_checkpointing"] = chance.random() < 0.5
            fields["optimizer"] = chance.choice(("adamw", "adamw", "adamw-fused", "sgd"))
            if length <= 1024 and chance.random() < 0.2:
                fields["attn_implementation"] = "eager"
        elif phase == "generate":
            fields["new_tokens"] = chance.choice((32, 64, 128))
        rows.append(Row(name, config, phase, fields))
    return rows


def bench_memory(*, seed: int, n: int, result: Path | None) -> list[Measured]:
    """Estimates and runs `n` rows; prints both side by side, and writes JSON when `result` is given."""
    import torch

    if not torch.cuda.is_available():
        fix = "Run it on a machine with a GPU; estimates themselves need none: verl-shard estimate"
        raise config_error("no-gpu", "bench memory", None, "it measures on a GPU, and torch sees none", fix)
    total = torch.cuda.get_device_properties(0).total_memory
    measured: list[Measured] = []
    skipped = 0
    for row in draw(seed, 4 * n):
        if len(measured) == n:
            break
        began = time.perf_counter()
        estimate = _estimate(row)
        seconds = time.perf_counter() - began
        if max(estimate.peak, estimate.reserved) > _ROOM * total:
            skipped += 1
            continue
        peak, reserved = measure(row)
        measured.append(Measured(row, estimate.peak, peak, estimate.reserved, reserved, _accelerate(row), seconds))
        err.print(f"{row.model}: {row.words()}: {format_bytes(estimate.peak)}, measured {format_bytes(peak)}")
    if not measured:
        raise RunError(f"all {skipped} rows are estimated at more than {_ROOM:.0%} of this GPU's {format_bytes(total)}")
    out.print(_table(measured))
    out.print(_summary(measured))
    if skipped:
        limit = f"{_ROOM:.0%} of {format_bytes(total)}"
        err.print(f"{len(measured)} of {n} rows; {skipped} were left out, estimated at more than {limit}")
    if result is not None:
        record = {"schema": SCHEMA, "machine": machine(), "seed": seed, "rows": [asdict(m) for m in measured]}
        write_whole(result, json.dumps(record, indent=1) + "\n")
    return measured


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
    ids = torch.randint(0, 1000, (f["batch_size"], f["seq_len"]), device="cuda")
    try:
        if row.phase == "train":
            peak = _train(model, ids, f, mixed)
        else:
            model.eval().requires_grad_(False)
            peak = _infer(model, ids, row)
        return peak, torch.cuda.max_memory_reserved()
    finally:
        del model, ids
        gc.collect()


def _train(model: Any, ids: Any, f: dict[str, Any], mixed: bool) -> int:
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
            result = model(input_ids=ids, labels=ids, use_cache=False)
        result.loss.backward()
        del result
        optimizer.step()
        peak = torch.cuda.max_memory_allocated()
        optimizer.zero_grad(set_to_none=True)
    return peak


def _infer(model: Any, ids: Any, row: Row) -> int:
    import torch

    peak = 0
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            if row.phase == "forward":
                result = model(input_ids=ids, use_cache=False)
            else:
                n = row.fields["new_tokens"]
                result = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False
                )
        peak = torch.cuda.max_memory_allocated()
        del result
    return peak


def _accelerate(row: Row) -> int:
    """`accelerate estimate-memory`: four times the weights for training with Adam, the weights for inference."""
    from accelerate.utils import calculate_maximum_sizes

    from verl_shard.bench.rivals import build_from

    total, _ = calculate_maximum_sizes(build_from(_config(row), "AutoModelForCausalLM"))
    if row.phase != "train":
        return int(total)
    size = total * 2 if row.fields["precision"] == "bf16-mixed" else total
    return int(size * 4)


def _table(measured: Sequence[Measured]) -> Any:
    rows = [
        (
            m.row.model,
            m.row.words(),
            format_bytes(m.measured_peak),
            f"{m.peak / m.measured_peak - 1:+.2%}",
            f"{m.reserved / m.measured_reserved - 1:+.1%}",
            f"{m.accelerate / m.measured_peak - 1:+.0%}",
        )
        for m in measured
    ]
    columns = ("model", "pass", "measured peak", "estimate", "reserved", "accelerate")
    return table("Estimated against measured", columns, rows)


def _summary(measured: Sequence[Measured]) -> Any:
    def line(name: str, errors: Sequence[float]) -> tuple[str, str, str, int]:
        return name, f"{statistics.median(errors):.2%}", f"{max(errors):.2%}", len(errors)

    rows = []
    for phase in ("train", "forward", "generate"):
        own = [m for m in measured if m.row.phase == phase]
        if own:
            rows.append(line(f"{phase}: peak", [abs(m.peak / m.measured_peak - 1) for m in own]))
    rows.append(line("reserved", [abs(m.reserved / m.measured_reserved - 1) for m in measured]))
    others = [abs(m.accelerate / m.measured_peak - 1) for m in measured]
    rows.append(line("accelerate estimate-memory: peak", others))
    return table("Error", ("", "median", "worst", "rows"), rows)
