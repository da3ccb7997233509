"""GPUs as people write them: a count, a list of ids, or a text of ids and ranges."""

from __future__ import annotations

import re
from typing import Any

_RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")
_MOST = 4096


def parse_device_ids(value: Any) -> tuple[int, ...] | int | None:
    """4 is a count; [0, 2], "0,2", "0-3", "0-1,4" and "cuda:2" are ids; None stays. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str | list | tuple | None):
        raise ValueError('Give ids such as [0, 1] or "0-3", or how many, such as 2')
    if value is None or isinstance(value, int):
        return value
    items = value if isinstance(value, list | tuple) else [part for part in value.split(",") if part.strip()]
    return tuple(id for item in items for id in _ids(item))


def _ids(item: Any) -> tuple[int, ...]:
    if isinstance(item, int) and not isinstance(item, bool):
        return (item,)
    text = str(item).strip().removeprefix("cuda:") if isinstance(item, str) else ""
    if text.isdecimal():
        return (int(text),)
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        if first <= last < first + _MOST:
            return tuple(range(first, last + 1))
    raise ValueError(f"{item!r} is no id and no range of ids: write 0, or 0-3")


def show_ids(ids: tuple[int, ...]) -> str:
    """Short, for people: "0-3, 6"."""
    parts: list[str] = []
    for first, last in _runs(sorted(ids)):
        parts.append(str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first}, {last}")
    return ", ".join(parts)


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for id in ids:
        if found and id == found[-1][1] + 1:
            found[-1] = (found[-1][0], id)
        else:
            found.append((id, id))
    return found
