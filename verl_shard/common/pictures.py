"""Pictures: matplotlib without a display, and files that are whole or not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from verl_shard.common.errors import MissingExtraError, config_error
from verl_shard.common.files import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRONG, SOFT, ACCENT = "#1f4e8c", "#9db8d9", "#d9730d"


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, in inches. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("the picture", "plots", "matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Writes the figure, whole or not at all. Raises ConfigError for a path at which there cannot be a PNG."""
    check_png(path)
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, dpi=130, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_png(path: Path, where: str = "path") -> None:
    """Raises ConfigError when `save_png` could not write a picture at `path`. where: what an error names."""
    check_output(path, where)
    if path.suffix.lower() != ".png":
        ending = f'ends in "{path.suffix}"' if path.suffix else "has no ending"
        fix = f"Name it {path.with_suffix('.png')}"
        raise config_error("not-a-png", where, path, f"the picture is a PNG, and this name {ending}", fix)


def check_can_draw() -> None:
    """Raises MissingExtraError without matplotlib, which is looked for and not imported."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("the picture", "plots", "matplotlib")
