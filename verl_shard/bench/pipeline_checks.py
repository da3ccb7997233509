"""Whether a pipeline holds what was promised of it: the peak of each GPU beside its estimate, and gradients beside one GPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_shard.common.tables import table

ROUNDING = 2.0**-8
"""Of a number in bf16. Gradients that are added in another order, or by kernels that add in no fixed order, are so far apart."""


@dataclass(frozen=True)
class Gradients:
    """The largest distance of a tensor's gradient from one GPU's, over the norm of that, and the tensor; and the same of one
    GPU from itself, run again."""

    micro_batches: int
    ours: float
    ours_in: str
    again: float
    again_in: str


def held_at_most(in_flight: int, n_stages: int) -> list[int]:
    """Micro-batches that each stage keeps at a time, when so many are in flight."""
    return [max(1, min(in_flight, n_stages - stage + max(0, in_flight - n_stages))) for stage in range(n_stages)]


def estimated_peaks(config: Any, device_map: Mapping[str, int], in_flight: int, **pass_fields: Any) -> dict[int, int]:
    """Bytes at the peak of each GPU while a causal language model trains, its optimizer's step left out.

    What estimate_memory says of one micro-batch at a time, and what each more in flight keeps. A loop that takes the loss
    and drops the output frees the logits before the backward, which that estimate, for loops that hold it, has.
    pass_fields: of one micro-batch, as estimate_memory takes them.
    """
    from verl_shard.memory.cached import cached_trace
    from verl_shard.memory.estimate import estimate_memory
    from verl_shard.memory.passes import pass_spec
    from verl_shard.models.read import read_model

    wanted = pass_spec(pass_fields, phase="train")
    spec, module = read_model(config, task="causal-lm", dtype=wanted.weight_dtype)
    kept = cached_trace(spec, module, wanted).recording.kept.tolist()
    path = spec.devices_of(dict(device_map))
    alone = estimate_memory(config, task="causal-lm", device_map=device_map, **pass_fields).gpus
    stages = list(dict.fromkeys(path))
    logits = wanted.batch_size * wanted.seq_len * config.vocab_size * wanted.weight_dtype.itemsize
    peaks = {}
    for stage, (gpu, held) in enumerate(zip(stages, held_at_most(in_flight, len(stages)), strict=True)):
        more = sum(size for size, at in zip(kept, path, strict=True) if at == gpu)
        peak = max(alone[gpu].forward_peak, alone[gpu].backward_peak) + (held - 1) * more
        peaks[int(gpu)] = peak - (logits if stage == len(stages) - 1 else 0)
    return peaks


def compare_gradients(
    model: Any, ours: Callable[[], object], alone: Callable[[], object], micro_batches: int
) -> Gradients:
    """Runs our step, then the plain one twice. Each adds gradients to the model, which has none before and after."""
    names = [name for name, _ in model.named_parameters()]
    taken = []
    for run in (ours, alone, alone):
        run()
        taken.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad(set_to_none=True)
    mine, theirs, again = taken
    (worst, at), (noise, noise_at) = farthest(names, mine, theirs), farthest(names, again, theirs)
    return Gradients(micro_batches, worst, at, noise, noise_at)


def farthest(names: Sequence[str], found: Sequence[Any], expected: Sequence[Any]) -> tuple[float, str]:
    """(the largest norm of a difference over the norm of what was expected, the name of that tensor)."""
    worst, at = 0.0, ""
    for name, one, other in zip(names, found, expected, strict=True):
        if (one is None) != (other is None):
            return float("inf"), name
        if other is None:
            continue
        other = other.float()
        difference, norm = float((one.to(other.device).float() - other).norm()), float(other.norm())
        share = difference / norm if norm else (float("inf") if difference else 0.0)
        if not share <= worst:  # not a number is farthest
            worst, at = share, name
    return worst, at


def peaks_table(rows: Sequence[Any]) -> Any:
    """Each training row's peaks and estimates, GPU by GPU. rows: as pipeline.PipelineRow."""
    shown = [
        (
            row.way, row.kind, str(row.micro_batches), str(row.in_flight),
            *(" ".join(f"{size / 1e9:.2f}" for size in sizes) for sizes in (row.peaks, row.estimates)),
            " ".join(f"{guess / peak - 1:+.1%}" for peak, guess in zip(row.peaks, row.estimates, strict=True) if guess),
        )
        for row in rows
        if row.estimates
    ]  # fmt: skip
    columns = ("", "step", "M", "in flight", "peaks, GB", "estimated", "error")
    return table("Peak of each GPU", columns, shown)


def gradients_words(found: Gradients) -> str:
    """A sentence."""
    where = found.ours_in or "all"
    return (
        f"Gradients of {found.micro_batches} micro-batches are within {found.ours:.2g} of one GPU's (in {where}); "
        f"one GPU's own, run again, within {found.again:.2g}; bf16 rounds by {ROUNDING:.2g}."
    )
