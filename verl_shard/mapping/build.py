"""build_device_map: the contiguous split of a model over GPUs whose fullest GPU holds as little as possible."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import DoesNotFitError, config_error
from verl_shard.common.notices import notice
from verl_shard.common.units import format_bytes
from verl_shard.mapping.device_map import DeviceMap, Stage
from verl_shard.mapping.devices import DeviceId, choose_devices, device_label, parse_caps
from verl_shard.mapping.partition import Run, nearest_misfit, partition
from verl_shard.models.read import read_spec
from verl_shard.models.spec import Block, ModelSpec

PURPOSES = ("inference", "training")


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
) -> DeviceMap:
    """Which module goes on which GPU, such that the fullest GPU holds as few bytes as any contiguous split allows.

    The model is cut between blocks only, and each GPU gets one run of pieces in order of execution. All that feeds
    the first block is on the first GPU; a head that is tied to the embedding is on the embedding's GPU, where the one
    weight is counted once; an untied head ends the last GPU. The map names every module once, covers every buffer,
    and is `{"": device}` when one device holds all.

    model: a hub id or a folder (only its config.json is read), a PretrainedConfig, or a module: on meta, with weights,
        wrapped by PEFT, or of your own with a ModuleList of blocks.
    n_gpus: how many GPUs to plan for, by default those that torch sees here. A number given here is taken as it is,
        also on a machine that has fewer: a map is often made on another machine than the one that runs it.
        `load_sharded` compares the map with the machine.
    purpose: "inference" counts weights and buffers. "training" (the peak with gradients, optimizer and activations) is
        not built yet and is refused.
    devices: the GPUs to use in this order, for example [2, 5], instead of 0..n_gpus-1; ["cpu"] alone is the CPU.
    max_memory: the bytes that each GPU may hold, {0: "80GiB", 1: "24GiB"}; no limit for those left out. Never a reason
        to offload: what does not fit raises DoesNotFitError with the arithmetic.
    no_split_module_classes: class names of blocks, besides those that a transformers model declares.
    task: of an id, folder or configuration, what to build: "causal-lm", "reward", "process-reward" or "value"; by
        default what its architecture says.
    dtype: what weights are counted as; bfloat16 by default, and of a module what it has.

    Of several best maps it takes one that leaves no GPU empty, then the most even one (the smallest sum of squared
    bytes), then the one whose first GPUs hold less. GPUs that there is nothing left for are not in the map, which is
    said in a notice.

    Raises ConfigError for what cannot be meant, and DoesNotFitError.
    """
    _check_purpose(purpose)
    chosen = choose_devices(n_gpus, devices)
    caps = parse_caps(max_memory, chosen)
    spec = read_spec(
        model,
        task=task,
        dtype=dtype,
        no_split_module_classes=no_split_module_classes,
        trust_remote_code=trust_remote_code,
    )
    if len(chosen) > 1 and not spec.n_blocks:
        why = f"no list of blocks was found in {spec.architecture}, so that there is nothing to cut between"
        fix = "Name the class of its blocks in no_split_module_classes, or map it to one device"
        raise config_error("no-blocks", "model", spec.name, why, fix)

    if spec.sizes_before_quantizing and (len(chosen) > 1 or max_memory):
        why = "the sizes of quantized weights are known only once they are loaded"
        notice("quantized-sizes", "model", spec.name, why, f"the sizes of {spec.dtype} weights")

    total = list(accumulate((block.n_bytes for block in spec.blocks), initial=0))
    alone = [block.stands_alone for block in spec.blocks]
    runs = partition(len(spec.blocks), lambda i, j: total[j] - total[i], caps, stands_alone=alone)
    if runs is None:
        raise _does_not_fit(spec, total, alone, chosen, caps)
    _say_empty(spec, runs, chosen, caps, sum(alone))
    return _device_map(spec, runs, chosen, caps, purpose)


def _check_purpose(purpose: str) -> None:
    if purpose == "training":
        why = "maps balanced for the peak of training (gradients, optimizer, activations, logits) are not built yet"
        fix = (
            'Use purpose="inference", which balances weights: right for generating and scoring, and a map to train over'
        )
        raise config_error("not-built-yet", "purpose", purpose, why, fix + " whose fullest GPU is then the head's")
    if purpose not in PURPOSES:
        choices = " or ".join(f'"{name}"' for name in PURPOSES)
        raise config_error("unknown-purpose", "purpose", purpose, "not a purpose", f"Use {choices}")


def _device_map(
    spec: ModelSpec, runs: Sequence[Run], devices: Sequence[DeviceId], caps: Sequence[int | None], purpose: str
) -> DeviceMap:
    stages, where = [], {}
    for (first, end), device, cap in zip(runs, devices, caps, strict=True):
        if first == end:
            continue
        held = spec.blocks[first:end]
        where.update({name: device for block in held for name in (*block.names, *block.followers)})
        weights, buffers = sum(block.weight_bytes for block in held), sum(block.buffer_bytes for block in held)
        n_blocks = sum(block.kind == "block" for block in held) if spec.n_blocks else 0
        stages.append(Stage(device, _shortened(held), n_blocks, weights, buffers, cap))
    names = {"": stages[0].device} if len(stages) == 1 else {name: where[name] for name in spec.order}
    return DeviceMap(names, tuple(stages), model=spec.name, dtype=spec.dtype, purpose=purpose)


def _shortened(blocks: Sequence[Block]) -> tuple[str, ...]:
    """Names in order, numbered ones that follow each other as a range."""
    pieces: list[tuple[str, str, str]] = []
    for name in (name for block in blocks for name in (*block.names, *block.followers)):
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        stem, number = (match[1], match[2]) if match else (name or "all of it", "")
        if number and pieces and pieces[-1][0] == stem and int(pieces[-1][2]) + 1 == int(number):
            pieces[-1] = (stem, pieces[-1][1], number)
        else:
            pieces.append((stem, number, number))
    return tuple(stem + (first if first == last else f"{first}-{last}") for stem, first, last in pieces)


def _say_empty(
    spec: ModelSpec, runs: Sequence[Run], devices: Sequence[DeviceId], caps: Sequence[int | None], n_useful: int
) -> None:
    used = [device for (first, end), device in zip(runs, devices, strict=True) if first < end]
    left = [device for device in devices if device not in used]
    if not left:
        return
    if len(devices) > n_useful:
        kinds = f"{spec.n_blocks} blocks, the rest embeddings and a head"
        why = f"{spec.name} has {n_useful} pieces that are worth a GPU ({kinds})"
    else:
        limits = ", ".join(
            f"{device_label(d)} {format_bytes(c)}" for d, c in zip(devices, caps, strict=True) if c is not None
        )
        why = f"within max_memory ({limits}) the best map has nothing for {', '.join(map(device_label, left))}"
    notice("gpus-left-empty", "n_gpus", len(devices), why, ", ".join(map(device_label, used)))


def _does_not_fit(
    spec: ModelSpec, total: list[int], alone: list[bool], devices: Sequence[DeviceId], caps: Sequence[int | None]
) -> DoesNotFitError:
    excess, runs = nearest_misfit(len(spec.blocks), lambda i, j: total[j] - total[i], caps, stands_alone=alone)
    have = " + ".join("no limit" if cap is None else format_bytes(cap) for cap in caps)
    if all(cap is not None for cap in caps) and len(caps) > 1:
        have += f" = {format_bytes(sum(cap for cap in caps if cap is not None))}"
    lines = [
        f"{spec.name} does not fit: {format_bytes(total[-1])} of weights and buffers ({spec.dtype}), "
        f"and no split at block boundaries is within max_memory ({have}). The closest one:"
    ]
    for (first, end), device, cap in zip(runs, devices, caps, strict=True):
        load = total[end] - total[first]
        verdict = "no limit" if cap is None else f"limit {format_bytes(cap)}"
        if cap is not None and load > cap:
            verdict += f": {format_bytes(load - cap)} too much"
        held = ", ".join(_shortened(spec.blocks[first:end])) or "nothing"
        lines.append(f"  {device_label(device)}: {format_bytes(load)}, {verdict} ({held})")
    lines.append(
        f"It fits with {format_bytes(excess)} ({excess:.0f} bytes) more on each, with more GPUs, or in a smaller dtype."
    )
    return DoesNotFitError("\n".join(lines))
