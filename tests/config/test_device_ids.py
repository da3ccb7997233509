from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.config.device_ids import parse_device_ids, show_ids


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (4, 4), (None, None), ([0, 2], (0, 2)), ([], ()), ("0-3", (0, 1, 2, 3)), ("2", (2,)), ("0-1, 4", (0, 1, 4)),
        (["0-1", "cuda:3"], (0, 1, 3)), ("5-5", (5,)), ("", ()), ((7, 6), (7, 6)),
    ],
)  # fmt: skip
def test_ways_to_write_gpus(written: Any, meant: Any) -> None:
    assert parse_device_ids(written) == meant


@pytest.mark.parametrize("written", [True, [True], 1.5, "3-1", "a", ["a"], {"a": 1}, "0--2", "0-99999", [None], [[0]]])
def test_what_names_no_gpu(written: Any) -> None:
    with pytest.raises(ValueError, match=r"write 0|Give ids"):
        parse_device_ids(written)


def test_ids_are_shown_in_short() -> None:
    assert show_ids((6, 0, 1, 2, 3)) == "0-3, 6"
    assert show_ids((0, 1)) == "0, 1"
    assert show_ids(()) == ""


@given(st.sets(st.integers(0, 40)))
def test_what_is_shown_is_what_is_meant(ids: set[int]) -> None:
    assert parse_device_ids(show_ids(tuple(ids))) == tuple(sorted(ids))
