"""Tables and consoles for people: stdout has the answer, stderr the rest."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_NUMBERS = tuple("0123456789+-(~<>")
_WORD = re.compile(r"\S+(?: (?:[KMGT]iB|[KMGT]?B|m?s|%|x)(?!\S))?")
"""A number stays with its unit."""


def as_text(width: int, *shown: RenderableType) -> str:
    """Plain text of so many characters a line, for reports; what looks like markup is not, and no line is empty."""
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, color_system=None, markup=False)
    for item in shown:
        console.print(item)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()) + "\n"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for consoles: the first column and those of words are left-aligned, those of numbers are right-aligned.

    No word is broken. Where the words do not fit beside each other, the lines between columns go; where they do not even
    then, each row is a paragraph of its own.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    made = _Fitting(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, name in enumerate(columns):
        numbers = index > 0 and all(not row[index] or row[index].startswith(_NUMBERS) for row in cells)
        made.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        made.add_row(*map(Text, row))  # a path may look like markup
    return made


class _Fitting(Table):
    """A table that looks for its widths when it is shown, since only the console knows how wide that may be."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        n = len(self.columns)
        texts = [[str(column.header), *(str(cell) for cell in column.cells)] for column in self.columns]
        whole = [max(cell_len(line) for text in column for line in (text.splitlines() or [""])) for column in texts]
        words = [
            max((cell_len(word) for text in column for word in _WORD.findall(text)), default=1) for column in texts
        ]
        for slim in (False, True):
            room = options.max_width - (2 * (n - 1) if slim else 3 * n + 1)
            if sum(words) <= room:
                self._dress(slim)
                for column, width in zip(self.columns, _widths(whole, words, room), strict=True):
                    column.width = width
                yield from super().__rich_console__(console, options)
                return
        yield from self._paragraphs(texts)

    def _dress(self, slim: bool) -> None:
        self.box = box.SIMPLE_HEAD if slim else box.HEAVY_HEAD
        self.show_edge = self.pad_edge = not slim
        self.padding = (0, 1, 0, 0) if slim else (0, 1)

    def _paragraphs(self, texts: Sequence[Sequence[str]]) -> RenderResult:
        """The first cell of each row, and below it the others behind the names of their columns."""
        if self.title:
            yield Text(str(self.title), style="bold", overflow="fold")
        heads = [column[0] for column in texts]
        for first, *others in zip(*(column[1:] for column in texts), strict=True):
            yield Text(first or heads[0], style="bold", overflow="fold")
            said = [f"{head}: {cell}" for head, cell in zip(heads[1:], others, strict=True) if cell]
            yield Padding(Text("; ".join(said), overflow="fold"), (0, 0, 0, 4))


def _widths(whole: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    """Of columns, that take no more than `room` in all: as wide as their text, or where that is too much as their longest
    word and a share of the rest, such that each has about as many lines."""
    widths = list(words)
    for _ in range(room - sum(words)):
        narrow = [at for at, width in enumerate(widths) if width < whole[at]]
        if not narrow:
            break
        widths[max(narrow, key=lambda at: whole[at] / widths[at])] += 1
    return widths
