"""Draws architecture.svg: what goes in, what is made of it, and what runs.

Run: python docs/assets/architecture.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

BOX_H, FONT = 54, 13
STYLE = (
    "text{font:13px sans-serif;fill:#1a237e;text-anchor:middle}.room{font-size:11px;fill:#5c6bc0}"
    "rect{fill:#e8eaf6;stroke:#3f51b5;rx:6px}.made rect{fill:#c5cae9;stroke-width:2}.runs rect{fill:#e0f2f1;stroke:#00897b}"
    "path{stroke:#3f51b5;fill:none;stroke-width:1.5}"
)
# name: (x, y, width, class, title, what is beneath it)
BOXES = {
    "model": (10, 20, 170, "", "model", "id, folder, config, module"),
    "gpus": (10, 100, 170, "", "GPUs", "probed or declared"),
    "roles": (10, 180, 170, "", "roles, with blanks", "dict or YAML"),
    "work": (10, 260, 170, "", "work", "batch, lengths, algorithm"),
    "spec": (230, 20, 140, "", "ModelSpec", "models"),
    "inventory": (230, 100, 140, "", "Inventory", "resources, config"),
    "config": (230, 180, 140, "", "ResourceConfig", "config"),
    "workload": (230, 260, 140, "", "Workload", "config"),
    "trace": (420, 20, 140, "", "Trace", "memory"),
    "map": (420, 100, 140, "", "DeviceMap", "mapping"),
    "plan": (420, 220, 140, "made", "Plan", "planning"),
    "load": (610, 100, 150, "runs", "load, dispatch", "runtime"),
    "local": (810, 60, 150, "runs", "local loop", "training"),
    "verl": (810, 140, 150, "runs", "verl's trainer on Ray", "verl_plugin"),
    "overrides": (610, 220, 150, "", "overrides", "verl_plugin"),
    "stock": (810, 220, 150, "runs", "stock verl", "FSDP and vLLM"),
}
ARROWS = (
    ("model", "spec"), ("gpus", "inventory"), ("roles", "config"), ("work", "workload"), ("spec", "trace"), ("trace", "map"),
    ("inventory", "map"), ("map", "plan"), ("config", "plan"), ("workload", "plan"), ("map", "load"), ("plan", "load"),
    ("plan", "overrides"), ("load", "local"), ("load", "verl"), ("overrides", "stock"), ("overrides", "verl"),
)  # fmt: skip


def draw() -> str:
    """The picture as SVG."""
    shown = [_arrow(*arrow) for arrow in ARROWS] + [_box(*box) for box in BOXES.values()]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 970 334" role="img" aria-label="From model, GPUs, roles and work '
        'to a plan, and from the plan to a run">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#3f51b5"/></marker></defs>\n'
        '<rect x="0" y="0" width="970" height="334" style="fill:#fff;stroke:none"/>\n' + "\n".join(shown) + "\n</svg>\n"
    )


def _box(x: int, y: int, width: int, kind: str, title: str, beneath: str) -> str:
    middle = x + width / 2
    return (
        f'<g class="{kind}"><rect x="{x}" y="{y}" width="{width}" height="{BOX_H}"/>'
        f'<text x="{middle}" y="{y + 23}">{escape(title)}</text>'
        f'<text class="room" x="{middle}" y="{y + 41}">{escape(beneath)}</text></g>'
    )


def _arrow(start: str, end: str) -> str:
    """Down from box to box in one column, else from the right side to the left one."""
    x, y, width, *_ = BOXES[start]
    x2, y2, width2, *_ = BOXES[end]
    if x == x2:
        line = f"M{x + width / 2} {y + BOX_H}L{x2 + width2 / 2} {y2}"
    else:
        a, b, bend = y + BOX_H / 2, y2 + BOX_H / 2, (x + width + x2) / 2
        line = f"M{x + width} {a}C{bend} {a} {bend} {b} {x2} {b}"
    return f'<path d="{line}" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
