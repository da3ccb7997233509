"""Runs a pass of a model without memory under the Recorder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.memory.fake_model import fill_with_fakes, set_attention, set_checkpointing, without_memory
from verl_shard.memory.fold import find_fold, fold_module, fold_pieces, unfold
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recorder import Recorder
from verl_shard.memory.recording import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS, Pieces, Recording
from verl_shard.memory.stand_ins import as_on_gpu
from verl_shard.models.meta import positions_of
from verl_shard.models.read import kept_in_fp32
from verl_shard.models.spec import ModelSpec


def record_training(spec: ModelSpec, module: nn.Module, wanted: PassSpec, *, fold: bool = True) -> Recording:
    """One step of training in the steady state: optimizer states are there, gradients are not.

    With several micro-batches in flight two are run; what more of them keep is added by whoever reads `kept`.
    fold: run a long chain of equal blocks short, which gives the same.
    Raises ConfigError for a model whose forward cannot be traced or is given more positions than it has.
    """
    _check_positions(module, wanted)
    copied = without_memory(module)
    config = getattr(copied, "config", None)
    if isinstance(config, PretrainedConfig):
        config.use_cache = False
    set_attention(copied, wanted.attn_implementation)
    pieces = Pieces.of(spec)
    names = [block.names[0] for block in spec.blocks if block.kind == "block" and len(block.names) == 1]
    n_before = next((i for i, block in enumerate(spec.blocks) if block.kind == "block"), 0)
    found = find_fold(copied, names, n_before) if fold else None
    if found is None:
        return _record(spec, pieces, copied, wanted)
    whole = without_memory(copied)
    fold_module(copied, names, found, n_before)
    try:
        recording = unfold(_record(spec, fold_pieces(pieces, names, found, n_before), copied, wanted), found)
    except ConfigError:  # a model that counts its layers; run whole it says what is wrong, if anything is
        recording = None
    return _record(spec, pieces, whole, wanted) if recording is None else recording


def _record(spec: ModelSpec, pieces: Pieces, module: nn.Module, wanted: PassSpec) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fill_with_fakes(module, mode, wanted.weight_dtype, kept_in_fp32(module, wanted.weight_dtype))
    module.train()
    set_checkpointing(module, wanted.gradient_checkpointing)
    recorder = Recorder(pieces)
    recorder.watch(module)
    with mode:
        optimizer = _optimizer(module, wanted)
        inputs = [_inputs(wanted) for _ in range(2 if wanted.in_flight > 1 else 1)]
        parameters = dict(module.named_parameters())
        for name, tensor in [*parameters.items(), *module.named_buffers()]:
            recorder.add_static(tensor, pieces.of_tensor(name))
        n_weights = len(recorder.sizes)
        if optimizer is not None:
            _make_states(optimizer)
            for name, parameter in parameters.items():
                for state in optimizer.state.get(parameter, {}).values():
                    if state.dim():  # the count of steps is on the host
                        recorder.add_static(state, pieces.of_tensor(name))
        n_states = len(recorder.sizes)
        for given in inputs:
            for tensor in given.values():
                recorder.add_static(tensor, 0)
        n_static = len(recorder.events)
        ran = _run(recorder, module, spec, wanted, inputs, optimizer)

    kinds = np.full(len(recorder.sizes), ACTIVATIONS, dtype=np.int8)
    kinds[np.frombuffer(recorder.in_head, dtype=np.uint8).astype(bool)] = LOGITS
    kinds[:n_weights], kinds[n_weights:n_states] = WEIGHTS, OPTIMIZER
    kinds[sorted(ran.gradients)] = GRADIENTS
    kinds[ran.n_before_step :] = OPTIMIZER
    return Recording(
        sizes=np.array(recorder.sizes, dtype=np.int64),
        owners=np.array(recorder.owners, dtype=np.int32),
        kinds=kinds,
        events=np.array(recorder.events, dtype=np.int64),
        actors=np.array(recorder.actors, dtype=np.int32),
        steps=np.array(recorder.steps, dtype=np.int64),
        uses=tuple(recorder.uses),
        n_static=n_static,
        marks=tuple(ran.marks),
        kept=ran.kept,
        flops=tuple(recorder.flops),
        flops_in_backward=tuple(recorder.flops_in_backward),
    )


@dataclass
class _Ran:
    marks: list[tuple[str, int]]
    kept: np.ndarray
    gradients: set[int]
    n_before_step: int
    """Storages before the optimizer's step."""


