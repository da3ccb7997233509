"""The three things a model is run for, on tensors without memory: training, scoring and generation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig

from verl_shard.common.errors import config_error
from verl_shard.memory.losses import other_loss, ppo_loss, token_loss, value_loss, verl_ppo_loss
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recorder import Recorder
from verl_shard.memory.stand_ins import as_on_gpu
from verl_shard.memory.stock.outputs import FusedHead
from verl_shard.models.meta import makes_logits_to_keep
from verl_shard.models.packed import PACKED, why_not_packed
from verl_shard.models.spec import ModelSpec


@dataclass(frozen=True)
class Running:
    """What a phase works with. blocks: for each layer that runs, its Block."""

    recorder: Recorder
    module: nn.Module
    spec: ModelSpec
    wanted: PassSpec
    inputs: Sequence[Mapping[str, torch.Tensor]]
    optimizer: torch.optim.Optimizer | None
    blocks: Sequence[int]


@dataclass
class Ran:
    """What a phase came to. marks: where its parts begin, as (name, event). n_before_step: storages before the optimizer."""

    marks: list[tuple[str, int]]
    kept: np.ndarray
    gradients: set[int] = field(default_factory=set)
    cache: set[int] = field(default_factory=set)
    n_before_step: int | None = None


def train(running: Running) -> Ran:
    """Forward and backward of one micro-batch, and the optimizer's step."""
    recorder, wanted = running.recorder, running.wanted
    ran = Ran([("forward", len(recorder.events))], np.zeros(recorder.n_blocks, dtype=np.int64))
    (given,) = running.inputs
    with _as_on_gpu(running), recorder, torch.enable_grad():
        before = _live(recorder)
        with ExitStack() as around:
            around.enter_context(_autocast(wanted))
            loss, output = _loss(running, given, around)
        if wanted.loss in ("verl-ppo", "verl-fused", "value"):
            del output
        ran.kept = _live(recorder) - before
        ran.marks.append(("backward", len(recorder.events)))
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        output = None
        numbers = {recorder.number_of(p.grad) for p in running.module.parameters() if p.grad is not None}
        ran.gradients = {number for number in numbers if number is not None}
        if running.optimizer is not None:
            ran.n_before_step = len(recorder.sizes)
            ran.marks.append(("optimizer", len(recorder.events)))
            recorder.by_operand(True)
            running.optimizer.step()
    return ran


