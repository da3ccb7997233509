"""The code blocks of README, CONTRIBUTING and docs, with what the page says of each in a comment above it.

A comment of its own directly above a block may say

    <!-- not run: needs a GPU -->                  why; the block is then compiled, and its names are checked
    <!-- not run: needs a GPU; given: model, ids -->   the same, with names that a reader has
    <!-- exit 2: it does not fit -->               the command's exit code, and why; 0/1 is either
    <!-- shown: a log of another machine -->       text that is no output of the block before it, and why
    <!-- file: run.sh -->                          a script that commands of the page read under this name

A block that is indented instead of fenced is of commands where it begins with one, and else text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md"))))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^`]*$")
_ITEM = re.compile(r"([-*:]|\d+\.) ")
_COMMAND = re.compile(r"(verl-shard|python3?|make|torchrun|accelerate) ")
_COMMENT = re.compile(r"<!-- (?P<marks>.+) -->")
_MARK = re.compile(r"(?P<name>not run|given|exit|shown|file)(?: (?P<number>\d+(?:/\d+)?))?: (?P<says>[^;]+)")


@dataclass(frozen=True)
class Block:
    """One code block. line: of its first line of code, from 1. marks: what the comment above says, by name."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def given(self) -> tuple[str, ...]:
        """Names that a reader has already."""
        return tuple(name.strip() for name in self.marks.get("given", "").split(",") if name.strip())


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """All blocks of a page, in order."""
    lines = ((ROOT / page).read_text(encoding="utf-8") if text is None else text).splitlines()
    return list(_blocks(page, lines))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    number, in_list = 0, False
    while number < len(lines):
        line = lines[number]
        above = lines[number - 1].strip() if number else ""
        end, language = number, ""
        if fence := _FENCE.match(line):
            end, language = number + 1, fence["language"]
            while end < len(lines) and lines[end].strip() != "```":
                end += 1
            assert end < len(lines), f"{page}:{number + 1}: a block that does not end"
            code = [text[len(fence["indent"]) :] for text in lines[number + 1 : end]]
            yield Block(page, number + 2, language, "\n".join(code) + "\n", marks_of(above))
        elif line.startswith("    ") and not above and not in_list:
            while end + 1 < len(lines) and (lines[end + 1].startswith("    ") or not lines[end + 1]):
                end += 1
            code = [text[4:] for text in lines[number : end + 1]]
            language = "bash" if _COMMAND.match(code[0]) else "text"
            if language == "bash":  # what stands far to the right says what a command is for
                code = [re.sub(r"(?<=\S) {3,}\S.*", "", text) for text in code]
            yield Block(page, number + 1, language, "\n".join(code).rstrip() + "\n", {})
        elif line and not line.startswith(" "):
            in_list = bool(_ITEM.match(line))
        number = end + 1


def marks_of(comment: str) -> dict[str, str]:
    """What a comment says; empty for any other comment. "exit" has its number before the reason."""
    found = _COMMENT.fullmatch(comment)
    if not found:
        return {}
    made = {}
    for part in found["marks"].split(";"):
        mark = _MARK.fullmatch(part.strip())
        if not mark:
            return {}
        made[mark["name"]] = f"{mark['number']} {mark['says']}" if mark["number"] else mark["says"]
    return made
