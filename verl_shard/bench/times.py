"""Times that are predicted beside what real passes and whole steps take on the GPU at hand."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_shard.bench.maps import zoo
from verl_shard.bench.rates import build, generated, need_gpu, rates_table, traced_pass, wall_seconds
from verl_shard.bench.record import machine, tell
from verl_shard.common.errors import RunError, config_error
from verl_shard.common.tables import err, table
from verl_shard.config.cards import find_card
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import Trace
from verl_shard.planning.rates import Rates
from verl_shard.planning.times import PassTime, generate_seconds, optimizer_seconds, pass_seconds

SCHEMA = "verl_shard/bench-times/1"
MODELS = ("qwen2-0.5b", "qwen3-0.6b", "llama-3.1-8b")
FITTED = ("bf16_flops", "memory_bandwidth", "kernel_s", "forward_s", "backward_s", "recompute_s", "decode_s")
"""What `fitted` changes; attention_flops and fp32_flops keep their ratio to bf16_flops."""
_PROMPTS, _PROMPT, _NEW = 16, 512, 64
_MICRO = 8
_LENGTHS = ((4, 512), (8, 1024))
_ROOM = 0.85
"""Of the card's memory, the most that a row may be estimated at."""


@dataclass(frozen=True)
class Part:
    """Something whose time is predicted: `times` micro-batches of a pass, and a step of the optimizer behind them.

    A pass of phase "generate" is one batch. passes: whether the pass itself is counted.
    """

    wanted: PassSpec
    n_micro: int = 1
    passes: bool = True
    optimizer: bool = False

    def predicted(self, traced: Trace, rates: Rates) -> PassTime:
        """Of the part, its Trace given."""
        if self.wanted.phase == "generate":
            return generate_seconds(traced, self.wanted, rates)
        total = pass_seconds(traced, self.wanted, rates, n_micro=self.n_micro) if self.passes else PassTime()
        return total + optimizer_seconds(traced, rates) if self.optimizer else total


@dataclass(frozen=True)
class Timed:
    """A row: seconds predicted and measured, and what bounds it by the prediction. step: it is a whole step."""

    model: str
    what: str
    predicted_s: float
    measured_s: float
    bound: str
    parts: tuple[Part, ...] = field(repr=False)
    step: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass
class Traces:
    """Traces of one configuration's passes, each made once."""

    config: Any
    _made: dict[PassSpec, Trace] = field(default_factory=dict)

    def of(self, wanted: PassSpec) -> Trace:
        """The Trace of a pass."""
        if wanted not in self._made:
            self._made[wanted] = traced_pass(self.config, wanted)
        return self._made[wanted]

    def predicted(self, parts: Sequence[Part], rates: Rates) -> PassTime:
        """Of parts in a row."""
        return sum((part.predicted(self.of(part.wanted), rates) for part in parts), PassTime())


def bench_times(
    *, models: Sequence[str] = MODELS, rates: Path | None = None, result: Path | None = None, fit: Path | None = None
) -> list[Timed]:
    """Predicts and runs the passes and a whole step of each model; prints both side by side.

    rates: a file of `bench rates`; None is the card's data sheet. result: where to write JSON. fit: where to write
    Rates that are fitted to what was measured. Raises ConfigError without a GPU and for an unknown model.
    """
    need_gpu("times", "times of plans need none")
    import torch

    known = {entry["name"]: entry for entry in zoo() if entry["auto"] == "AutoModelForCausalLM"}
    if unknown := [name for name in models if name not in known]:
        why = "no such language model is in the zoo"
        raise config_error("unknown-model", "--model", ", ".join(unknown), why, f"Use some of {', '.join(known)}")
    used = Rates.load(rates) if rates is not None else Rates.of(find_card(torch.cuda.get_device_name(0), "GPU"))
    traces = {name: Traces(_config(known[name])) for name in models}
    rows = [row for name in models for row in _rows(name, traces[name], used)]
    if not rows:
        raise RunError(f"none of the models fits this GPU's memory: {', '.join(models)}")
    better = fitted([(traces[row.model], row) for row in rows], used)
    content = {"rates": asdict(used), "fitted": asdict(better), "rows": [asdict(row) for row in rows]}
    tell(SCHEMA, content, [_table(rows), _summary(rows), rates_table(better)], result=result)
    if fit is not None:
        better.save(fit, machine())
    return rows


