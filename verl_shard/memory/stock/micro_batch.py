"""One micro-batch of a verl phase, recorded without memory: the model on gathered weights, and what verl makes of its output.

FSDP's own memory is not in it; `timeline.py` puts it around.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.memory.cached import cached_lora, description_of, kept_recording
from verl_shard.memory.fake_model import fill_with_fakes, set_attention, set_checkpointing, without_memory
from verl_shard.memory.fold import record_short
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recorder import Recorder
from verl_shard.memory.recording import GRADIENTS, WEIGHTS, Pieces, Recording
from verl_shard.memory.stand_ins import as_on_gpu
from verl_shard.memory.stock import outputs
from verl_shard.models.spec import ModelSpec

Entropy = Literal["none", "full", "chunked"]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one forward (and backward) of verl's FSDP engine works on.

    sequences, length: tokens of each, all full; packed puts them one after the other (model.use_remove_padding).
    training: forward and backward, else a forward without gradients.
    output: what is made of the model's output. entropy: "chunked" is entropy_from_logits_with_chunking; "full" is
        compiled when packed, and eager with padding, as verl has it.
    flash: flash-attn is installed, whose cross-entropy and attention verl then uses.
    fused: model.use_fused_kernels. temperature: of the rollout; other than 1 makes a second copy of the logits.
    masked: attention with a mask of length x length: sdpa where sequences are packed or have padding.
    unpads: attention that copies out what is no padding: flash_attention_2 where there is some.
    dtype: in which weights are gathered and computed with (fsdp_config.mixed_precision.param_dtype).
    """

    sequences: int
    length: int
    packed: bool = False
    training: bool = False
    output: Literal["log_probs", "values"] = "log_probs"
    entropy: Entropy = "none"
    flash: bool = True
    fused: bool = False
    temperature: float = 1.0
    masked: bool = False
    unpads: bool = False
    compiled: bool = True
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"
    dtype: torch.dtype = torch.bfloat16

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass
class Traces:
    """What was made before, for whoever asks again with other shardings: recordings, and models under adapters.

    Modules must not change meanwhile.
    """

    recordings: dict[tuple[ModelSpec, MicroBatch], Recording] = field(default_factory=dict)
    _adapted: dict[Any, tuple[nn.Module, ModelSpec, nn.Module]] = field(default_factory=dict)
    _described: dict[int, tuple[nn.Module, Hashable | None]] = field(default_factory=dict)

    def adapted(self, spec: ModelSpec, module: nn.Module, wanted: PassSpec) -> tuple[ModelSpec, nn.Module]:
        """The model under the adapters of `wanted`."""
        key = (id(module), spec, wanted.lora_rank, wanted.gradient_checkpointing)
        if key not in self._adapted:
            self._adapted[key] = (
                module,
                *cached_lora(spec, module, wanted, self.described(module)),
            )  # alive, so that its id stays its own
        return self._adapted[key][1:]

    def described(self, module: nn.Module) -> Hashable | None:
        """What equal modules have in common."""
        if id(module) not in self._described:
            self._described[id(module)] = (module, description_of(module))
        return self._described[id(module)][1]


def record_micro_batch(
    spec: ModelSpec, module: nn.Module, wanted: MicroBatch, traces: Traces | None = None
) -> Recording:
    """The recording of a micro-batch. Marks: "forward", "loss" (the model has returned), and when training "backward"
    and "gathered" (the gradient reaches the model). There are no optimizer states in it.

    Raises ConfigError for a model that cannot be run so.
    """
    key = (spec, wanted)
    traces = Traces() if traces is None else traces
    if key in traces.recordings:
        return traces.recordings[key]
    described = traces.described(module)
    recording = kept_recording(
        None if described is None else (*key, described),
        lambda: record_short(
            spec,
            module,
            lambda left_out: _prepared(module, wanted, left_out),
            lambda pieces, _, copied: _run(spec, pieces, copied, wanted),
        ),
    )
    traces.recordings[key] = recording
    return recording


def _prepared(module: nn.Module, wanted: MicroBatch, left_out: Sequence[str]) -> nn.Module:
    copied = without_memory(module, left_out)
    config = getattr(copied, "config", None)
    if isinstance(config, PretrainedConfig):
        config.use_cache = False
    set_attention(copied, wanted.attn_implementation)
    return copied


