"""Tables for people, as wide as their console is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from verl_shard.common.tables import as_text, table

REMEDIES = (
    ("remedy", "set", "saves a GPU", "price"),
    [
        ("fused logits", "actor.logits=fused", "8.26 GiB", "logits are computed again in the backward"),
        ("LoRA", "actor.lora_rank=32", "354.49 MiB", ""),
    ],
)


def test_the_first_column_is_left_aligned_and_numbers_right() -> None:
    text = io.StringIO()
    Console(file=text, width=60).print(table("Weights", ("GPU", "blocks"), [("0", 7), ("long name", 12)]))
    lines = text.getvalue().splitlines()
    assert lines[0].strip() == "Weights"
    assert [line.strip("│┃ ").split() for line in lines if "7" in line] == [["0", "│", "7"]]
    assert next(line for line in lines if "long" in line).startswith("│ long name │")
    assert "│      7 │" in next(line for line in lines if "7" in line)


def test_words_are_left_aligned() -> None:
    lines = as_text(80, table("", ("a", "outcome", "peak"), [("x", "stable", "-"), ("y", "OOM", "12 B")])).splitlines()
    assert "│ y │ OOM     │ 12 B │" in lines
    assert "│ x │ stable  │    - │" in lines


def test_columns_of_words_wrap_between_words_and_numbers_keep_their_units() -> None:
    assert as_text(68, table("Chosen", *REMEDIES)).splitlines() == [
        "Chosen",
        # 55 beside the lines: 6 + 18 + 10 + 8 for the longest words, and 13 more to the prices, which are 42 long.
        "┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━┓",
        "┃        ┃                    ┃    saves a ┃                       ┃",
        "┃ remedy ┃ set                ┃        GPU ┃ price                 ┃",
        "┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━┩",
        "│ fused  │ actor.logits=fused │   8.26 GiB │ logits are computed   │",
        "│ logits │                    │            │ again in the backward │",
        "│ LoRA   │ actor.lora_rank=32 │ 354.49 MiB │                       │",
        "└────────┴────────────────────┴────────────┴───────────────────────┘",
    ]


def test_how_many_times_is_one_word() -> None:
    lines = as_text(20, table("", ("way", "ours is"), [("one batch of sixteen", "1.82 x")])).splitlines()
    assert "│ sixteen │        │" in lines  # 7 and 6 characters: all that 20 leave
    assert "│ one     │ 1.82 x │" in lines


def test_where_words_do_not_fit_the_lines_between_go_first() -> None:
    # Their longest words are 6 + 18 + 10 + 8 wide: 42 and three gaps of two, or 13 for lines and spaces beside them.
    assert as_text(48, table("Chosen", *REMEDIES)).splitlines() == [
        "Chosen",
        "                               saves a",
        "remedy  set                        GPU  price",
        "─" * 48,
        "fused   actor.logits=fused    8.26 GiB  logits",
        "logits                                  are",
        "                                        computed",
        "                                        again in",
        "                                        the",
        "                                        backward",
        "LoRA    actor.lora_rank=32  354.49 MiB",
    ]


def test_where_they_do_not_even_then_a_row_is_a_paragraph() -> None:
    assert as_text(47, table("Chosen", *REMEDIES)).splitlines() == [
        "Chosen",
        "fused logits",
        "    set: actor.logits=fused; saves a GPU: 8.26",
        "    GiB; price: logits are computed again in",
        "    the backward",
        "LoRA",
        "    set: actor.lora_rank=32; saves a GPU:",
        "    354.49 MiB",
    ]


@pytest.mark.parametrize("width", [30, 47, 48, 54, 55, 68, 90, 200])
def test_no_line_is_longer_than_the_console_and_no_word_is_broken(width: int) -> None:
    shown = as_text(width, table("Chosen", *REMEDIES))
    assert max(map(len, shown.splitlines())) <= width
    words = {word for row in REMEDIES[1] for cell in row for word in cell.split()}
    assert words <= set(shown.replace(";", " ").replace("│", " ").split())


def test_what_looks_like_markup_is_not() -> None:
    assert "│ [bold]x │ [/] │" in as_text(60, table("", ("a", "b"), [("[bold]x", "[/]")]))
