"""Derived seeds: the same everywhere, and different for different names."""

from __future__ import annotations

import hashlib

from hypothesis import example, given
from hypothesis import strategies as st

from verl_shard.common.seeds import derive_seed


def test_the_value_is_pinned() -> None:
    # Runs are resumed and compared over versions: the top 63 bits of blake2b-64 of the parts joined by the unit separator.
    assert derive_seed(0, "actor", 3) == int(hashlib.blake2b(b"0\x1factor\x1f3", digest_size=8).hexdigest(), 16) // 2


@example(0, ["\ud800"])  # as of a path that is not in the file system's encoding
@given(st.integers(0, 2**63), st.lists(st.text(st.characters(exclude_characters="\x1f")), max_size=3))
def test_it_is_a_seed_that_torch_takes(seed: int, names: list[str]) -> None:
    assert 0 <= derive_seed(seed, *names) < 2**63


@given(st.lists(st.tuples(st.integers(0, 5), st.text("abc", max_size=3), st.integers(0, 20)), unique=True))
def test_different_names_give_different_seeds(names: list[tuple[int, str, int]]) -> None:
    assert len({derive_seed(*parts) for parts in names}) == len(names)


def test_the_border_between_names_counts() -> None:
    assert derive_seed(1, "ab", "c") != derive_seed(1, "a", "bc")
    assert derive_seed(1, "ab") != derive_seed(1, "ab", "")
