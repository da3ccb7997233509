"""run_micro_batches: forwards of several micro-batches are issued before the first is waited for, so that GPUs overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.units import parse_bytes
from verl_shard.memory.trace import Trace
from verl_shard.models.devices import parse_device
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.runtime.pipeline_hooks import RootHook
from verl_shard.runtime.pipeline_links import carry
from verl_shard.runtime.pipeline_order import issue, outside_autocast
from verl_shard.runtime.pipeline_window import Window
from verl_shard.runtime.whole_rows import whole_rows

Scale = Literal["sum", "mean", "tokens"]

_IGNORED = -100
"""transformers' label of a token that does not count."""


@dataclass(frozen=True)
class Ran:
    """What came of micro-batches, in their order.

    results: what loss_fn returned beside the losses; without a backward all that it returned.
    losses: of each micro-batch, detached, unscaled, where they were made. loss: their scaled sum, of one device.
    grad_norm: before clipping; None when it was not asked for. in_flight: the most that were at a time.
    """

    results: tuple[Any, ...]
    losses: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None
    grad_norm: torch.Tensor | None
    in_flight: int


def run_micro_batches(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    loss_fn: Callable[[Any, Mapping[str, Any]], Any] | None = None,
    *,
    in_flight: int | Literal["auto"] = "auto",
    memory: int | str | Mapping[Any, int | str] | None = None,
    trace: Trace | None = None,
    forward_only: bool = False,
    scale: Scale | Sequence[float | torch.Tensor] = "sum",
    max_grad_norm: float | None = None,
) -> Ran:
    """Forward and backward of micro-batches, whose gradients add up as if they had run one after the other.

    On a model of dispatch_model the GPUs work at the same time: forwards of the next micro-batches are issued before the
    loss of the first is computed, each device's as far as its turn has come, then the first one's backward, and so on: in
    the order of each device a backward comes as early as it can (1F1B: PipeDream-Flush of arXiv 2006.09503). Nothing here
    waits for a GPU; what loss_fn reads does, and by then the next forwards are under way. Forwards and backwards then run in
    threads, forwards one at a time, and loss_fn on this one.

    batches: keywords of the model. They may be on the host; pinned, their copies wait for nothing.
    loss_fn: takes the output and the batch; returns a loss of one element, or that and something to hand back. By default
        the output's own loss. With forward_only anything, by default the output.
    in_flight: micro-batches between the begin of their forward and their backward (or, with forward_only, their loss_fn)
        at a time; as many as there are devices keep all of them at work. "auto": one for a model on one device; over
        several one for each, if `memory` holds them.
    memory: bytes, or such as "20GiB", for what micro-batches in flight keep, on each GPU or by GPU. By default half of
        what a GPU has left when this is called; on the host there is no limit.
    trace: of the pass of one micro-batch (verl_shard.memory.trace.trace), the largest: says what each keeps before any
        has run. Without one, that is counted as they run.
    scale: of losses: "sum", "mean" over micro-batches, "tokens": each is a mean over its tokens and weighs as many as it
        has (labels that count, or its attention mask, or all), or a weight for each. Weights may be tensors.
    max_grad_norm: gradients are clipped to this norm over all devices, after the last backward.

    Gradients are added to those that are there. With forward_only nothing is recorded for a backward.
    Raises ConfigError for what cannot be meant, all at once.
    """
    limits = _check(model, batches, in_flight, memory, trace, forward_only, scale, max_grad_norm)
    pipe = pipeline_of(model)
    window = Window(pipe, in_flight, limits=limits, trace=trace, model=model, forward_only=forward_only)
    results: list[Any] = []
    losses: list[torch.Tensor] = []
    total: torch.Tensor | None = None
    weights = None if forward_only else _weights(pipe, scale, batches)

    def forward(number: int) -> Any:
        with whole_rows(batches[number].get("position_ids") is None):
            return model(**batches[number])

    def finish(number: int, output: Any) -> torch.Tensor | None:
        nonlocal total
        loss, result = _computed(loss_fn, output, batches[number], forward_only)
        results.append(result)
        if weights is None:
            return None
        assert loss is not None, "a training loss is checked when it is made"
        losses.append(loss.detach())
        scaled: torch.Tensor = loss * _near(pipe, weights[number], loss)
        part = scaled.detach()
        total = part if total is None else total + _near(pipe, part, total)
        return scaled

    def backward(number: int, loss: torch.Tensor) -> None:
        del number
        with outside_autocast():
            torch.autograd.backward(loss)

    ready = nullcontext() if pipe is None else pipe.travels.ready(batches)
    with ready, torch.set_grad_enabled(not forward_only):
        most = issue(
            pipe,
            len(batches),
            forward,
            finish,
            window=window,
            backward=None if forward_only else backward,
        )
    norm = None if max_grad_norm is None else clip_gradients(model, max_grad_norm)
    return Ran(tuple(results), tuple(losses), total, norm, most)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales gradients so that their norm over all devices is at most max_norm; that norm before, on the first device.

    The norm of each device's gradients is taken there, and one number of each travels; the host waits for none.
    """
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _computed(
    loss_fn: Callable[[Any, Mapping[str, Any]], Any] | None, output: Any, batch: Mapping[str, Any], forward_only: bool
) -> tuple[torch.Tensor | None, Any]:
    """(loss, what to hand back) of one micro-batch."""
    if forward_only:
        return None, output if loss_fn is None else loss_fn(output, batch)
    made = getattr(output, "loss", None) if loss_fn is None else loss_fn(output, batch)
    loss, result = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        fix = "Return the loss, or (loss, something to hand back); without loss_fn, put labels into the batches"
        raise config_error("not-a-loss", "loss_fn", given, "a tensor of one element is needed", fix)
    return loss.reshape(()), result


def _near(pipe: RootHook | None, value: Any, other: torch.Tensor) -> Any:
    """A number, or a tensor of one element on the device of `other`, where it has to be there."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu" != other.device.type:
        return value
    if pipe is None:
        return value.to(other.device)
    return carry(pipe.links, value, pipe.links.of(other)) if pipe.links.of(value) != pipe.links.of(other) else value


