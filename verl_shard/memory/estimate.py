"""estimate_memory: what a pass of a model takes on its GPU or GPUs, before any of it is run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import RenderableType
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import config_error
from verl_shard.common.tables import as_text, table
from verl_shard.common.units import format_bytes
from verl_shard.memory.adapters import with_lora
from verl_shard.memory.allocator import replay
from verl_shard.memory.cached import cached_trace
from verl_shard.memory.constants import CUBLAS_LT, cublas_workspace
from verl_shard.memory.in_flight import Stage
from verl_shard.memory.passes import PassSpec, pass_spec, within_positions
from verl_shard.memory.recording import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    KV_CACHE,
    LOGITS,
    OPTIMIZER,
    PRODUCT,
    PRODUCT_WITH_BIAS,
    WEIGHTS,
)
from verl_shard.memory.trace import Trace
from verl_shard.models.devices import parse_device
from verl_shard.models.meta import positions_of
from verl_shard.models.read import read_model
from verl_shard.models.spec import ModelSpec

SCHEMA = "verl_shard/memory_estimate/1"
PARTS = (*KINDS, "workspace", "rounding_and_copies")
"""The fields of a MemoryEstimate that add up to its peak."""
_REPLAYED = 4
"""Micro-batches in flight that are replayed at most, unless there are more stages; what more of them keep is added."""
_PHASES = {"train": "training", "forward": "a forward pass", "generate": "generation"}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU; with a device_map on the fullest, and for each under `gpus`.

    weights to rounding_and_copies are what is there at the peak, and add up to it: rounding is what torch's allocator gives
    out beyond what was asked of it (multiples of 512 bytes; of a segment, which from 10 MiB on is of 2 MiB each, it cuts
    nothing off that is 1 MiB or less), copies are what a device_map has copied here from another GPU.
    forward_peak, backward_peak and optimizer_peak are of a step in the steady state (from the second on); for "forward" and
    "generate" forward_peak alone. peak is what torch.cuda.max_memory_allocated would say, reserved what max_memory_reserved
    would: what the caching allocator has taken from the driver. The driver's own context comes on top: 0.51 to 0.60 GiB on
    an H200 with torch 2.11.
    """

    model: str
    what: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    workspace: int
    rounding_and_copies: int
    forward_peak: int
    backward_peak: int
    optimizer_peak: int
    peak: int
    reserved: int
    phases: Mapping[str, int]
    """The peak of each part of the pass, by name."""
    gpus: Mapping[Any, MemoryEstimate] = field(default_factory=dict)

    def report(self, width: int = 100) -> str:
        """A table for people: the parts at the peak, the phases, and with a device_map one row a GPU.

        width: of the table, in characters.
        """
        shown: list[RenderableType] = [f"{self.model}: {self.what}"]
        if self.gpus:
            some = [name for name in PARTS if any(getattr(e, name) for e in self.gpus.values())]
            names = [*some, "peak", "reserved"]
            rows = [[gpu, *(format_bytes(getattr(e, name)) for name in names)] for gpu, e in self.gpus.items()]
            shown.append(table("", ["GPU", *names], rows))
        else:
            parts = [(name, getattr(self, name)) for name in PARTS if getattr(self, name)]
            shown.append(table("", ("at the peak", "bytes"), [(name, format_bytes(size)) for name, size in parts]))
            peaks = [(name, format_bytes(size)) for name, size in self.phases.items()]
            shown.append(table("", ("phase", "peak"), peaks))
        fullest = "on the fullest GPU " if self.gpus else ""
        shown.append(f"peak {fullest}{format_bytes(self.peak)}, reserved by torch {format_bytes(self.reserved)}")
        return as_text(width, *shown)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, opening with the schema."""
        return {"schema": SCHEMA, **asdict(self), "gpus": {str(gpu): asdict(e) for gpu, e in self.gpus.items()}}


def estimate_memory(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module,
    *,
    phase: str = "train",
    device_map: Mapping[str, Any] | None = None,
    task: str | None = None,
    no_split_module_classes: Collection[str] | None = None,
    trust_remote_code: bool = False,
    **pass_fields: Any,
) -> MemoryEstimate:
    """What a pass takes, traced over tensors without memory: no GPU, no weights, about a second.

    model: a hub id or folder (config.json only), a PretrainedConfig, or a module, which is not changed.
    phase: "train" is a step of training, "forward" a pass without gradients, "generate" the prompt and the new tokens.
    device_map: names to GPUs, as from build_device_map; the estimate is then made for each. Of the micro-batches in flight
        later GPUs have fewer than the first, in the order in which our pipeline issues them.
    task: of an id, folder or configuration: "causal-lm", "reward", "process-reward" or "value".
    no_split_module_classes: class names of blocks, besides those that a transformers model declares.
    trust_remote_code: let code that comes with the model run, as from_pretrained does.
    pass_fields: batch_size, seq_len, precision, optimizer, gradient_checkpointing, attn_implementation, lora_rank,
        logits_to_keep, new_tokens, loss, packed, in_flight and others: see PassSpec.

    Raises ConfigError for what cannot be meant: an unknown keyword or value, a length beyond the positions, a model
    that cannot be run.
    """
    wanted = pass_spec(pass_fields, phase=phase)
    spec, module = read_model(
        model,
        task=task,
        dtype=wanted.weight_dtype,
        no_split_module_classes=no_split_module_classes,
        trust_remote_code=trust_remote_code,
    )
    wanted = within_positions(wanted, pass_fields, positions_of(module))
    if wanted.lora_rank:
        spec, module = with_lora(spec, module, wanted)
    traced = cached_trace(spec, module, wanted)
    what = f"{_PHASES[wanted.phase]} ({wanted.words})"
    if device_map is None:
        return of_blocks(spec, traced, wanted, what, range(len(spec.blocks)))
    if wanted.lora_rank:
        device_map = {f"base_model.model.{name}" if name else name: gpu for name, gpu in device_map.items()}
    parsed = {name: parse_device(device, f"device_map[{name!r}]") for name, device in device_map.items()}
    if offloaded := [name for name, device in parsed.items() if isinstance(device, str)]:
        why = f"{', '.join(offloaded[:3])} would be off the GPUs, which is not estimated"
        raise config_error("offloaded", "device_map", None, why, "Give a map to GPUs alone")
    path = spec.devices_of(parsed)
    order = {gpu: number for number, gpu in enumerate(dict.fromkeys(path))}
    stages = [order[gpu] for gpu in path]
    gpus = {
        gpu: of_blocks(spec, traced, wanted, what, [i for i, at in enumerate(path) if at == gpu], stages)
        for gpu in order
    }
    fullest = max(gpus.values(), key=lambda estimate: estimate.peak)
    return MemoryEstimate(**{**vars(fullest), "gpus": gpus})


def of_blocks(
    spec: ModelSpec,
    traced: Trace,
    wanted: PassSpec,
    what: str,
    blocks: Collection[int],
    stages: Sequence[int] | None = None,
) -> MemoryEstimate:
    """The estimate of a GPU that holds these blocks. stages: the GPU of each block, numbered as the model runs through
    them; by default one has all."""
    stage = Stage() if stages is None else Stage(min(stages[i] for i in blocks), max(stages) + 1)
    replayed_at_once = min(wanted.in_flight, max(stage.of, _REPLAYED))
    static, states, events = traced.events_of(blocks, stages, in_flight=replayed_at_once)
    steps = 3 if wanted.phase == "train" else 2
    replayed = replay(static, states, events, steps=steps, workspaces=_workspaces(traced))
    rest = (
        wanted.in_flight - replayed_at_once
    )  # beyond as many as there are stages each GPU keeps one more for each more
    more = rest * traced.kept(blocks) if rest else 0
    phases: dict[str, int] = {}
    for name, peak in replayed.phase_peaks.items():
        phase = name.partition(" ")[0]  # "forward 1" is that of the second micro-batch
        phases[phase] = max(phases.get(phase, 0), peak + (more if phase in ("forward", "backward") else 0))
    peak = max(phases.values())
    kinds = traced.kinds_at_peak(blocks, stage)
    forward = max(phases.get(name, 0) for name in ("forward", "prefill", "decode"))
    return MemoryEstimate(
        model=spec.name,
        what=what,
        weights=kinds[WEIGHTS],
        gradients=kinds[GRADIENTS],
        optimizer=kinds[OPTIMIZER],
        activations=kinds[ACTIVATIONS],
        logits=kinds[LOGITS],
        kv_cache=kinds[KV_CACHE],
        workspace=replayed.workspace,
        rounding_and_copies=peak - sum(kinds) - replayed.workspace,
        forward_peak=forward,
        backward_peak=phases.get("backward", 0),
        optimizer_peak=phases.get("optimizer", 0),
        peak=peak,
        reserved=replayed.reserved + more,
        phases=phases,
    )


def _workspaces(traced: Trace) -> dict[int, dict[str, int]]:
    """By storage that a product made, what the libraries behind it hold from then on."""
    needs = {PRODUCT: {"cublas": cublas_workspace().n_bytes}}
    needs[PRODUCT_WITH_BIAS] = needs[PRODUCT] | {"cublas-lt": CUBLAS_LT.n_bytes}
    of_product = traced.recording.of_product
    return {number: needs[int(of_product[number])] for number in np.flatnonzero(of_product).tolist()}
