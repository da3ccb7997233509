"""On one GPU: what our dispatch costs beside the plain model, and an update of our engine beside a loop written by hand."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_shard.common.tables import err, table

COUNTS = (4, 8)
"""Micro-batches of a step."""
GOALS = {"dispatch": 1.01, "update": 1.03}
"""Of the plain way's seconds."""
PLAIN = {"dispatch": "plain model", "update": "loop by hand"}


@dataclass(frozen=True)
class OneRow:
    """One way, kind of step and number of micro-batches. part: "dispatch" or "update". ratio: to the plain way's seconds, the
    median over rounds. peak: bytes. check: a mean loss, or the norm of gradients, the same for all ways."""

    part: str
    way: str
    kind: str
    micro_batches: int
    seconds: float
    ratio: float
    peak: int
    check: float


Step = Callable[[], float]
"""Runs a step and returns its check."""


def in_turn(
    part: str,
    kind: str,
    micro_batches: int,
    steps: Mapping[str, tuple[Callable[[], object], Step]],
    meter: Any,
    *,
    runs: int,
) -> list[OneRow]:
    """Times ways in turn, so that a GPU that slows down slows all of them. steps: what prepares a way, and its step; the first
    is the plain way. A round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    peaks, checks = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0.0)
    for _ in range(1 + runs):
        for name, (prepare, step) in steps.items():
            prepare()
            meter.wait()
            meter.begin_peak()
            began = time.perf_counter()
            checks[name] = step()
            meter.wait()
            taken[name].append(time.perf_counter() - began)
            peaks[name] = max(meter.peaks())
    plain = taken[next(iter(steps))][1:]
    rows = []
    for name, all_of in taken.items():
        seconds, ratios = all_of[1:], [own / other for own, other in zip(all_of[1:], plain, strict=True)]
        middle, ratio = statistics.median(seconds), statistics.median(ratios)
        rows.append(OneRow(part, name, kind, micro_batches, middle, ratio, peaks[name], checks[name]))
        err.print(f"{name}, {kind}, {micro_batches} micro-batches: {middle:.4f} s, {ratio:.4f} of {next(iter(steps))}")
    return rows


def measure_dispatch(model: Any, ids: Any, device: Any, meter: Any, *, runs: int) -> list[OneRow]:
    """Our dispatch of a model to the one device that it is on, as it comes and with its hooks forced, and none.

    ids: (sequences, tokens), divided into micro-batches.
    """
    from accelerate.hooks import remove_hook_from_module

    from verl_shard.bench.pipeline import KINDS, one_by_one
    from verl_shard.runtime.micro_batches import run_micro_batches
    from verl_shard.runtime.pipeline import dispatch_model

    rows = []
    for kind in KINDS:
        train = kind != KINDS[0]
        model.train(train)
        if kind == KINDS[2]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for n in COUNTS:
            batches = [{"input_ids": part, "labels": part, "use_cache": False} for part in ids.chunk(n)]

            def mean(losses: Sequence[Any]) -> float:
                value = sum(float(loss) for loss in losses) / len(losses)
                model.zero_grad(set_to_none=True)
                return value

            def plain(batches: Any = batches, train: bool = train) -> float:
                return mean(one_by_one(model, batches, train))

            def ours(batches: Any = batches, train: bool = train) -> float:
                if train:
                    return mean(run_micro_batches(model, batches).losses)
                return mean(run_micro_batches(model, batches, lambda o, b: o.loss, forward_only=True).results)

            steps: dict[str, tuple[Callable[[], object], Step]] = {
                PLAIN["dispatch"]: (lambda: remove_hook_from_module(model, recurse=True), plain),
                "ours": (lambda: dispatch_model(model, {"": device}), ours),
                "ours, hooks forced": (lambda: dispatch_model(model, {"": device}, force_hooks=True), ours),
            }
            rows += in_turn("dispatch", kind, n, steps, meter, runs=runs)
    model.gradient_checkpointing_disable()
    remove_hook_from_module(model, recurse=True)
    return rows


def why_no_update() -> str | None:
    """Why an update cannot be measured on this machine; None where it can."""
    missing = [name for name in ("verl", "tensordict") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} is not installed here" if missing else None


def measure_update(
    folder: Path, shape: tuple[int, int], device: str, meter: Any, *, runs: int, precision: str
) -> list[OneRow]:
    """PPO's update of an actor by verl's worker over our engine, and by a loop of the same micro-batches: the same module and
    optimizer, log-probabilities, clipped loss, norm and step. folder: of a causal model. device: "cuda" or "cpu".

    In one process and without Ray, as verl's SFT trainer runs its worker.
    """
    from verl_shard.verl_plugin.stock_engine import Setup, StockRole, one_process

    sequences, tokens = shape
    lengths = [(tokens // 2, tokens - tokens // 2)] * sequences
    with one_process(device):
        setup: Any = Setup(
            folder=folder, strategy="device_map", lengths=lengths, micro_batch_size_per_gpu=sequences // COUNTS[0],
            precision=precision, enable_gradient_checkpointing=False, use_kl_loss=False,
        )  # fmt: skip
        rows = _updates(StockRole("actor", setup), device, meter, runs=runs)
    meter.empty()
    return rows


def _updates(role: Any, device: str, meter: Any, *, runs: int) -> list[OneRow]:
    import torch

    engine, lengths = role.worker.engine, role.setup.lengths
    rows: list[OneRow] = []
    for settings in engine.optimizer.param_groups:
        settings["lr"] = 0.0  # all steps are of the same weights
    engine.lr_scheduler.base_lrs = [0.0] * len(engine.lr_scheduler.base_lrs)
    # As a policy's that has just answered: ratios near 1, so that gradients are those of training.
    old = -math.log(engine.module.config.vocab_size)
    for n in COUNTS:
        torch.manual_seed(2)  # the same tokens each time
        given = role.training_batch(len(lengths) // n, old_log_probs=old, advantages=1.0)
        ids = torch.stack(list(given["input_ids"].unbind())).to("cuda:0" if device == "cuda" else device)

        def worker(given: Any = given) -> float:
            return float(role.update(given.copy()))

        def loop(n: int = n, ids: Any = ids) -> float:
            return by_hand(engine, ids, lengths[0][1], n, old)

        steps: dict[str, tuple[Callable[[], object], Step]] = {
            PLAIN["update"]: (engine.module.train, loop),
            "verl's worker, our engine": (engine.module.train, worker),
        }
        rows += in_turn("update", "update", n, steps, meter, runs=runs)
    return rows


def by_hand(engine: Any, ids: Any, n_responses: int, n: int, old: float) -> float:
    """PPO's update as a short script has it; the norm of the gradients. engine: has the module, the optimizer and the
    precision. ids: (sequences, tokens), the last are responses."""
    import torch

    from verl_shard.memory.losses import log_probs_of_labels
    from verl_shard.runtime.any_shape import of_any_shape

    module, optimizer = engine.module, engine.optimizer
    optimizer.zero_grad()
    with of_any_shape():  # the engine's kernels
        for part in ids.chunk(n):
            with engine.autocast():
                logits = module(input_ids=part, use_cache=False).logits[:, -n_responses - 1 : -1]
                ratio = (log_probs_of_labels(logits, part[:, -n_responses:]) - old).clamp(-20, 20).exp()
                loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).sum() / (len(ids) * n_responses)
            torch.autograd.backward(loss)
            del logits, ratio, loss
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def one_table(model: str, shape: tuple[int, int], rows: Sequence[OneRow], left_out: str | None) -> Any:
    """All rows, with what is aimed at."""
    shown = [
        (
            row.way, row.kind, str(row.micro_batches), f"{row.seconds:.4f}", f"{row.ratio:.4f}",
            "" if row.way in PLAIN.values() else f"{GOALS[row.part]:.2f}", f"{row.peak / 1e9:.1f}", f"{row.check:.5g}",
        )
        for row in rows
    ]  # fmt: skip
    title = f"{model}, {shape[0]} x {shape[1]} tokens in M micro-batches on one GPU"
    title += f"; the engine's update is left out: {left_out}" if left_out else ""
    return table(title, ("", "step", "M", "seconds", "of plain", "goal", "peak GB", "loss or norm"), shown)
