"""Where shapes vary cuDNN's attention is left out, and is there again afterwards, whoever ends last."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from verl_shard.runtime.any_shape import of_any_shape


def _on() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Iterator[None]:
    before = _on()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_before_afterwards(before: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(before)
    with of_any_shape():
        assert not _on()
        with of_any_shape():
            assert not _on()
        assert not _on()
    assert _on() is before
    with pytest.raises(KeyError), of_any_shape():
        raise KeyError
    assert _on() is before


def test_of_two_threads_the_last_puts_it_back() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    inside, go, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with of_any_shape():
            inside.set()
            go.wait(60)
            seen.append(_on())

    with of_any_shape():
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
    assert not _on()  # the other is still at it
    go.set()
    thread.join()
    assert seen == [False]
    assert _on()


def test_a_child_that_is_forked_meanwhile_begins_anew() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    with of_any_shape():
        child = os.fork()
        if child == 0:
            os._exit(7 if _on() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not _on()
