"""Reading a model, in any of the forms that people have one in, into a ModelSpec."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import config_error
from verl_shard.models.chain import no_split_classes, parts_in_order
from verl_shard.models.dtypes import dtype_name, parse_dtype
from verl_shard.models.meta import Task, build_on_meta, config_for, parse_task, task_of
from verl_shard.models.pieces import Group, find_ties, group_parts, hold_matrices, owners, part_of
from verl_shard.models.quantized import quantized_sizes
from verl_shard.models.source import read_config
from verl_shard.models.spec import Block, ModelSpec, TensorSpec

_WORTH_A_DEVICE = 10
"""What is no block gets a device of its own only when it holds more than this part of the mean block."""


def read_spec(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module | ModelSpec,
    *,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    no_split_module_classes: Collection[str] | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """What there is to place of `model`; as `read_model`, and a ModelSpec comes back as it is."""
    if isinstance(model, ModelSpec):
        return model
    return read_model(
        model,
        task=task,
        dtype=dtype,
        no_split_module_classes=no_split_module_classes,
        trust_remote_code=trust_remote_code,
    )[0]


def read_model(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module,
    *,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    no_split_module_classes: Collection[str] | None = None,
    trust_remote_code: bool = False,
) -> tuple[ModelSpec, nn.Module]:
    """What there is to place of `model`, and a module of it: a hub id, a folder, a configuration, or a module (on
    meta, or with weights, or wrapped by PEFT, or of your own). Weights are never read from disk and never copied.

    task: for an id, folder or configuration: what to build of it; by default what its architecture says.
    dtype: what floating-point weights are counted as. By default bfloat16, and of a module what it has.
    no_split_module_classes: names of block classes, besides those that a transformers model declares.
    trust_remote_code: let code that comes with the model run, as from_pretrained does.
    The module is the one given, or one on meta.
    Raises ConfigError for a model that cannot be read, with what was given, what is wrong and what to do.
    """
    wanted = parse_task(task)
    counted_as = None if dtype is None else parse_dtype(dtype)
    if isinstance(model, nn.Module):
        return spec_of_module(model, dtype=counted_as, no_split_module_classes=no_split_module_classes), model
    if isinstance(model, str | os.PathLike):
        name, config = os.fspath(model), read_config(model, trust_remote_code=trust_remote_code)
    elif isinstance(model, PretrainedConfig):
        name, config = getattr(model, "name_or_path", "") or model.model_type, model
    else:
        fix = "Give a hub id, a folder, a PretrainedConfig or a torch module"
        raise config_error("not-a-model", "model", type(model).__name__, "not a model", fix)
    wanted = wanted or task_of(config)
    return spec_of_config(
        config_for(config, wanted),
        name=name,
        task=wanted,
        dtype=counted_as or torch.bfloat16,
        no_split_module_classes=no_split_module_classes,
        trust_remote_code=trust_remote_code,
    )


def spec_of_config(
    config: PretrainedConfig,
    *,
    name: str,
    task: Task,
    dtype: torch.dtype,
    no_split_module_classes: Collection[str] | None = None,
    trust_remote_code: bool = False,
) -> tuple[ModelSpec, nn.Module]:
    """The ModelSpec of a configuration, and the module on meta that it was read from."""
    module = build_on_meta(config, task, dtype=dtype, trust_remote_code=trust_remote_code)
    spec = spec_of_module(
        module,
        name=name,
        task=task,
        dtype=dtype,
        no_split_module_classes=no_split_module_classes,
    )
    if not getattr(config, "quantization_config", None):
        return spec, module
    sizes = quantized_sizes(module, config)
    if sizes is None:
        return replace(spec, sizes_before_quantizing=True), module
    tensors = [replace(tensor, n_bytes=sizes.get(tensor.name, tensor.n_bytes)) for tensor in spec.tensors]
    groups: list[Group] = [(block.kind, block.names) for block in spec.blocks]
    blocks = _blocks(groups, [block.followers for block in spec.blocks], tensors)
    return replace(spec, tensors=tuple(tensors), blocks=blocks), module


def spec_of_module(
    module: nn.Module,
    *,
    name: str | None = None,
    task: Task | None = None,
    dtype: torch.dtype | None = None,
    no_split_module_classes: Collection[str] | None = None,
) -> ModelSpec:
    """The ModelSpec of a module; `name` and `task` are for the messages and for whoever picks by task.

    dtype: count floating-point parameters as this dtype, but for those that transformers keeps in fp32.
    """
    inner = _unwrapped(module)
    architecture = type(inner).__name__
    no_split = no_split_classes(module, no_split_module_classes)
    parts = parts_in_order(module, no_split)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if lazy := [key for key, parameter in parameters.items() if isinstance(parameter, nn.UninitializedParameter)]:
        fix = "Run the model once on a small input, then give it here"
        raise config_error("lazy-parameter", "model", architecture, f"{lazy[0]} has no shape yet", fix)
    ties = find_ties(module, parameters)
    groups, followers = group_parts(parts, hold_matrices(parameters), ties)
    counted_in = owners(groups, followers)
    tensors = _tensors(module, parameters, ties, counted_in, dtype)
    config = getattr(inner, "config", None)
    floating = {p.dtype for p in parameters.values() if p.is_floating_point()}
    own = dtype_name(floating.pop()) if len(floating) == 1 else "mixed"
    return ModelSpec(
        name=name or getattr(config, "name_or_path", "") or architecture,
        architecture=architecture,
        task=task or task_of(config if isinstance(config, PretrainedConfig) else None, architecture),
        dtype=own if dtype is None else dtype_name(dtype),
        blocks=_blocks(groups, followers, tensors),
        order=tuple(part.name for part in parts),
        tensors=tuple(tensors),
        ties=tuple(tuple(tie) for tie in ties),
        no_split=tuple(sorted(no_split)),
    )


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside PEFT's wrappers."""
    get_base_model = getattr(module, "get_base_model", None)
    inner = get_base_model() if callable(get_base_model) else module
    return inner if isinstance(inner, nn.Module) else module


