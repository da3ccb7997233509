"""No collections while things are loaded, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from verl_shard.common.collection import no_collection


def test_it_is_off_inside_and_as_before_after() -> None:
    assert gc.isenabled()
    with no_collection():
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    def fail() -> None:
        with no_collection():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
