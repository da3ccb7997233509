"""What to say of a model that does not fit: by how much, on which GPU, and what would make it fit."""

from __future__ import annotations

from collections.abc import Sequence

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.units import format_bytes
from verl_shard.mapping.costs import Cost
from verl_shard.mapping.device_map import shortened
from verl_shard.mapping.devices import DeviceId, device_label
from verl_shard.mapping.partition import nearest_misfit, partition
from verl_shard.models.spec import ModelSpec

_MOST_GPUS = 64
"""How far it is looked for a number of GPUs that the model would fit on."""


def does_not_fit(
    spec: ModelSpec, cost: Cost, alone: Sequence[bool], devices: Sequence[DeviceId], caps: Sequence[int | None]
) -> DoesNotFitError:
    """The error with the arithmetic: the split that comes closest, what each GPU lacks, and the remedies."""
    excess, runs = nearest_misfit(len(spec.blocks), cost.of, caps, stands_alone=alone)
    have = " + ".join("no limit" if cap is None else format_bytes(cap) for cap in caps)
    if all(cap is not None for cap in caps) and len(caps) > 1:
        have += f" = {format_bytes(sum(cap for cap in caps if cap is not None))}"
    whole = format_bytes(cost.loads([(0, len(spec.blocks))])[0])
    lines = [
        f"{spec.name} does not fit: {whole} of {cost.what} ({spec.dtype}), "
        f"and no split at block boundaries is within max_memory ({have}). The closest one:"
    ]
    for (first, end), device, cap, load in zip(runs, devices, caps, cost.loads(runs), strict=True):
        verdict = "no limit" if cap is None else f"limit {format_bytes(cap)}"
        if cap is not None and load > cap:
            verdict += f": {format_bytes(load - cap)} too much"
        held = ", ".join(shortened(spec.blocks[first:end])) or "nothing"
        lines.append(f"  {device_label(device)}: {format_bytes(load)}, {verdict} ({held})")
    lines.append(
        f"It fits with {format_bytes(excess)} ({excess:.0f} bytes) more on each{_more_gpus(spec, cost, alone, caps)}."
    )
    lines.append(_largest(spec, cost, caps) or _other_ways(cost))
    return DoesNotFitError("\n".join(lines))


def _more_gpus(spec: ModelSpec, cost: Cost, alone: Sequence[bool], caps: Sequence[int | None]) -> str:
    largest = max(cap for cap in caps if cap is not None)
    for n in range(len(caps) + 1, _MOST_GPUS + 1):
        if n > len(spec.blocks):
            break
        if partition(len(spec.blocks), cost.of, [*caps, *[largest] * (n - len(caps))], stands_alone=alone) is not None:
            return f", or with {n - len(caps)} more of {format_bytes(largest)}"
    return ""


def _largest(spec: ModelSpec, cost: Cost, caps: Sequence[int | None]) -> str:
    """Said when one piece alone is too large for every GPU: no number of GPUs helps."""
    size, index = max((cost.least(i), -i) for i in range(len(spec.blocks)))
    limit = max(cap for cap in caps if cap is not None)
    if size <= limit or any(cap is None for cap in caps):
        return ""
    names = ", ".join(shortened([spec.blocks[-index]]))
    return f"{names} alone needs {format_bytes(size)} and is never cut: no number of such GPUs is enough. {_other_ways(cost)}"


def _other_ways(cost: Cost) -> str:
    """What would need less, of what is not done yet."""
    wanted = cost.wanted
    if cost.time is None or wanted is None:
        shorter = " A smaller batch_size or seq_len needs less KV cache." if wanted is not None else ""
        return f"A smaller dtype or a quantized model needs less.{shorter}"
    ways = [
        ("gradient checkpointing", not wanted.gradient_checkpointing),
        ("a smaller batch_size", wanted.batch_size > 1),
        ("a smaller seq_len", True),
        ('precision="bf16"', wanted.used_precision != "bf16"),
        ('optimizer="adamw-fused"', wanted.optimizer == "adamw"),
        ("fewer in flight", wanted.in_flight > 1),
        ("adapters (LoRA)", True),
    ]
    return f"These need less: {', '.join(way for way, helps in ways if helps)}."
