"""A micro-batch of verl as the model and the loss need it, made on the host, so that no GPU is waited for.

verl makes a model's inputs on the GPU and asks it there how long the longest sequence is, transformers whether a mask masks
anything, and nested tensors where they end when they are taken apart: each question waits for all that the GPU was given.
The host has the answers, as it made the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu

from verl_shard.models.meta import makes_logits_to_keep
from verl_shard.models.packed import why_not_packed
from verl_shard.runtime.packed import packed_inputs
from verl_shard.verl_plugin import engine_logits
from verl_shard.verl_plugin.engine_split import jagged
from verl_shard.verl_plugin.hooks import Lengths

_PLAIN = ("input_ids", "attention_mask", "position_ids")
_OPTIONS = ("temperature", "return_dict")
"""What verl gives a model beside them with fused kernels. Anything else is of images or sound."""


@dataclass(frozen=True)
class Prepared:
    """One micro-batch. inputs: the model's, on its first device. data: of the loss, on the host, with output_args, verl's.

    rows: of padded inputs, where real tokens are among all (tokens,), on the host; None when all are.
    kept: which logits there will be, on the host; None of all tokens.
    """

    inputs: Mapping[str, Any]
    data: TensorDict
    output_args: Mapping[str, Any]
    rows: torch.Tensor | None
    kept: engine_logits.Kept | None = None


@dataclass(frozen=True)
class Reading:
    """What a model needs to be told. causal: no token sees those after it, so that padding on the right is seen by none.

    told: attention that is told where the sequences of a packed row end, by its name; None when it finds out by itself.
    keeps: it makes the logits that it is asked for, and no others.
    """

    causal: bool
    told: str | None
    keeps: bool

    @classmethod
    def of(cls, module: nn.Module) -> Reading:
        plain: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
        config = plain.config
        looks = [part.is_causal for part in plain.modules() if hasattr(part, "is_causal")]
        causal = bool(looks) and all(looks) and getattr(config, "is_causal", True) and not config.is_encoder_decoder
        routed = getattr(config.get_text_config(), "output_router_logits", False)  # a loss that reads the mask
        told = None if why_not_packed(plain) else config._attn_implementation
        return cls(causal and not routed, told, makes_logits_to_keep(module))


def prepare(
    engine: Any, micro_batch: TensorDict, reading: Reading, device: torch.device | None, *, responses: bool = False
) -> Prepared:
    """The inputs of a micro-batch on the host, as verl's engine makes them, and sent to `device`; None leaves them, pinned,
    to the hooks of a pipeline. responses: nothing else is read of the outputs."""
    inputs, output_args = engine.prepare_model_inputs(micro_batch=micro_batch)
    ids = micro_batch["input_ids"]
    lengths: list[int] = ids.offsets().diff().tolist()
    rows, pairs = None, response_lengths(micro_batch) if responses and reading.keeps else None
    packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
    kept = None if pairs is None else engine_logits.kept(pairs.pairs, packed=packed)
    if packed:
        if padding := output_args["pad_size"]:
            lengths.append(padding)
        if reading.told is not None and inputs.keys() <= {*_PLAIN, *_OPTIONS, "shift_labels"}:
            where = "cpu" if device is None else device
            inputs |= packed_inputs(lengths, where, attn_implementation=reading.told)
    else:
        if inputs.keys() <= {*_PLAIN, *_OPTIONS}:
            inputs = _without_mask(inputs, micro_batch["position_ids"], lengths, reading.causal)
        longest = inputs["input_ids"].shape[1]
        if min(lengths) < longest:
            rows = torch.cat([torch.arange(n) + row * longest for row, n in enumerate(lengths)])
        # Outputs are handed on without padding: the way of verl's that waits for nothing.
        temperature = output_args.pop("temperature")
        output_args |= {"pad_size": 0, "temperature_rmpad": temperature.repeat_interleave(torch.tensor(lengths))}
    if kept is not None:
        inputs = {**inputs, "logits_to_keep": kept.columns}
    sent_inputs = {name: _sent(value, device) for name, value in inputs.items()}
    return Prepared(sent_inputs, micro_batch, output_args, rows, kept)


def _without_mask(
    inputs: Mapping[str, Any], positions: torch.Tensor, lengths: Sequence[int], causal: bool
) -> dict[str, Any]:
    """Inputs without a mask that masks nothing, or only what comes after all that counts, and without positions that the
    model makes by itself: from positions alone transformers would ask the GPU whether rows are packed."""
    counted = torch.cat([torch.arange(n) for n in lengths])
    full = min(lengths) == max(lengths)
    if not (full or causal) or positions.dim() != 2 or not torch.equal(positions.values(), counted):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name not in ("attention_mask", "position_ids")}


def without_padding(output: Any, rows: torch.Tensor | None) -> Any:
    """A forward's result with one row of real tokens (1, tokens, ...) in the place of padded rows.

    rows: as in Prepared, on the device of the result.
    """
    made = {}
    for name in ("logits", "log_probs", "entropy"):
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            flat = value.flatten(0, 1)
            made[name] = (flat if rows is None else flat.index_select(0, rows))[None]
    return SimpleNamespace(**made)


def response_lengths(data: TensorDict) -> Lengths | None:
    """Tokens of each prompt and response of a batch on the host; None of a batch that does not tell them apart."""
    parts = [data.get(name, None) for name in ("prompts", "responses")]
    if not all(isinstance(part, torch.Tensor) and part.is_nested for part in parts):
        return None
    prompts, responses = (part.offsets().diff().tolist() for part in parts)
    return Lengths(tuple(zip(prompts, responses, strict=True)))


def sent(data: TensorDict, device: torch.device) -> TensorDict:
    """A micro-batch on a device. Not TensorDict.to: that waits, and takes milliseconds for each sample."""
    if all(value.device == device for value in data.values() if isinstance(value, torch.Tensor)):
        return data
    made: TensorDict = data.copy().clear_device_()
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            made[name] = _sent(value, device)
    return made


def sent_values(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A mapping with its tensors on a device."""
    return {name: _sent(value, device) for name, value in values.items()}


def sent_kept(kept: engine_logits.Kept, device: torch.device) -> engine_logits.Kept:
    """With its tensors on a device."""
    return kept.moved(lambda tensor: _sent(tensor, device))


def _sent(value: Any, device: torch.device | None) -> Any:
    """A tensor on a device, or pinned for a later copy, without a wait: a copy from pageable memory would be one."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    if value.is_nested:
        ends: torch.Tensor = value.offsets()  # type: ignore[attr-defined]
        lengths: list[int] = ends.diff().tolist()
        return jagged(
            _sent(value.values(), device), _sent(ends, device), ragged=value._ragged_idx,  # type: ignore[attr-defined]
            shortest=min(lengths), longest=max(lengths),
        )  # fmt: skip
    if value.device.type != "cpu":
        return value if device is None else value.to(device)
    to_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    ready = value.pin_memory() if to_gpu else value
    return ready if device is None else ready.to(device, non_blocking=True)


def on_host(data: TensorDict) -> TensorDict:
    """A batch on the host, where it usually is; else it is fetched, once, before all forwards."""
    away = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in data.values())
    return data.to("cpu") if away else data
