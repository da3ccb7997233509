"""A device map as a picture: one bar for each device, of what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.mapping.devices import device_label

if TYPE_CHECKING:
    from verl_shard.mapping.device_map import DeviceMap, Stage

_GIB = 2**30


def draw(device_map: DeviceMap, path: Path) -> None:
    """Writes a PNG. Raises MissingExtraError without matplotlib."""
    stages = device_map.stages
    figure = new_figure(10, 1.4 + 0.55 * len(stages))
    axes = figure.subplots()
    rows = range(len(stages))
    left = [0.0] * len(stages)
    for label, color, sizes in _parts(stages):
        if any(sizes):
            axes.barh(rows, [size / _GIB for size in sizes], left=left, color=color, height=0.62, label=label)
            left = [at + size / _GIB for at, size in zip(left, sizes, strict=True)]
    widest = max(left, default=0.0)
    limits = [stage.cap / _GIB if stage.cap is not None else None for stage in stages]
    for row, limit in zip(rows, limits, strict=True):
        if limit is not None:
            first = all(known is None for known in limits[:row])
            ends = [row - 0.4, row + 0.4]
            axes.plot([limit, limit], ends, color=ACCENT, linewidth=2, label="limit" if first else None)
            widest = max(widest, limit)
    for row, (stage, end, limit) in enumerate(zip(stages, left, limits, strict=True)):
        held = ", ".join(stage.pieces)
        axes.text(
            max(end, limit or 0.0) + widest * 0.01, row, f"{end:.2f} GiB   {_short(held)}", va="center", fontsize=8
        )
    axes.set_yticks(list(rows), [device_label(stage.device) for stage in stages])
    axes.invert_yaxis()
    axes.set_xlim(0, widest * 1.6)
    axes.set_xlabel("GiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{device_map.model}: {device_map.counts}", fontsize=11, loc="left")
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.28), ncols=4)
    save_png(figure, path)


def _parts(stages: tuple[Stage, ...]) -> list[tuple[str, str, list[int]]]:
    weights = [stage.weight_bytes + stage.buffer_bytes for stage in stages]
    rest = [stage.n_bytes - own for stage, own in zip(stages, weights, strict=True)]
    trained = any(stage.peak_bytes is not None for stage in stages)
    other = "gradients, optimizer, activations at the peak" if trained else "KV cache"
    return [("weights and buffers", STRONG, weights), (other, SOFT, rest)]


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