def _weights(pipe: RootHook | None, scale: Any, batches: Sequence[Mapping[str, Any]]) -> Sequence[float | torch.Tensor]:
    """What each loss is multiplied with, where a loss is made: sent later it would wait for backwards on other devices."""
    if scale == "sum":
        return [1.0] * len(batches)
    if scale == "mean":
        return [1 / len(batches)] * len(batches)
    weights: Sequence[float | torch.Tensor] = scale
    if isinstance(scale, str):
        counts = [count_tokens(batch) for batch in batches]
        whole = sum(counts[1:], start=counts[0])
        weights = [count / whole for count in counts]
    return weights if pipe is None else [pipe.to_loss(weight) for weight in weights]


def count_tokens(batch: Mapping[str, Any]) -> torch.Tensor | float:
    """Tokens of a micro-batch that a mean loss is over: labels that count (the first of a row follows nothing), its
    attention mask, or all. Left on the batch's device, so that nobody waits for it."""
    labels: torch.Tensor | None = batch.get("labels")
    mask: torch.Tensor | None = batch.get("attention_mask")
    if labels is not None:
        return (labels[:, 1:] != _IGNORED).sum()
    if mask is not None:
        return mask.sum()
    return float(next(value for value in batch.values() if isinstance(value, torch.Tensor)).shape[:2].numel())


def _check(
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    in_flight: Any,
    memory: Any,
    trace: Trace | None,
    forward_only: bool,
    scale: Any,
    max_grad_norm: Any,
) -> Mapping[Any, int] | int | None:
    """The bytes of `memory`. Raises ConfigError for all that is wrong."""
    faults = Faults()

    def fault(where: str, given: object, why: str, fix: str) -> None:
        faults.findings.append(Finding("error", where.replace("_", "-"), where, str(given), why, fix))

    if not batches:
        fault("batches", "none", "there is nothing to run", "Give one or more")
    number = isinstance(in_flight, int) and not isinstance(in_flight, bool) and in_flight >= 1
    if in_flight != "auto" and not number:
        fault("in_flight", in_flight, "not a number of micro-batches", 'Give 1 or more, or "auto"')
    for name, value in (("memory", memory), ("trace", None if trace is None else "given")):
        if in_flight != "auto" and value is not None:
            fault(name, value, f"in_flight={in_flight} says already how many there are", "Leave one of them out")
    weighed = not isinstance(scale, str)
    if not weighed and scale not in get_args(Scale):
        fault("scale", scale, "not a way to weigh losses", f"Use {', '.join(get_args(Scale))}, or a weight for each")
    if weighed and len(scale) != len(batches):
        fault("scale", f"{len(scale)} weights", f"there are {len(batches)} micro-batches", "Give one for each")
    if forward_only and (weighed or scale != "sum" or max_grad_norm is not None):
        fault(
            "forward_only",
            True,
            "without a backward there is nothing to scale or clip",
            "Leave scale and max_grad_norm out",
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        fault("max_grad_norm", max_grad_norm, "gradients would be nothing", "Give a number above 0")
    limits: dict[Any, int] | int | None = None
    if isinstance(memory, Mapping):
        limits = {}
        for name, size in memory.items():
            with faults.gathering():
                limits[parse_device(name, "memory")] = parse_bytes(size, "memory")
    elif memory is not None:
        with faults.gathering():
            limits = parse_bytes(memory, "memory")
    if faults.findings:
        raise ConfigError(faults.findings)
    return limits
