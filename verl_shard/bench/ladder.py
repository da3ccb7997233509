"""The ladder: one PPO update of an actor at each rung of remedies, its memory beside the estimate, and where it ran out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl_shard.bench.frame import Asked, Sizes, each_alone, finish, keep, left_out_words, opened
from verl_shard.bench.gpus_meter import GpusMeter
from verl_shard.bench.ladder_rungs import Batch, Rung, left_out, rungs
from verl_shard.bench.machine import TINY, Machine, cap_memory
from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.common.tables import table
from verl_shard.common.units import GIB, format_bytes

SCHEMA = "verl_shard/bench-ladder/1"
MODELS = Sizes(full="qwen2-0.5b", quick="qwen2-0.5b", on_cpu=TINY)
BATCHES = Sizes(
    full=Batch(sequences=16, micro_batch=8, longest=2048), quick=Batch(sequences=8, micro_batch=4, longest=1024),
    on_cpu=Batch(sequences=4, micro_batch=2, longest=64),
)  # fmt: skip
UPDATES = 4
"""Of each rung: the first makes the optimizer's states, and the median of the others is told."""
STABLE = "stable"
_PARTS = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}


@dataclass(frozen=True)
class RungRow:
    """One rung. peaks: bytes that torch had allocated at most on each GPU from the second update on, none on the CPU and
    when memory ran out. outcome: "stable", "OOM in ..." with the phase, or what else went wrong.

    estimate: estimate_memory's peak on the fullest GPU; expected: the outcome by the estimate, nothing without a GPU.
    """

    adds: str
    rung: Mapping[str, Any]
    seconds: float | None
    sequences_per_s: float | None
    peaks: tuple[int, ...]
    outcome: str
    estimate: int
    expected: str
    estimate_s: float

    @property
    def error(self) -> float | None:
        """The estimate over what was measured, less 1."""
        return self.estimate / max(self.peaks) - 1 if self.peaks else None


def bench_ladder(asked: Asked) -> list[RungRow]:
    """Climbs the ladder with random weights of a model's shape; prints a table, writes JSON and a picture.

    The model is qwen2-0.5b by default, and the tiny one where there is no GPU.
    Raises ConfigError for an unknown model and a limit that cannot be; RunError when no rung runs.
    """
    setting = opened(asked, MODELS, BATCHES)
    found, config, batch, updates = setting.found, setting.config, setting.load, 2 if asked.quick else UPDATES
    packs, fuses = _can(config)
    loss = _loss_words()  # imports verl, once for all processes
    missing = left_out(batch, gpus=found.gpus, packs=packs, fuses=fuses)
    runs = {
        rung.adds: partial(climb, config, rung, batch, found, setting.limit, updates=updates)
        for rung in rungs(batch, gpus=found.gpus, flash=found.no_flash is None, packs=packs, fuses=fuses)
    }

    def content(rows: Sequence[RungRow], missing: Mapping[str, str]) -> dict[str, Any]:
        return {
            "model": setting.name, "batch": asdict(batch), "limit": setting.room, "loss": loss,
            "attention": _attention_words(found), "left_out": dict(missing),
            "rows": [{**asdict(row), "error": row.error} for row in rows],
        }  # fmt: skip

    made = each_alone(runs, _said, missing, lambda *so_far: keep(asked, setting, SCHEMA, content(*so_far)))
    rows = list(made.values())
    record = content(rows, missing)
    finish(asked, setting, SCHEMA, record, [ladder_table(setting.name, batch, rows), *notes(record)], draw)
    return rows


def _said(rung: str, row: RungRow) -> str:
    return f"{rung}: {row.outcome}, {_size(row.peaks)}, estimated {format_bytes(row.estimate)}"


