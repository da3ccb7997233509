"""run_micro_batches: forwards of several micro-batches are issued before the first is waited for, so that GPUs overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.units import parse_bytes
from verl_shard.memory.trace import Trace
from verl_shard.models.devices import parse_device
from verl_shard.models.read import read_model
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.runtime.pipeline_hooks import RootHook
from verl_shard.runtime.pipeline_links import carry

Scale = Literal["sum", "mean", "tokens"]

_FOR_FORWARDS = 0.5
"""Of the memory a GPU has left, what "auto" gives to activations kept in flight when it is told no memory: what a pass
makes meanwhile, and gradients, need the rest."""
_IGNORED = -100
"""transformers' label of a token that does not count."""


@dataclass(frozen=True)
class Ran:
    """What came of micro-batches, in their order.

    results: what loss_fn returned beside the losses; without a backward all that it returned.
    losses: of each micro-batch, detached, unscaled, where they were made. loss: their scaled sum, of one device.
    grad_norm: before clipping; None when it was not asked for. in_flight: how many were issued together, group by group.
    """

    results: tuple[Any, ...]
    losses: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None
    grad_norm: torch.Tensor | None
    in_flight: tuple[int, ...]


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

    All forwards in flight are issued first, then their losses are computed, then one backward goes through all. On a model
    of dispatch_model the GPUs then work at the same time. Nothing here waits for a GPU; what loss_fn reads does, and by
    then all forwards are under way. A loss that the model computes (of labels in the batch) is issued with its forward.

    batches: keywords of the model. They may be on the host; pinned, their copies wait for nothing.
    loss_fn: takes the output and the batch; returns a loss of one element, or that and something to hand back. By default
        the output's own loss. With forward_only anything, by default the output.
    in_flight: micro-batches between a forward and its backward (or, with forward_only, its loss_fn) at a time. "auto":
        one for a model on one device; over several, as many as `memory` holds.
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
    window = _Window(pipe, in_flight, limits, trace, model, forward_only)
    results: list[Any] = []
    losses: list[torch.Tensor] = []
    total: torch.Tensor | None = None
    groups: list[int] = []
    weights = None if forward_only else _weights(scale, batches)
    at = 0
    while at < len(batches):
        with torch.set_grad_enabled(not forward_only):
            window.begin()
            outputs = [model(**batches[at])]
            while at + len(outputs) < len(batches) and window.holds_another(len(outputs)):
                outputs.append(model(**batches[at + len(outputs)]))
            group = batches[at : at + len(outputs)]
            groups.append(len(group))
            at += len(group)
            made = []
            for batch in group:  # outputs are let go one by one
                made.append(_computed(loss_fn, outputs.pop(0), batch, forward_only))
        results.extend(result for _, result in made)
        if weights is None:
            continue
        scaled = []
        for (loss, _), weight in zip(made, weights[at - len(group) : at], strict=True):
            assert loss is not None, "a training loss is checked when it is made"
            losses.append(loss.detach())
            scaled.append(loss * _near(pipe, weight, loss))
        made = []
        torch.autograd.backward(scaled)
        for loss in scaled:
            part = loss.detach()
            total = part if total is None else total + _near(pipe, part, total)
        del loss, scaled
    norm = None
    if max_grad_norm is not None:
        norm = clip_gradients(model, max_grad_norm)
    return Ran(tuple(results), tuple(losses), total, norm, tuple(groups))


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales gradients so that their norm over all devices is at most max_norm; that norm before, on the first device.

    The norm of each device's gradients is taken there, and one number of each travels; the host waits for none.
    """
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def in_flight_that_fits(trace: Trace, devices: Sequence[Any], memory: Mapping[Any, int]) -> int:
    """How many micro-batches may wait for their backward, so that on no device they keep more than `memory` bytes.

    devices: of each Block that was traced. memory: by device; those it does not name hold any number. At least 1.
    """
    kept: dict[Any, int] = dict.fromkeys(devices, 0)
    for device, size in zip(devices, trace.recording.kept.tolist(), strict=True):
        kept[device] += size
    fits = [memory[device] // size for device, size in kept.items() if device in memory and size]
    return max(1, min(fits, default=2**31))


class _Window:
    """How many micro-batches are in flight. devices: those of the pipeline, as its links name them."""

    def __init__(
        self,
        pipe: RootHook | None,
        in_flight: int | Literal["auto"],
        limits: Mapping[Any, int] | int | None,
        trace: Trace | None,
        model: nn.Module,
        forward_only: bool,
    ) -> None:
        self._pipe = pipe
        self._most = 2**31 if in_flight == "auto" else in_flight
        self._limits: dict[Any, int] = {}
        self._before: dict[Any, int] = {}
        self._largest: dict[Any, int] = {}
        self._held: dict[Any, int] = {}
        if in_flight != "auto":
            return
        if pipe is None:
            self._most = 1
            return
        links = pipe.links
        if isinstance(limits, int):
            self._limits = dict.fromkeys(pipe.devices, limits)
        elif limits is not None:
            self._limits = {links.device(name): size for name, size in limits.items()}
        else:
            rooms = {device: links.room(device) for device in pipe.devices}
            self._limits = {d: int(_FOR_FORWARDS * room) for d, room in rooms.items() if room is not None}
        if trace is not None and not forward_only:
            placed: Any = next(m.hf_device_map for m in model.modules() if hasattr(m, "hf_device_map"))
            devices = [links.device(name) for name in read_model(model)[0].devices_of(placed)]
            self._most = in_flight_that_fits(trace, devices, self._limits)
            self._limits = {}

    def begin(self) -> None:
        """A group begins: what is there now is not its own."""
        if self._pipe is not None:
            self._before = {device: self._pipe.links.held(device) for device in self._limits}
            self._held = dict.fromkeys(self._before, 0)

    def holds_another(self, n: int) -> bool:
        """Whether there is room for one more, as large as the largest so far, beside the `n` that were issued."""
        fits = n < self._most
        for device, before in self._before.items():
            assert self._pipe is not None, "only devices of a pipeline are counted"
            held = self._pipe.links.held(device) - before
            self._largest[device] = max(self._largest.get(device, 0), held - self._held[device])
            self._held[device] = held
            fits = fits and held + self._largest[device] <= self._limits[device]
        return fits


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


def _weights(scale: Any, batches: Sequence[Mapping[str, Any]]) -> Sequence[float | torch.Tensor]:
    """What each loss is multiplied with."""
    if scale == "sum":
        return [1.0] * len(batches)
    if scale == "mean":
        return [1 / len(batches)] * len(batches)
    if isinstance(scale, str):
        counts = [count_tokens(batch) for batch in batches]
        whole = sum(counts[1:], start=counts[0])
        return [count / whole for count in counts]
    weights: Sequence[float | torch.Tensor] = scale
    return weights


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