def _run(spec: ModelSpec, pieces: Pieces, module: nn.Module, wanted: MicroBatch) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fill_with_fakes(module, mode, wanted.dtype)
    module.train(wanted.training)
    if not wanted.training:
        module.requires_grad_(False)
    set_checkpointing(module, wanted.training and wanted.gradient_checkpointing)
    recorder = Recorder(pieces)
    recorder.watch(module)
    with mode:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            recorder.add_static(tensor, pieces.of_tensor(name))
        n_weights = len(recorder.sizes)
        given = _inputs(wanted)
        for tensor in given.values():
            recorder.add_static(tensor, 0)
        n_static = len(recorder.events)
        try:
            marks = _pass(recorder, module, wanted, given)
        except ConfigError:
            raise
        except Exception as error:
            why = f"its pass fails without memory ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            raise config_error("cannot-trace", "model", spec.name, why, "Please report the model") from error
    kinds = recorder.kinds()
    kinds[:n_weights] = WEIGHTS
    grads = {recorder.number_of(p.grad) for p in module.parameters() if p.grad is not None}
    kinds[sorted(number for number in grads if number is not None)] = GRADIENTS
    kept = np.zeros(pieces.n_blocks, dtype=np.int64)
    return recorder.recording(kinds, n_static=n_static, marks=marks, kept=kept, fp32=wanted.dtype == torch.float32)


def _inputs(wanted: MicroBatch) -> dict[str, torch.Tensor]:
    """Ids and positions, and a mask of length x length where the attention takes one."""
    rows, length = (1, wanted.tokens) if wanted.packed else (wanted.sequences, wanted.length)
    made = {name: torch.zeros(rows, length, dtype=torch.long) for name in ("input_ids", "position_ids")}
    if wanted.masked:
        made["attention_mask"] = torch.ones(rows, 1, length, length, dtype=torch.bool)
    return made


def _pass(
    recorder: Recorder, module: nn.Module, wanted: MicroBatch, given: dict[str, torch.Tensor]
) -> list[tuple[str, int]]:
    marks = [("forward", len(recorder.events))]
    autocast = nullcontext() if wanted.dtype == torch.float32 else torch.autocast("cpu", wanted.dtype)
    grad = torch.enable_grad() if wanted.training else torch.no_grad()
    with (
        as_on_gpu(recorder.add_attention, recorder.add_product, unpads=wanted.unpads, unmasked=not wanted.masked),
        recorder,
        grad,
    ):
        with autocast:
            made = _output(module, wanted, given)
            marks.append(("loss", len(recorder.events)))
            if wanted.training:  # no name may stay for what verl lets go
                made[0].register_hook(lambda _: marks.append(("gathered", len(recorder.events))))  # type: ignore[no-untyped-call]
            loss = _loss(made, wanted)
        del made
        if wanted.training:
            marks.append(("backward", len(recorder.events)))
            loss.backward()  # type: ignore[no-untyped-call]
    return list(dict(marks[::-1]).items())[::-1]


def _output(module: nn.Module, wanted: MicroBatch, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if not (wanted.fused and wanted.output == "log_probs"):
        return (module(**given, use_cache=False).logits,)
    inner: Any = getattr(module, "get_base_model", lambda: module)()
    hidden = getattr(inner, inner.base_model_prefix)(**given, use_cache=False)[0]
    return outputs.FusedHead.apply(hidden, inner.lm_head.weight)  # type: ignore[no-any-return, no-untyped-call]


def _loss(made: tuple[torch.Tensor, ...], wanted: MicroBatch) -> torch.Tensor:
    """What prepare_model_outputs and the loss make of the model's output; tensors of T elements are too small to tell."""
    if wanted.output == "values":
        return _mean(made[0].squeeze(-1).float())
    if wanted.fused:
        return _mean(made[0]) + (_mean(made[1].float()) if wanted.entropy != "none" else 0)
    in_fp32 = torch.float32
    logits = made[0].flatten(0, 1) if wanted.packed else made[0]
    if wanted.temperature != 1:
        logits = logits / torch.ones(1, dtype=logits.dtype)
    entropy = None
    if wanted.entropy == "chunked" and wanted.packed:
        entropy = outputs.entropy_chunked(logits)
    elif wanted.entropy != "none" and wanted.packed and wanted.compiled:
        entropy = outputs.EntropyCompiled.apply(logits)  # type: ignore[no-untyped-call]
    elif wanted.entropy != "none":  # with padding verl never compiles it, nor chunks it
        entropy = outputs.entropy_eager(logits, in_fp32)
    flat = logits if wanted.packed else outputs.unpadded(logits)
    if wanted.flash:
        # With padding verl leaves inplace_backward at its default, True, also where entropy shares the logits.
        in_place = not wanted.packed or entropy is None
        log_probs = outputs.FlashLogProbs.apply(flat, in_place)  # type: ignore[no-untyped-call]
    elif flat.dtype == in_fp32:
        log_probs = outputs.LogSumExpRows.apply(flat)  # type: ignore[no-untyped-call]
    else:
        log_probs = outputs.RowLogProbs.apply(flat, in_fp32)  # type: ignore[no-untyped-call]
    loss = _mean(log_probs)
    return loss if entropy is None else loss - _mean(entropy.float())


def _mean(values: torch.Tensor) -> torch.Tensor:
    return torch.exp(values - values.detach()).mean()