def _as_on_gpu(running: Running) -> AbstractContextManager[None]:
    """as_on_gpu for this pass. Kernels for packed rows work on each sequence alone; others on the row."""
    recorder, wanted = running.recorder, running.wanted
    flash = wanted.attn_implementation == "flash_attention_2"
    apart = wanted.packed and (
        flash or (wanted.attn_implementation == PACKED and why_not_packed(running.module) is None)
    )
    sequences = wanted.batch_size if apart else 1

    def on_attention(flops: int, *more: Any) -> None:
        recorder.add_attention(flops // sequences, *more)

    masked = wanted.packed and not apart
    unpads = wanted.padded and flash
    return as_on_gpu(
        on_attention, recorder.add_product, padded=wanted.padded, packed=masked, unpads=unpads, unmasked=flash
    )


def score(running: Running) -> Ran:
    """One forward without gradients: log-probabilities, values, rewards."""
    recorder, wanted = running.recorder, running.wanted
    ran = Ran([("forward", len(recorder.events))], np.zeros(recorder.n_blocks, dtype=np.int64))
    (given,) = running.inputs
    with _as_on_gpu(running), recorder, torch.no_grad(), ExitStack() as around:
        around.enter_context(_autocast(wanted))
        if wanted.loss == "verl-fused":
            output = _fused(running, given)
            del output
        else:
            passed = [_call(running, given)]
            if wanted.loss is not None:
                _after_forward(running, around)
                _loss_of(wanted.loss, passed, given["input_ids"], wanted)
            del passed
    return ran


def _autocast(wanted: PassSpec) -> AbstractContextManager[None]:
    """Our engine has weights in bf16 under autocast too: log-probabilities of their logits are in fp32."""
    engine = wanted.loss == "verl-ppo" and wanted.used_precision == "bf16"
    mixed = wanted.used_precision == "bf16-mixed" or engine
    return torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext()


def _after_forward(running: Running, around: ExitStack) -> None:
    """Leaves the autocast of the forward, whose casts of weights go with it, for one of the loss, where our engine does."""
    if running.wanted.one_device:
        around.close()
        around.enter_context(_autocast(running.wanted))


def generate(running: Running) -> Ran:
    """The prompt in one pass, and the last of the new tokens, when the cache is largest."""
    recorder, wanted, module = running.recorder, running.wanted, running.module
    config = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig) or running.spec.task != "causal-lm":
        why = "only causal language models of transformers generate"
        raise config_error("cannot-generate", "phase", wanted.phase, why, 'Use phase="forward"')
    ran = Ran([("prefill", len(recorder.events))], np.zeros(recorder.n_blocks, dtype=np.int64))
    (given,) = running.inputs
    takes = "logits_to_keep" in _parameters(module)
    keep: dict[str, Any] = {"logits_to_keep": 1, "use_cache": True} if takes else {"use_cache": True}
    with (
        _as_on_gpu(running),
        recorder,
        torch.no_grad(),
        _autocast(wanted),
    ):
        cache = DynamicCache(config=config)
        output = module(**given, past_key_values=cache, **keep)
        scores = _next_token(output, wanted)
        ran.cache |= _held(recorder, cache)
        ran.marks.append(("decode", len(recorder.events)))
        del output, scores
        if wanted.new_tokens > 1:
            _fill(running, cache, wanted.length - 1)
            ran.cache |= _held(recorder, cache)
            one = {"input_ids": given["input_ids"][:, :1]}
            if wanted.padded:
                one["attention_mask"] = torch.ones(wanted.batch_size, wanted.length, dtype=torch.long)
            output = module(**one, past_key_values=cache, **keep)
            scores = _next_token(output, wanted)
            ran.cache |= _held(recorder, cache)
            del output, scores
        del cache
    return ran


def _next_token(output: Any, wanted: PassSpec) -> torch.Tensor:
    """What the next token is chosen by: scores in fp32, and for an actor's responses the cumulative probabilities in
    fp64 that our rollout samples from (runtime/generation_sampling.py)."""
    scores: torch.Tensor = output.logits[:, -1].float()
    if wanted.trainable:
        log_probs = torch.log_softmax(scores, dim=-1)
        cumulative = log_probs.double().exp().cumsum(dim=-1)
        del cumulative
        torch.full_like(scores, float("-inf")).scatter_(-1, torch.zeros_like(scores[:, :1], dtype=torch.long), 0.0)
    return scores


def _fill(running: Running, cache: DynamicCache, length: int) -> None:
    """Makes the cache as it is after `length` tokens."""
    layers = [layer for layer in cache.layers if getattr(layer, "is_initialized", False)]
    for layer, block in zip(layers, running.blocks, strict=True):
        for name in ("keys", "values"):
            old = getattr(layer, name)
            window = getattr(layer, "sliding_window", None) if getattr(layer, "is_sliding", False) else None
            n = length if window is None else min(length, window - 1)
            with running.recorder.at(block):
                grown = old.new_empty(*old.shape[:-2], n, old.shape[-1])
            setattr(layer, name, grown)
            del old, grown
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


def _held(recorder: Recorder, cache: DynamicCache) -> set[int]:
    layers = [layer for layer in cache.layers if getattr(layer, "is_initialized", False)]
    numbers = {recorder.number_of(tensor) for layer in layers for tensor in (layer.keys, layer.values)}
    return {number for number in numbers if number is not None}


def _live(recorder: Recorder) -> np.ndarray:
    """Bytes that are allocated now, by Block."""
    events = np.array(recorder.events, dtype=np.int64)
    numbers = np.abs(events) - 1
    sizes = np.array(recorder.sizes, dtype=np.int64)[numbers] * np.sign(events)
    live = np.zeros(recorder.n_blocks, dtype=np.int64)
    np.add.at(live, np.array(recorder.owners, dtype=np.int64)[numbers], sizes)
    return live


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a model's forward takes; of one with adapters, its own."""
    base: Any = getattr(module, "get_base_model", lambda: module)()
    return inspect.signature(base.forward).parameters


