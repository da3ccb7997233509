"""Records a pass of a model without memory: builds it of fake tensors, runs it, and says what each storage was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.memory.fake_model import fill_with_fakes, set_attention, set_checkpointing, without_memory
from verl_shard.memory.fold import record_short
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.phases import Running, generate, score, train
from verl_shard.memory.recorder import Recorder
from verl_shard.memory.recording import (
    GRADIENTS,
    KV_CACHE,
    LOSS,
    OPTIMIZER,
    WEIGHTS,
    Pieces,
    Recording,
)
from verl_shard.models.meta import makes_logits_to_keep, positions_of
from verl_shard.models.read import kept_in_fp32
from verl_shard.models.spec import ModelSpec


def record(spec: ModelSpec, module: nn.Module, wanted: PassSpec, *, fold: bool = True) -> Recording:
    """One pass in the steady state: when training, optimizer states are there and gradients are not.

    Of one micro-batch, however many are in flight; a Trace adds what the others keep.
    fold: run a long chain of equal blocks short, which gives the same.
    Raises ConfigError for a model whose forward cannot be traced or is given more positions than it has.
    """
    _check_positions(module, wanted)
    if getattr(getattr(module, "config", None), "quantization_config", None):
        why = "its weights are quantized, and packed weights are not traced"
        fix = 'Maps with purpose="inference" count them; for a pass, estimate the model that was quantized'
        raise config_error("quantized", "model", spec.name, why, fix)
    return record_short(
        spec,
        module,
        lambda left_out: _prepared(module, wanted, left_out),
        lambda pieces, blocks, copied: _record(spec, pieces, blocks, copied, wanted),
        fold=fold,
    )


def _prepared(module: nn.Module, wanted: PassSpec, left_out: Sequence[str]) -> nn.Module:
    """A copy without memory, with the attention and the caching that the pass has."""
    copied = without_memory(module, left_out)
    config = getattr(copied, "config", None)
    if isinstance(config, PretrainedConfig):
        config.use_cache = wanted.phase == "generate"
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # without one a reward head refuses a batch; which it is changes nothing
    set_attention(copied, wanted.attn_implementation)
    return copied


def _record(spec: ModelSpec, pieces: Pieces, blocks: Sequence[str], module: nn.Module, wanted: PassSpec) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    training = wanted.phase == "train"
    fill_with_fakes(module, mode, wanted.weight_dtype, _in_fp32(module, wanted))
    module.train(training)
    if not training and not wanted.trainable:
        module.requires_grad_(False)
    set_checkpointing(module, training and wanted.gradient_checkpointing)
    recorder = Recorder(pieces)
    recorder.watch(module)
    with mode:
        optimizer = _optimizer(module, wanted) if training else None
        inputs = [_inputs(wanted, module)]
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
        forward_ends: list[int] = []
        if training:
            module.register_forward_hook(lambda *_: forward_ends.append(len(recorder.events)))
        running = Running(recorder, module, spec, wanted, inputs, optimizer, [pieces.block_of[name] for name in blocks])
        run = {"train": train, "forward": score, "generate": generate}[wanted.phase]
        try:
            ran = run(running)
        except ConfigError:
            raise
        except Exception as error:
            why = f"its pass fails without memory ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            fix = 'Maps with purpose="inference" need no pass; please report the model'
            raise config_error("cannot-trace", "model", spec.name, why, fix) from error

    marks = list(ran.marks)
    if forward_ends and forward_ends[0] < dict(marks)["backward"]:
        marks.insert(1, (LOSS, forward_ends[0]))
    kinds = recorder.kinds()
    kinds[:n_weights], kinds[n_weights:n_states] = WEIGHTS, OPTIMIZER
    kinds[sorted(ran.gradients)] = GRADIENTS
    kinds[sorted(ran.cache)] = KV_CACHE
    if ran.n_before_step is not None:
        kinds[ran.n_before_step :] = OPTIMIZER
    return recorder.recording(
        kinds, n_static=n_static, marks=marks, kept=ran.kept, fp32=wanted.used_precision == "fp32"
    )


def _inputs(wanted: PassSpec, module: nn.Module) -> dict[str, torch.Tensor]:
    shape = (1, wanted.batch_size * wanted.seq_len) if wanted.packed else (wanted.batch_size, wanted.seq_len)
    given = {"input_ids": torch.zeros(shape, dtype=torch.long)}
    if wanted.packed:
        given["position_ids"] = torch.zeros(shape, dtype=torch.long)
    if wanted.logits_to_keep is not None and wanted.packed and makes_logits_to_keep(module):
        # Their places, as our engine says them (verl_plugin/engine_logits.py).
        given["logits_to_keep"] = torch.arange(min(wanted.logits_to_keep, wanted.seq_len) * wanted.batch_size)
    return given | ({"attention_mask": torch.ones_like(given["input_ids"])} if wanted.padded else {})


def _in_fp32(module: nn.Module, wanted: PassSpec) -> re.Pattern[str]:
    """Parameters in fp32 whatever the precision: those that transformers keeps so, and adapters, as peft makes them."""
    kept = kept_in_fp32(module, wanted.weight_dtype)
    return re.compile(r"(^|\.)lora_" if kept is None else rf"(^|\.)lora_|{kept.pattern}")


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
            state: dict[str, Any] = {
                "step": torch.tensor(1.0),  # fake tensors keep the value of such a constant
                "exp_avg": torch.empty_like(parameter),
                "exp_avg_sq": torch.empty_like(parameter),
            }
            optimizer.state[parameter] = state


def _check_positions(module: nn.Module, wanted: PassSpec) -> None:
    positions = positions_of(module)
    if positions is not None and wanted.length > positions:
        given = f"{wanted.seq_len}" + (f" + {wanted.new_tokens}" if wanted.length > wanted.seq_len else "")
        why = f"the model has {positions} positions"
        raise config_error("too-long", "seq_len", given, why, f"Give {positions} or less in all")
