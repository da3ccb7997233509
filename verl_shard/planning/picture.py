"""A Plan as a picture: what the fullest GPU holds in each phase, beside what it has."""

from __future__ import annotations

from pathlib import Path

from verl_shard.common.pictures import ACCENT, new_figure, save_png
from verl_shard.planning.plan import Plan

_COLOURS = {
    "weights": "#1f4e8c", "gradients": "#3f7fbf", "optimizer": "#7fb0dc", "activations": "#d9730d", "logits": "#f0a860",
    "kv_cache": "#5a9367", "other roles": "#b9bec6",
}  # fmt: skip
_REST = "#8a7fb5"


def draw(plan: Plan, path: Path) -> None:
    """Writes a PNG: a bar a phase, in the order of the step, each part by its size; a line where the GPU ends."""
    order = list(reversed(plan.phases))
    figure = new_figure(9, 1.6 + 0.45 * len(order), f"Fullest GPU by step phase: {plan.inventory.words}")
    axes = figure.subplots()
    gib = 2**30
    shown: dict[str, str] = {}
    for at, row in enumerate(order):
        left = 0.0
        for part, size in row.parts.items():
            colour = _COLOURS.get(part, _REST)
            label = "" if part in shown else part
            shown[part] = colour
            axes.barh(at, size / gib, left=left, color=colour, height=0.7, label=label or None)
            left += size / gib
        peak = row.peaks[row.fullest] / gib
        axes.text(peak, at, f" {peak:.1f}", va="center", fontsize=9)
    limits = sorted(set(plan.limits.values()))
    for n, limit in enumerate(limits):
        axes.axvline(limit / gib, color=ACCENT, linestyle="--", label="a GPU has" if n == 0 else None)
    axes.set_yticks(range(len(order)), [f"{row.phase}\n({row.role}, GPU {row.fullest})" for row in order], fontsize=9)
    most = max(max(limits), max(row.peaks[row.fullest] for row in order)) / gib
    axes.set_xlim(0, most * 1.12)
    axes.set_xlabel("GiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=5, fontsize=8, frameon=False)
    save_png(figure, path)
