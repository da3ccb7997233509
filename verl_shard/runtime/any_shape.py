"""Attention for inputs that each have a shape of their own: without cuDNN's kernel, which is planned anew for each shape."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_before = True


def _begin_anew() -> None:
    """In a child that was forked meanwhile none of those threads is left."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside:
        _inside = 0
        torch.backends.cuda.enable_cudnn_sdp(_before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def of_any_shape() -> Iterator[None]:
    """While it is open, in this thread or another, torch's sdpa takes its flash and memory-efficient kernels.

    On an H200 torch 2.11 prefers cuDNN's. It took the host 90 to 110 ms for a forward and backward of a shape that the thread
    had not seen, more than a second for the first of some lengths, and 40 ms for a token of a batch that decodes, where a
    kernel that was planned took 0.9 ms and flash attention 1.4 (8 x 1000 tokens, 28 heads of 128). Of responses to prompts
    hardly two micro-batches have one shape.
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
            torch.backends.cuda.enable_cudnn_sdp(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(_before)