def _run(
    recorder: Recorder,
    module: nn.Module,
    spec: ModelSpec,
    wanted: PassSpec,
    inputs: list[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer | None,
) -> _Ran:
    marks = [("forward", len(recorder.events))]
    mixed = wanted.used_precision == "bf16-mixed"
    with ExitStack() as stack:
        stack.enter_context(as_on_gpu(recorder.add_attention, recorder.add_product))
        stack.enter_context(recorder)
        live_before = _live(recorder)
        losses, outputs = [], []
        kept = np.zeros(recorder.n_blocks, dtype=np.int64)
        for given in inputs:
            with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
                loss, output = _loss(module, spec, wanted, given)
                losses.append(loss)
                outputs.append(output)  # as in a plain loop, where its name outlives the backward
                del loss, output
            if len(losses) == 1:
                kept = _live(recorder) - live_before
        loss = losses[0] if len(losses) == 1 else losses[0] + losses[1]
        del losses
        marks.append(("backward", len(recorder.events)))
        loss.backward()  # type: ignore[no-untyped-call]
        del loss, outputs
        numbers = {recorder.number_of(p.grad) for p in module.parameters() if p.grad is not None}
        n_before_step = len(recorder.sizes)
        if optimizer is not None:
            marks.append(("optimizer", len(recorder.events)))
            recorder.by_operand(True)
            optimizer.step()
    return _Ran(marks, kept, {number for number in numbers if number is not None}, n_before_step)


def _live(recorder: Recorder) -> np.ndarray:
    """Bytes that are allocated now, by Block."""
    events = np.array(recorder.events, dtype=np.int64)
    numbers = np.abs(events) - 1
    sizes = np.array(recorder.sizes, dtype=np.int64)[numbers] * np.sign(events)
    live = np.zeros(recorder.n_blocks, dtype=np.int64)
    np.add.at(live, np.array(recorder.owners, dtype=np.int64)[numbers], sizes)
    return live


def _loss(
    module: nn.Module, spec: ModelSpec, wanted: PassSpec, given: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    """The loss, and what the model returned."""
    kind = wanted.loss or {"causal-lm": "causal-lm", "value": "value"}.get(spec.task)
    labels = dict(given)
    if kind == "causal-lm" and wanted.logits_to_keep is None:
        labels["labels"] = given["input_ids"]
    elif wanted.logits_to_keep is not None:
        labels["logits_to_keep"] = wanted.logits_to_keep  # type: ignore[assignment]
    try:
        result = module(**labels) if hasattr(module, "config") else module(given["input_ids"])
    except ConfigError:
        raise
    except Exception as error:
        why = f"its forward fails without memory ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        fix = 'Use purpose="inference", which needs no pass; and report the model'
        raise config_error("cannot-trace", "model", spec.name, why, fix) from error
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss, result
    out = getattr(result, "logits", None)
    if out is None:
        out = result if isinstance(result, torch.Tensor) else result[0]
    return out.float().sum(), result


def _inputs(wanted: PassSpec) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(wanted.batch_size, wanted.seq_len, dtype=torch.long)}


def _optimizer(module: nn.Module, wanted: PassSpec) -> torch.optim.Optimizer | None:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        return None
    if wanted.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-6, foreach=True)
    fused = wanted.optimizer == "adamw-fused"
    return torch.optim.AdamW(parameters, lr=1e-6, foreach=not fused, fused=fused)


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """The states that the first step makes: AdamW's two, of the parameter's dtype and shape, and its count of steps."""
    if isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),  # fake tensors keep the value of such a constant
                "exp_avg": torch.empty_like(parameter),
                "exp_avg_sq": torch.empty_like(parameter),
            }


def _check_positions(module: nn.Module, wanted: PassSpec) -> None:
    positions = positions_of(module)
    if positions is not None and wanted.seq_len > positions:
        why = f"the model has {positions} positions"
        raise config_error("too-long", "seq_len", wanted.seq_len, why, f"Give {positions} or less")