def _can(config: Any) -> tuple[bool, bool]:
    """Whether rows can be packed without a mask, and whether the head can be fused with the loss."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl_shard.models.packed import why_not_packed

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    capped = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return why_not_packed(model) is None, isinstance(getattr(model, "lm_head", None), torch.nn.Linear) and not capped


def climb(
    config: Any,
    rung: Rung,
    batch: Batch,
    found: Machine,
    limit: int | None,
    *,
    updates: int = UPDATES,
    meter: Any = None,
) -> RungRow:
    """Estimates one rung, and runs it. meter: as GpusMeter; another one for tests."""
    began = time.perf_counter()
    device_map, estimate = _estimated(config, rung, batch)
    estimate_s = time.perf_counter() - began
    expected = expected_outcome(estimate, limit or found.memory) if found.gpus else ""
    cap_memory(limit, found.gpus)
    used = GpusMeter(rung.gpus if found.gpus else 0) if meter is None else meter
    seconds, peaks, outcome = measure(config, rung, batch, found.device, device_map, used, updates=updates)
    speed = None if seconds is None else batch.sequences / seconds
    return RungRow(
        rung.adds, asdict(rung), seconds, speed, peaks, outcome, estimate.peak, expected, round(estimate_s, 2)
    )


def _estimated(config: Any, rung: Rung, batch: Batch) -> tuple[dict[str, Any] | None, Any]:
    """The device_map of a rung over several GPUs, and what estimate_memory says of the rung."""
    from verl_shard.mapping.build import build_device_map
    from verl_shard.memory.estimate import estimate_memory

    fields = rung.pass_fields(batch)
    placed = None
    if rung.gpus > 1:
        placed = dict(build_device_map(config, rung.gpus, purpose="training", task="causal-lm", **fields))
    return placed, estimate_memory(config, task="causal-lm", device_map=placed, **fields)


def expected_outcome(estimate: Any, room: int) -> str:
    """ "stable", or the first phase whose peak is more than there is room for."""
    over = [name for name, size in estimate.phases.items() if size > room]
    return f"OOM in {_PARTS[over[0]]}" if over else STABLE


def measure(
    config: Any,
    rung: Rung,
    batch: Batch,
    device: str,
    device_map: Mapping[str, Any] | None,
    meter: Any,
    *,
    updates: int,
) -> tuple[float | None, tuple[int, ...], str]:
    """(median seconds of an update, peaks, outcome) of a rung; no seconds and no peaks where memory ran out."""
    import torch

    from verl_shard.bench.ladder_update import policy_loss, update
    from verl_shard.runtime.ladder import is_out_of_memory

    phase = ["loading the model"]
    taken = []
    loss, _ = policy_loss()
    value = 0.0
    try:
        model = made_model(config, rung, device, device_map)
        batches = micro_batches(config, rung, batch, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        for number in range(updates):
            if number == 1:
                meter.begin_peak()
            meter.wait()
            began = time.perf_counter()
            value = update(
                model,
                batches,
                optimizer,
                loss,
                lambda name: phase.__setitem__(0, _PARTS.get(name, "forward and backward")),
                mixed=rung.mixed,
                fused=rung.fused,
                in_flight=rung.in_flight,
            )
            meter.wait()
            taken.append(time.perf_counter() - began)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None, (), f"OOM in {phase[0]}" if taken or phase[0] != "loading the model" else "OOM while it is loaded"
    outcome = STABLE if math.isfinite(value) else f"the loss is {value}"
    return statistics.median(taken[1:]), meter.peaks(), outcome


def made_model(config: Any, rung: Rung, device: str, device_map: Mapping[str, Any] | None) -> Any:
    """The model with random weights, prepared as the rung wants it, and laid out."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl_shard.bench.ladder_update import fuse_head
    from verl_shard.runtime.packed import use_packed_sdpa

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=rung.attention)
    model.train()
    if rung.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if rung.packed and rung.attention == "sdpa":
        assert use_packed_sdpa(model), "a model that cannot has no such rung"
    if rung.fused:
        fuse_head(model)
    if device_map is not None and rung.dispatch == "accelerate":
        import accelerate

        from verl_shard.runtime.dispatch import keep_outputs_in_place

        model = accelerate.dispatch_model(model, dict(device_map), force_hooks=True)
        keep_outputs_in_place(model)
    elif device_map is not None:
        from verl_shard.runtime.pipeline import dispatch_model

        model = dispatch_model(model, device_map)
    if device == "cuda":
        torch.cuda.empty_cache()  # a tied head is made before it is tied
    return model


def micro_batches(config: Any, rung: Rung, batch: Batch, device: str) -> list[Any]:
    """The same sequences at every rung, padded or packed, with advantages drawn from a seed."""
    import torch

    from verl_shard.bench.ladder_update import MicroBatch
    from verl_shard.runtime.packed import packed_inputs

    of_tokens, chance = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    made = []
    for _ in range(batch.n_micro):
        rows = [torch.randint(1, config.vocab_size, (n,), generator=of_tokens) for n in batch.lengths]
        lengths = batch.lengths
        inputs: dict[str, Any]
        if rung.packed:
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            implementation = "sdpa_packed" if rung.attention == "sdpa" else rung.attention
            told = packed_inputs(lengths, device, attn_implementation=implementation)
            inputs = {"input_ids": torch.cat(rows)[None], "position_ids": positions, **told}
            real = (positions != 0)[:, 1:]  # the first token of a sequence follows nothing
        else:
            inputs = {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}
            inputs["attention_mask"] = (torch.arange(batch.longest)[None] < torch.tensor(lengths)[:, None]).long()
            real = inputs["attention_mask"][:, 1:].bool()
        inputs = {name: value.to(device) if hasattr(value, "to") else value for name, value in inputs.items()}
        advantages = torch.randn(real.shape, generator=chance).to(device)
        old = torch.full(real.shape, -6.0, device=device)
        made.append(MicroBatch(inputs, old, advantages, real.float().to(device)))
    return made


