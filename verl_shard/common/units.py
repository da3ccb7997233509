"""Bytes, counts and times as people write and read them."""

from __future__ import annotations

import re

from verl_shard.common.errors import config_error

GIB = 2**30

_FACTORS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_FACTORS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_bytes(value: int | str, where: str = "memory") -> int:
    """Bytes from an int, or from text with a unit: "80GiB" is 80 * 2**30, "80GB" is 80 * 10**9.

    where: what an error names. Raises ConfigError for anything else, and for a negative number.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _FACTORS:
        raise config_error(
            "not-a-memory-size",
            where,
            value,
            "not a number of bytes",
            'Write an int, or text such as "80GiB" or "80GB"',
        )
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def format_bytes(size: int | float) -> str:
    """Bytes for the screen, in the binary unit that leaves one to four digits before the point: "512 B", "8.26 GiB"."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.2f} {unit}"


def format_count(n: int) -> str:
    """How many there are, for the screen, to three digits: "512", "494 million", "7.62 billion". In words: "B" would be bytes."""
    amount, words = float(n), iter(("thousand", "million", "billion", "trillion"))
    said = ""
    while amount >= 999.5 and (word := next(words, "")):
        amount, said = amount / 1000, f" {word}"
    return f"{amount:.3g}{said}"


def format_seconds(seconds: float) -> str:
    """Seconds for the screen: "42 s", "3 min 05 s", "2 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
