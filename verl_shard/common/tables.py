"""Tables and consoles for people: stdout has the answer, stderr the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A rich table; the first column is left-aligned and the others, numbers mostly, are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))  # a path may look like markup
    return made