def fitted(rows: Sequence[tuple[Traces, Timed]], start: Rates) -> Rates:
    """`start` with the constants FITTED that bring predictions nearest to what was measured, whole steps left out.

    Least squares of the logarithms of predicted over measured, outliers softened (scipy's soft_l1 from 5 % on).
    """
    from scipy.optimize import least_squares

    names = [name for name in FITTED if getattr(start, name) > 0]
    parts = [(traces, row) for traces, row in rows if not row.step]

    def made(logs: np.ndarray) -> Rates:
        values = {name: getattr(start, name) * math.exp(log) for name, log in zip(names, logs, strict=True)}
        factor = values["bf16_flops"] / start.bf16_flops
        same = {name: getattr(start, name) * factor for name in ("attention_flops", "fp32_flops")}
        return replace(start, **values, **same, source=f"{start.source}; fitted to {len(parts)} passes")

    def misses(logs: np.ndarray) -> list[float]:
        rates = made(logs)
        off = [math.log(traces.predicted(row.parts, rates).seconds / row.measured_s) / 0.05 for traces, row in parts]
        return [*off, *(0.05 * logs)]  # what no row tells of stays as it was

    return made(least_squares(misses, np.zeros(len(names)), loss="soft_l1", diff_step=1e-3).x)


def _config(entry: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(entry["model_type"], **entry["kwargs"])


def _rows(name: str, traces: Traces, rates: Rates) -> Iterator[Timed]:
    """All rows of one model that fit the card's memory."""
    import torch

    for precision in ("bf16", "bf16-mixed"):
        plans = [plan for plan in _plans(precision) if _fits(traces, plan[1])]
        if not plans:
            continue
        model = build(traces.config, torch.float32 if precision == "bf16-mixed" else torch.bfloat16)
        try:
            for what, parts, run, step in plans:
                gc.collect()
                torch.cuda.empty_cache()
                try:
                    measured = run(model)
                except torch.OutOfMemoryError:
                    err.print(f"{name}: {what}: left out, the GPU's memory did not hold it")
                    continue
                predicted = traces.predicted(parts, rates)
                row = Timed(name, what, predicted.seconds, measured, predicted.bound, tuple(parts), step)
                err.print(
                    f"{name}: {what}: {row.predicted_s:.4f} s, measured {row.measured_s:.4f} s ({row.error:+.1%})"
                )
                yield row
        finally:
            del model
            gc.collect()
            torch.cuda.empty_cache()


Plan = tuple[str, tuple[Part, ...], Callable[[Any], float], bool]


def _plans(precision: str) -> Iterator[Plan]:
    """What is run on a model of one precision: its name, its parts, what measures it, and whether it is a whole step."""
    mixed = precision == "bf16-mixed"
    shape: Any
    if not mixed:
        for batch, length in _LENGTHS:
            shape = {"batch_size": batch, "seq_len": length, "precision": "bf16", "loss": "ppo"}
            yield (
                f"score {batch} x {length}",
                (Part(PassSpec(phase="forward", **shape)),),
                _score(batch, length),
                False,
            )
        for n in (_PROMPTS, 4 * _PROMPTS):
            wanted = PassSpec(phase="generate", batch_size=n, seq_len=_PROMPT, new_tokens=_NEW, precision="bf16")
            yield f"generate {n} x ({_PROMPT} + {_NEW})", (Part(wanted),), _generate(n), False
    for batch, length in _LENGTHS:
        for again in (False, True):
            shape = {"batch_size": batch, "seq_len": length, "precision": precision, "loss": "ppo"}
            part = Part(PassSpec(gradient_checkpointing=again, **shape), optimizer=True)
            what = f"train {batch} x {length}, {precision}{', gradient checkpointing' if again else ''}"
            yield what, (part,), _train(batch, length, again, mixed), False
    tiny = PassSpec(batch_size=1, seq_len=16, precision=precision, loss="ppo")  # type: ignore[arg-type]
    yield f"optimizer, {precision}", (Part(tiny, passes=False, optimizer=True),), _optimizer_step, False
    if not mixed:
        yield "whole step", _step_parts(), _whole_step, True


def _step_parts() -> tuple[Part, ...]:
    """Generation, log-probabilities of the old and of the reference policy, and the update."""
    shape: dict[str, Any] = {"batch_size": _MICRO, "seq_len": _PROMPT + _NEW, "precision": "bf16", "loss": "ppo"}
    score = Part(PassSpec(phase="forward", **shape), n_micro=_PROMPTS // _MICRO)
    update = Part(PassSpec(gradient_checkpointing=True, **shape), n_micro=_PROMPTS // _MICRO, optimizer=True)
    wanted = PassSpec(phase="generate", batch_size=_PROMPTS, seq_len=_PROMPT, new_tokens=_NEW, precision="bf16")
    return Part(wanted), score, score, update


def _fits(traces: Traces, parts: Sequence[Part]) -> bool:
    """Whether the peak of each part is within the room that there is."""
    import torch

    room = _ROOM * torch.cuda.get_device_properties(0).total_memory
    traced = [traces.of(part.wanted) for part in parts]
    return all(one.peak(0, one.n_blocks) <= room for one in traced)


def _ids(batch: int, length: int) -> Any:
    import torch

    return torch.randint(5, 1000, (batch, length), device="cuda")


def _score_once(model: Any, ids: Any) -> None:
    import torch

    from verl_shard.memory.losses import ppo_loss

    with torch.no_grad():
        ppo_loss(model(input_ids=ids, use_cache=False).logits, ids)


def _update_once(model: Any, ids: Any, mixed: bool) -> None:
    import torch

    from verl_shard.memory.losses import ppo_loss

    with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
        loss = ppo_loss(model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()  # type: ignore[no-untyped-call]


def _score(batch: int, length: int) -> Callable[[Any], float]:
    def run(model: Any) -> float:
        model.eval()
        ids = _ids(batch, length)
        return wall_seconds(lambda: _score_once(model, ids), 7)

    return run


def _generate(batch: int) -> Callable[[Any], float]:
    def run(model: Any) -> float:
        model.eval()
        ids = _ids(batch, _PROMPT)
        return wall_seconds(lambda: generated(model, ids, _NEW), 2, 1)

    return run


def _checkpointing(model: Any, on: bool) -> None:
    model.train()
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-6)


def _train(batch: int, length: int, again: bool, mixed: bool) -> Callable[[Any], float]:
    def run(model: Any) -> float:
        _checkpointing(model, again)
        optimizer, ids = _adamw(model), _ids(batch, length)

        def step() -> None:
            _update_once(model, ids, mixed)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return wall_seconds(step)

    return run


def _optimizer_step(model: Any) -> float:
    import torch

    optimizer = _adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    try:
        return wall_seconds(optimizer.step)
    finally:
        optimizer.zero_grad(set_to_none=True)


def _whole_step(model: Any) -> float:
    """The reference policy has the shape of the actor, so that the actor scores in its place."""
    optimizer, prompts = _adamw(model), _ids(_PROMPTS, _PROMPT)

    def step() -> None:
        _checkpointing(model, False)
        model.eval()
        sequences = generated(model, prompts, _NEW)
        for _ in range(2):
            for ids in sequences.split(_MICRO):
                _score_once(model, ids)
        _checkpointing(model, True)
        for ids in sequences.split(_MICRO):
            _update_once(model, ids, False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return wall_seconds(step, 2, 1)


def _table(rows: Sequence[Timed]) -> Any:
    columns = ("model", "what", "predicted", "measured", "error", "bound by")
    return table(
        "Predicted against measured, seconds",
        columns,
        [
            (row.model, row.what, f"{row.predicted_s:.4f}", f"{row.measured_s:.4f}", f"{row.error:+.1%}", row.bound)
            for row in rows
        ],
    )


def _summary(rows: Sequence[Timed]) -> Any:
    kinds = ("score", "generate", "train", "optimizer", "whole step")
    lines = []
    for kind in kinds:
        errors = [abs(row.error) for row in rows if row.what.startswith(kind)]
        if errors:
            lines.append((kind, f"{statistics.median(errors):.1%}", f"{max(errors):.1%}", len(errors)))
    return table("Error", ("", "median", "worst", "rows"), lines)
