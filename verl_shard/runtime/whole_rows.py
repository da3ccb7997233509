"""Rows that are one sequence each: transformers is told so, and asks no GPU whether they are packed.

Without a mask and a cache it asks of every forward whether positions begin anew within a row, where packed sequences are to
be kept apart; also of positions that the model has made by itself, which count through. The host then waits for all that
the GPU was given before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_MODULE, _NAME = "transformers.masking_utils", "find_packed_sequence_indices"
_POSITIONS = "position_ids"

_here = threading.local()
_installing = threading.Lock()
_ours: Callable[..., Any] | None = None
"""What was put around transformers' function."""


@contextmanager
def whole_rows(whole: bool = True) -> Iterator[None]:
    """Around a forward pass on this thread: with `whole` its rows are not packed, as the caller gave no positions; else
    transformers finds out, within an outer one too."""
    if whole:
        _install()
    before = getattr(_here, "whole", False)
    _here.whole = whole
    try:
        yield
    finally:
        _here.whole = before


def _install() -> None:
    """Puts a function around transformers' own; nothing where it has none, or was not imported."""
    global _ours
    module: Any = sys.modules.get(_MODULE)
    if getattr(module, _NAME, _ours) is _ours:
        return
    with _installing:
        asks = getattr(module, _NAME)
        if asks is not _ours:
            _ours = _unless_whole(asks)
            setattr(module, _NAME, _ours)


def _unless_whole(asks: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(asks)
    def find(position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # While a graph is traced nothing is asked, and the mask is a part of it.
        if not torch.compiler.is_compiling() and getattr(_here, "whole", False) and _one_for_all(position_ids):
            return None
        return asks(position_ids, *args, **kwargs)

    return find


def _one_for_all(position_ids: torch.Tensor) -> bool:
    """Whether all rows have the same positions, as those that a model counts by itself; a few make them of the tokens."""
    return position_ids.shape[0] == 1 or position_ids.stride(0) == 0


class GivesPositions:
    """Whether calls of a forward say positions, by name or by place."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._at = _place(forward)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if kwargs.get(_POSITIONS) is not None:
            return True
        at = self._at
        return len(args) > at and args[at] is not None


def _place(forward: Callable[..., Any]) -> int:
    """Of position_ids among a forward's arguments; past the last where it takes none, or by name only.

    Where nobody knows what an argument without a name is, the first of these, which may be positions.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    for at, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return at
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        if parameter.name == _POSITIONS:
            return at
    return sys.maxsize
