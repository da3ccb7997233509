"""Python's garbage collector, kept still while what is loaded stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """No collections meanwhile: importing torch, transformers and verl makes a million objects, none of them garbage.

    Looking for it takes an eighth of the time: 7.7 s instead of 8.9 from starting Python to a loaded trainer.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
