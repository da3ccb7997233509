"""Tables and consoles for people: stdout has the answer, stderr the rest."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def as_text(width: int, *shown: RenderableType) -> str:
    """Plain text of so many characters a line, for reports; what looks like markup is not, and no line is empty."""
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, color_system=None, markup=False)
    for item in shown:
        console.print(item)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()) + "\n"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table; the first column is left-aligned and the others, numbers mostly, are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))  # a path may look like markup
    return made
