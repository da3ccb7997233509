"""Bytes and times as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.common.errors import ConfigError
from verl_shard.common.units import format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (1234, 1234),
        ("1234", 1234),
        ("7 B", 7),
        ("80GiB", 85_899_345_920),
        ("80GB", 80_000_000_000),
        ("80gb", 80_000_000_000),
        ("1.5 KiB", 1536),
        ("2kb", 2000),
        ("0.5MB", 500_000),
        ("3MiB", 3_145_728),
        ("1TB", 10**12),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "80 G B", "80XB", "1e9", "80GiBs", "nan", "80G"])
def test_what_is_no_size_is_refused_with_the_place_it_came_from(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^actor.max_memory") as caught:
        parse_bytes(text, "actor.max_memory")
    assert caught.value.findings[0].given == text
    with pytest.raises(ConfigError):
        parse_bytes(-1)


@given(st.integers(0, 2**53))
def test_an_int_means_itself(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1024.00 KiB"),
        (2**20, "1.00 MiB"),
        (80 * 2**30, "80.00 GiB"),
        (5 * 2**50, "5120.00 TiB"),
        (-3 * 2**30, "-3.00 GiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 thousand"),
        (24_320, "24.3 thousand"),
        (494_032_768, "494 million"),
        (999_400_000, "999 million"),
        (999_600_000, "1 billion"),
        (7_615_616_512, "7.62 billion"),
        (671_026_419_200, "671 billion"),
        (1_030_000_000_000, "1.03 trillion"),
    ],
)
def test_format_count(n: int, text: str) -> None:
    """Never "B", which is bytes."""
    assert format_count(n) == text


@given(st.integers(0, 2**50))
def test_what_is_written_is_read_back_to_the_last_digit_shown(size: int) -> None:
    text = format_bytes(size)
    unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[text.split()[1]]
    assert abs(parse_bytes(text) - size) <= 0.005 * unit + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
