"""Pictures: matplotlib without a display, and files that are whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_shard.common.errors import MissingExtraError

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
    """Writes the figure, whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
