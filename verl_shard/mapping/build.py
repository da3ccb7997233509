"""build_device_map: the contiguous split of a model over GPUs whose fullest GPU holds as little as possible."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.common.notices import notice
from verl_shard.common.units import format_bytes
from verl_shard.mapping.costs import Cost, check_dtype, inference_cost, read_pass, training_cost
from verl_shard.mapping.device_map import DeviceMap, Stage, shortened
from verl_shard.mapping.devices import DeviceId, choose_devices, device_label, parse_caps
from verl_shard.mapping.misfit import does_not_fit
from verl_shard.mapping.partition import Run, nearest_misfit, partition
from verl_shard.memory.passes import within_positions
from verl_shard.models.meta import positions_of
from verl_shard.models.read import read_model
from verl_shard.models.spec import ModelSpec


def build_device_map(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module | ModelSpec,
    n_gpus: int | None = None,
    *,
    purpose: str = "inference",
    devices: Iterable[object] | str | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    **pass_fields: Any,
) -> DeviceMap:
    """Which module goes on which GPU, such that the fullest GPU holds as few bytes as any contiguous split allows.

    Any in which each used GPU holds a block or a piece of some size: a norm or the row of a reward head is not put on a
    GPU of its own, unless nothing else is within max_memory.

    The model is cut between blocks only, and each GPU gets one run of pieces in order of execution. All that feeds
    the first block is on the first GPU; a head that is tied to the embedding is on the embedding's GPU, where the one
    weight is counted once; an untied head ends the last GPU. The map names every module once, covers every buffer,
    and is `{"": device}` when one device holds all.

    model: a hub id or a folder (only its config.json is read), a PretrainedConfig, or a module: on meta, with weights,
        wrapped by PEFT, or of your own with a ModuleList of blocks.
    n_gpus: how many GPUs to plan for, by default those that torch sees here. A number given here is taken as it is,
        also on a machine that has fewer: a map is often made on another machine than the one that runs it.
        `load_sharded` compares the map with the machine.
    purpose: "inference" counts weights and buffers, and the KV cache too when batch_size and seq_len are given.
        "training" counts the peak of a training step in the steady state: weights, gradients, optimizer, activations,
        logits and loss where the head is, and the optimizer's own step. A map that is even in weights is not even in
        that: the head's GPU pays for the logits, and the first ones for the micro-batches in flight.
    devices: the GPUs to use in this order, for example [2, 5], instead of 0..n_gpus-1; "process" for the share of this
        process under accelerate launch or torchrun; ["cpu"] alone is the CPU.
    max_memory: the bytes that each GPU may hold, {0: "80GiB", 1: "24GiB"}; no limit for those left out. Never a reason
        to offload: what does not fit raises DoesNotFitError with the arithmetic.
    no_split_module_classes: class names of blocks, besides those that a transformers model declares.
    task: of an id, folder or configuration, what to build: "causal-lm", "reward", "process-reward" or "value"; by
        default what its architecture says.
    dtype: what weights are counted as; bfloat16 by default, and of a module what it has. For training `precision`
        says it.
    trust_remote_code: let code that comes with the model run, as from_pretrained does.
    pass_fields: what runs, see PassSpec: batch_size, seq_len, and for training precision, optimizer,
        gradient_checkpointing, attn_implementation, logits_to_keep, loss, in_flight. Training without them is one
        sequence of 2048 tokens, or of as many as the model has positions, and one micro-batch after the other
        (in_flight=1). For a pipeline (run_micro_batches, verl's engine) give in_flight=n_gpus and accumulating=True: then each
        GPU counts the micro-batches that it has in 1F1B order, the first one all, the last one a single one. Give more
        where more are in flight: "auto" is up to one for each GPU.

    Of several best maps it takes one that leaves no GPU empty; for training then one whose slowest GPU has least to
    compute; then the most even one (the smallest sum of squared bytes), then the one whose first GPUs hold less. GPUs
    that there is nothing left for are not in the map, which is said in a notice.

    Raises ConfigError for what cannot be meant, and DoesNotFitError.
    """
    wanted = read_pass(purpose, pass_fields)
    check_dtype(purpose, dtype, wanted)
    chosen = choose_devices(n_gpus, devices)
    caps = parse_caps(max_memory, chosen)
    module: nn.Module | None = None
    if isinstance(model, ModelSpec):
        spec = model
        given = {"task": task, "dtype": dtype, "no_split_module_classes": no_split_module_classes}
        if idle := [name for name, value in given.items() if value is not None]:
            fix = "Leave it out, or give the model that the ModelSpec was read from"
            raise ConfigError(
                [Finding("error", "no-effect", n, str(given[n]), "a ModelSpec is as it was read", fix) for n in idle]
            )
    else:
        spec, module = read_model(
            model,
            task=task,
            dtype=wanted.weight_dtype if wanted is not None and purpose == "training" else dtype,
            no_split_module_classes=no_split_module_classes,
            trust_remote_code=trust_remote_code,
        )
    if len(chosen) > 1 and not spec.n_blocks:
        why = f"no list of blocks was found in {spec.architecture}, so that there is nothing to cut between"
        fix = "Name the class of its blocks in no_split_module_classes, or map it to one device"
        raise config_error("no-blocks", "model", spec.name, why, fix)
    if spec.sizes_before_quantizing:
        why = "how its quantization packs weights is not known"
        notice("quantized-sizes", "model", spec.name, why, f"the sizes of {spec.dtype} weights")

    if purpose == "training":
        assert wanted is not None, "training always has a pass"
        cost = training_cost(spec, module, within_positions(wanted, pass_fields, positions_of(module)))
    else:
        cost = inference_cost(spec, module, wanted)
    return cut(spec, cost, chosen, caps, purpose)


def cut(
    spec: ModelSpec, cost: Cost, devices: Sequence[DeviceId], caps: Sequence[int | None], purpose: str
) -> DeviceMap:
    """The best map of `spec` over `devices` for a cost function: what build_device_map does once all is read.

    Raises DoesNotFitError.
    """
    alone = [block.stands_alone for block in spec.blocks]
    runs = partition(len(spec.blocks), cost.of, caps, stands_alone=alone, then=cost.time)
    if runs is None:
        runs = partition(len(spec.blocks), cost.of, caps, then=cost.time)
    if runs is None:
        raise does_not_fit(spec, cost, alone, devices, caps)
    _say_empty(spec, runs, devices, caps, sum(alone))
    return _device_map(spec, runs, devices, caps, purpose, cost)


def cut_into(spec: ModelSpec, cost: Cost, room: Sequence[int]) -> list[Run]:
    """The split that leaves the most of `room` where least is left; what does not fit is split so too.

    room: bytes free on each device, beside what other models hold there.
    """
    return nearest_misfit(len(spec.blocks), cost.of, room, stands_alone=[block.stands_alone for block in spec.blocks])[
        1
    ]


def map_of_runs(
    spec: ModelSpec, cost: Cost, runs: Sequence[Run], devices: Sequence[DeviceId], purpose: str
) -> DeviceMap:
    """The map of a split, one run for each of `devices`."""
    return _device_map(spec, runs, devices, [None] * len(devices), purpose, cost)


def _device_map(
    spec: ModelSpec,
    runs: Sequence[Run],
    devices: Sequence[DeviceId],
    caps: Sequence[int | None],
    purpose: str,
    cost: Cost,
) -> DeviceMap:
    stages, where = [], {}
    for (first, end), device, cap, load in zip(runs, devices, caps, cost.loads(runs), strict=True):
        if first == end:
            continue
        held = spec.blocks[first:end]
        where.update({name: device for block in held for name in (*block.names, *block.followers)})
        stages.append(
            Stage(
                device,
                shortened(held),
                n_blocks=sum(block.kind == "block" for block in held) if spec.n_blocks else 0,
                weight_bytes=sum(block.weight_bytes for block in held),
                buffer_bytes=sum(block.buffer_bytes for block in held),
                cap=cap,
                cache_bytes=sum(cost.cache[first:end]),
                peak_bytes=int(load) if purpose == "training" else None,
            )
        )
    names = {"": stages[0].device} if len(stages) == 1 else {name: where[name] for name in spec.order}
    return DeviceMap(names, tuple(stages), model=spec.name, dtype=spec.dtype, purpose=purpose, counts=cost.what)


def _say_empty(
    spec: ModelSpec, runs: Sequence[Run], devices: Sequence[DeviceId], caps: Sequence[int | None], n_useful: int
) -> None:
    used = [device for (first, end), device in zip(runs, devices, strict=True) if first < end]
    left = [device for device in devices if device not in used]
    if not left:
        return
    if len(devices) > n_useful:
        kinds = f"{spec.n_blocks} blocks" + (", the rest embeddings and a head" if n_useful > spec.n_blocks else "")
        why = f"{spec.name} has {n_useful} pieces that are worth a GPU ({kinds})"
    elif all(cap is None for cap in caps):
        why = f"the best map has nothing for {', '.join(map(device_label, left))}: a copy between GPUs would cost more"
    else:
        limits = ", ".join(
            f"{device_label(d)} {format_bytes(c)}" for d, c in zip(devices, caps, strict=True) if c is not None
        )
        why = f"within max_memory ({limits}) the best map has nothing for {', '.join(map(device_label, left))}"
    notice("gpus-left-empty", "n_gpus", len(devices), why, ", ".join(map(device_label, used)))