def _call(running: Running, given: Mapping[str, Any]) -> Any:
    """The model's own call; of a module that is none of transformers', the token ids alone."""
    wanted = running.wanted
    if wanted.packed and "position_ids" not in _parameters(running.module):
        why = f"{type(running.module).__name__} takes no position_ids, which tell the sequences of a row apart"
        raise config_error("no-effect", "packed", True, why, "Leave it out")
    if not hasattr(running.module, "config"):
        if wanted.logits_to_keep is not None:
            why = "it is an argument of transformers models"
            raise config_error("no-effect", "logits_to_keep", wanted.logits_to_keep, why, "Leave it out")
        return running.module(given["input_ids"])
    return running.module(**given, **_kept(running))


def _kept(running: Running) -> dict[str, Any]:
    """The argument for logits of the last positions; of a packed row it is among the inputs."""
    wanted = running.wanted
    if wanted.logits_to_keep is None or wanted.packed:
        return {}
    if wanted.loss != "verl-ppo":
        return {"logits_to_keep": wanted.logits_to_keep}
    if not makes_logits_to_keep(running.module):  # our engine takes all then
        return {}
    # As verl_plugin/engine_logits.py has it: each token's logits are those of the one before it.
    end = wanted.seq_len - 1
    return {"logits_to_keep": slice(max(end - wanted.logits_to_keep, 0), end)}


def _loss(running: Running, given: Mapping[str, torch.Tensor], around: ExitStack) -> tuple[torch.Tensor, Any]:
    """The loss, and what the model returned, where somebody holds it for longer. around: has the autocast of the forward."""
    wanted = running.wanted
    kind = wanted.loss or {"causal-lm": "causal-lm", "value": "value"}.get(running.spec.task)
    if kind == "verl-fused":
        made = _fused(running, given)
        return torch.exp(made[0] - made[0].detach()).mean(), made
    own = kind == "causal-lm" and wanted.logits_to_keep is None and hasattr(running.module, "config")
    result = _call(running, {**given, "labels": given["input_ids"]} if own else given)
    if own and getattr(result, "loss", None) is not None:
        return result.loss, result
    _after_forward(running, around)
    passed = [result]
    if kind in ("verl-ppo", "value"):  # as our engine; in a plain loop its name outlives the backward
        result = None
    return _loss_of(kind, passed, given["input_ids"], wanted), result


def _fused(running: Running, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of verl's fused head, from the last hidden states (FusedLinearForPPO)."""
    module: Any = getattr(running.module, "get_base_model", lambda: running.module)()
    head = getattr(module, "lm_head", None)
    if head is None or not hasattr(module, "base_model_prefix") or running.spec.task != "causal-lm":
        why = "a fused head is that of a causal language model with an lm_head"
        raise config_error("no-fused-head", "loss", "verl-fused", why, 'Use loss="verl-ppo"')
    hidden = getattr(module, module.base_model_prefix)(**given)[0]
    # One chunk stands for all in memory; the work of the others, each with its casts and launches, is counted.
    return FusedHead.apply(hidden, head.weight, running.recorder.repeated)  # type: ignore[no-any-return, no-untyped-call]


def _loss_of(kind: str | None, passed: list[Any], ids: torch.Tensor, wanted: PassSpec) -> torch.Tensor:
    """passed: what the model returned, which is taken out of it where our engine lets go of it."""
    result = passed.pop()
    if kind == "causal-lm" and getattr(result, "logits", None) is not None:
        return token_loss(result.logits, ids)
    if kind == "ppo":
        return ppo_loss(result.logits, ids)
    if kind == "verl-ppo":
        logits = result.logits
        del result
        if not wanted.packed:  # a copy without the padding takes the place of these (verl_plugin/engine_batches.py)
            logits = torch.cat(list(logits))[None]
        # verl asks for entropies with the old log-probabilities, and not with the reference's.
        entropy = wanted.phase == "forward" and wanted.trainable
        return verl_ppo_loss(logits, ids, entropy=entropy, packed=True)
    if kind == "value":
        return value_loss(result.logits)
    return other_loss(result)
