"""Whether a pipeline holds what was promised of it: the peak of each GPU beside its estimate, and gradients beside one GPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_shard.common.tables import table

ROUNDING = 2.0**-8
"""Of a number in bf16. Gradients that are added in another order, or by kernels that add in no fixed order, are so far apart."""


@dataclass(frozen=True)
class Gradients:
    """The largest distance of a tensor's gradient from one GPU's, over the norm of that, and the tensor; and the same of one
    GPU from itself, run again.

    whole: ours of all tensors as one, of which a gradient that is nearly zero by itself, such as that of the bias of keys, is
    no large part. beyond: how many of so many `tensors` are farther than ROUNDING.
    """

    micro_batches: int
    ours: float
    ours_in: str
    again: float
    again_in: str
    whole: float = 0.0
    beyond: int = 0
    tensors: int = 0


def estimated_peaks(config: Any, device_map: Mapping[str, int], in_flight: int, **pass_fields: Any) -> dict[int, int]:
    """Bytes at the peak of each GPU while a causal language model trains, its optimizer's step left out.

    As estimate_memory says, less the logits of one micro-batch on the last GPU: a loop that takes the loss and drops the output
    frees them before the backward, and that estimate is for loops that hold it. pass_fields: of one micro-batch.
    """
    from verl_shard.memory.estimate import estimate_memory
    from verl_shard.memory.passes import pass_spec

    wanted = pass_spec(pass_fields, phase="train")
    more: dict[str, Any] = {"in_flight": in_flight} if in_flight > 1 else {}
    gpus = estimate_memory(config, task="causal-lm", device_map=device_map, **pass_fields, **more).gpus
    peaks = {int(gpu): max(found.forward_peak, found.backward_peak) for gpu, found in gpus.items()}
    last = list(peaks)[-1]  # in the order of the blocks
    peaks[last] -= wanted.batch_size * wanted.seq_len * config.vocab_size * wanted.weight_dtype.itemsize
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
    apart, noise = distances(names, mine, theirs), distances(names, again, theirs)
    differences, norms = (math.hypot(*(pair[i] for pair in apart.values())) for i in (0, 1))
    beyond = sum(not _share(*pair) <= ROUNDING for pair in apart.values())
    return Gradients(micro_batches, *farthest(apart), *farthest(noise), _share(differences, norms), beyond, len(apart))


def distances(names: Sequence[str], found: Sequence[Any], expected: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Of each tensor the norm of the difference, and of what was expected; infinite where one of both is missing."""
    made = {}
    for name, one, other in zip(names, found, expected, strict=True):
        if (one is None) != (other is None):
            made[name] = (math.inf, 1.0)
        elif other is not None:
            other = other.float()
            made[name] = float((one.to(other.device).float() - other).norm()), float(other.norm())
    return made


def farthest(apart: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """(the largest norm of a difference over the norm of what was expected, the name of that tensor)."""
    worst, at = 0.0, ""
    for name, pair in apart.items():
        share = _share(*pair)
        if not share <= worst:  # not a number is farthest
            worst, at = share, name
    return worst, at


def _share(difference: float, norm: float) -> float:
    return difference / norm if norm else (math.inf if difference else 0.0)


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
        f"Gradients of {found.micro_batches} micro-batches, all as one, are {found.whole:.2g} from one GPU's; each by itself is "
        f"within {found.ours:.2g} (in {where}), {found.beyond} of {found.tensors} farther than {ROUNDING:.2g}, by which bf16 "
        f"rounds; one GPU's own, run again, within {found.again:.2g}."
    )