def _tensors(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    ties: list[list[str]],
    counted_in: dict[str, int],
    dtype: torch.dtype | None,
) -> list[TensorSpec]:
    aliases = {name for tie in ties for name in tie[1:]}
    kept = kept_in_fp32(module, dtype)
    listed = []
    for name, parameter in parameters.items():
        size = parameter.element_size()
        if dtype is not None and parameter.is_floating_point():
            size = 4 if kept is not None and kept.search(name) else dtype.itemsize
        n_bytes = parameter.numel() * size
        owner = counted_in[part_of(counted_in, name)]
        listed.append(TensorSpec(name, parameter.numel(), n_bytes, False, owner, name in aliases))
    seen: set[int] = set()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        owner = counted_in[part_of(counted_in, name)]
        n_bytes = buffer.numel() * buffer.element_size()
        listed.append(TensorSpec(name, buffer.numel(), n_bytes, True, owner, id(buffer) in seen))
        seen.add(id(buffer))
    return listed


def kept_in_fp32(module: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """Parameters that from_pretrained leaves in fp32 whatever dtype is asked for."""
    names: set[str] = set()
    for child in module.modules():
        names.update(vars(child).get("_keep_in_fp32_modules_strict") or ())
        if dtype == torch.float16:
            names.update(vars(child).get("_keep_in_fp32_modules") or ())
    joined = "|".join(re.escape(name) for name in sorted(names))
    return re.compile(rf"(^|\.)({joined})(\.|$)") if names else None


def _blocks(groups: list[Group], followers: list[tuple[str, ...]], tensors: list[TensorSpec]) -> tuple[Block, ...]:
    weights, buffers, counts = ([0] * len(groups) for _ in range(3))
    for tensor in tensors:
        if tensor.is_alias:
            continue
        if tensor.is_buffer:
            buffers[tensor.block] += tensor.n_bytes
        else:
            weights[tensor.block] += tensor.n_bytes
            counts[tensor.block] += tensor.n_elements
    blocks = [weights[index] + buffers[index] for index, (kind, _) in enumerate(groups) if kind == "block"]
    worth = sum(blocks) / max(len(blocks), 1) / _WORTH_A_DEVICE
    made = []
    for index, ((kind, names), along) in enumerate(zip(groups, followers, strict=True)):
        alone = kind == "block" or weights[index] + buffers[index] > worth
        made.append(Block(kind, names, along, weights[index], buffers[index], counts[index], alone))
    return tuple(made)
