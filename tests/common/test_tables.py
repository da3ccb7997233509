"""Tables for people."""

from __future__ import annotations

import io

from rich.console import Console

from verl_shard.common.tables import table


def test_the_first_column_is_left_aligned_and_numbers_right() -> None:
    text = io.StringIO()
    Console(file=text, width=60).print(table("Weights", ("GPU", "blocks"), [("0", 7), ("long name", 12)]))
    lines = text.getvalue().splitlines()
    assert lines[0].strip() == "Weights"
    assert [line.strip("│┃ ").split() for line in lines if "7" in line] == [["0", "│", "7"]]
    assert next(line for line in lines if "long" in line).startswith("│ long name │")
    assert "│      7 │" in next(line for line in lines if "7" in line)