def _size(peaks: Sequence[int]) -> str:
    return format_bytes(max(peaks)) if peaks else "-"


def ladder_table(model: str, batch: Batch, rows: Sequence[RungRow]) -> Any:
    """For people: a row a rung."""
    columns = ("", "peak", "estimated", "error", "sequences/s", "outcome", "expected")
    shown = [
        (
            ("+ " if number > 1 else "") + row.adds, _size(row.peaks), format_bytes(row.estimate),
            "-" if row.error is None else f"{row.error:+.2%}",
            "-" if row.sequences_per_s is None else f"{row.sequences_per_s:.2f}", row.outcome, row.expected or "-",
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip
    return table(f"One PPO update of {model}: {batch.words}; GPU memory of the fullest", columns, shown)


def notes(record: Mapping[str, Any]) -> list[str]:
    """What is said below the table: the loss, the attention, and what was left out."""
    said = [f"Loss: {record['loss']}. Attention: {record['attention']}."]
    if record["limit"]:
        said.append(f"torch may take {format_bytes(record['limit'])} of each GPU.")
    else:
        said.append("Memory is measured on GPUs, of which there is none here: times alone are measured.")
    return said + left_out_words(record)


def _loss_words() -> str:
    from verl_shard.bench.ladder_update import policy_loss

    return policy_loss()[1]


def _attention_words(found: Machine) -> str:
    if found.no_flash is None:
        return "eager up to bf16 autocast, then flash_attention_2"
    return (
        "eager up to bf16 autocast, then torch's sdpa (its memory-efficient kernel where rows are padded, its flash kernel "
        f"where they are packed), since flash_attention_2 cannot run: {found.no_flash}"
    )


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A PNG: measured and estimated peak of each rung, and sequences a second; a rung without memory says so."""
    rows = record["rows"]
    figure = new_figure(10, 1.6 + 0.55 * len(rows), f"One PPO update of {record['model']}, rung by rung")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    at = list(range(len(rows), 0, -1))
    fits = [row["outcome"] == STABLE for row in rows]
    peaks = [max(row["peaks"], default=0) / GIB for row in rows]
    estimates = [row["estimate"] / GIB for row in rows]
    left.barh([y + 0.2 for y in at], peaks, height=0.36, color=STRONG, label="measured")
    left.barh([y - 0.2 for y in at], estimates, height=0.36, color=SOFT, label="estimated")
    most = max([*peaks, *estimates])
    for y, row, peak, guess in zip(at, rows, peaks, estimates, strict=True):
        text = f" {peak:.1f}" if row["peaks"] else f" {row['outcome']}" if row["outcome"] != STABLE else " not measured"
        left.text(peak, y + 0.2, text, va="center", fontsize=8, color=ACCENT if row["outcome"] != STABLE else "black")
        left.text(guess, y - 0.2, f" {guess:.1f}" if guess >= 0.1 else f" {guess:.3f}", va="center", fontsize=8)
    if record["limit"]:
        left.axvline(record["limit"] / GIB, color=ACCENT, linestyle="--", label="torch may take")
        most = max(most, record["limit"] / GIB)
    left.set_xlim(0, most * 1.15)
    left.set_xlabel("GiB on the fullest GPU")
    left.set_yticks(at, [("+ " if n > 1 else "") + row["adds"] for n, row in enumerate(rows)], fontsize=9)
    figure.legend(loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    speeds = [row["sequences_per_s"] or 0.0 for row in rows]
    right.barh(at, speeds, height=0.6, color=STRONG)
    for y, speed, fit in zip(at, speeds, fits, strict=True):
        right.text(speed, y, f" {speed:.1f}" if fit else " -", va="center", fontsize=8)
    right.set_xlim(0, max([*speeds, 1e-9]) * 1.2)
    right.set_xlabel("sequences a second")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save_png(figure, path)
