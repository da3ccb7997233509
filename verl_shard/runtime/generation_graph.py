"""A decoding step of fixed shape, which a CUDA graph launches as one: the host issues about a thousand kernels otherwise."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from verl_shard.models.decoding import CAPTURED, attention_of_decoder, takes_ready_masks, why_it_asks
from verl_shard.runtime.generation_cache import RowsCache
from verl_shard.runtime.offload import is_offloaded

_FAILED: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Models whose steps could not be captured, and why: they are not tried again."""

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""Takes a step, runs it, and returns what runs it again and the tensor in which its result then is."""


def why_not_fixed(model: Any, cache: RowsCache, positions: bool) -> str | None:
    """Why the steps of a model cannot have a fixed shape and be captured, or None when they can. positions: it takes them."""
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is on several devices"
    if any(hasattr(module, "_hf_hook") for module in model.modules()) or is_offloaded(model):
        return "its modules have hooks"
    if any(cache.is_sliding):
        return "it has layers that see a window"
    if not positions or not takes_ready_masks(model):
        return "it makes its masks or positions itself"
    attention = attention_of_decoder(model)
    if attention not in CAPTURED:
        return f"its attention is {attention}"
    return why_it_asks(model) or _FAILED.get(model)


def note_failure(model: Any, why: str) -> None:
    """A step of it could not be captured."""
    _FAILED[model] = why


def capture_on(device: torch.device) -> Capture | None:
    """What captures on a device; None where there are no graphs."""
    return functools.partial(capture_on_gpu, device=device) if device.type == "cuda" else None


def capture_on_gpu(
    step: Callable[[], torch.Tensor], *, device: torch.device | None = None
) -> tuple[Callable[[], object], torch.Tensor]:
    """As torch's documentation has it: once beside the stream of the caller, so that libraries make their workspaces, and
    once into the graph.

    Under autocast the prefill has cast all weights that train, and the casts are kept for as long as autocast is open: a
    graph reads them. So no other thread may leave an autocast of its own meanwhile, which lets go of the casts of all. What
    is cast anew at each step, such as frozen weights in fp32, is a part of the graph.
    """
    with torch.cuda.device(device):
        beside = _stream_beside(torch.cuda.current_device())
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step()
        torch.cuda.current_stream().wait_stream(beside)
        current, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as one that pins memory, go on meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local"):
                made = step()
        except BaseException:
            _undo_capture(current, pool)
            raise
    return graph.replay, made


def _undo_capture(current: Any, pool: Any) -> None:
    """After a capture that failed: torch raises where it ends one, before it gives back the stream, the memory's pool and the
    generator of random numbers."""
    torch.cuda.set_stream(current)
    device = torch.cuda.current_device()
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):  # it was ended
            end(device, pool)
    # Its state would refuse to draw outside of a capture; a copy, seed and offset alike, knows of none.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


@functools.cache
def _stream_beside(device: int) -> Any:
    """One for all captures: cuBLAS keeps a workspace, 32 MiB on an H200, for each stream that it ever worked on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class FixedStep:
    """One token more for all rows that the cache has room for, at a column that is a tensor; until the next relay.

    forward: takes ids (rows, 1), a mask (rows, 1, 1, columns) and positions (rows, 1), and returns logits (rows, vocabulary).
    Rows that have ended are computed with, and write into their own rows of the cache only.
    """

    def __init__(
        self, forward: Callable[[Any, Any, Any], torch.Tensor], cache: RowsCache, device: torch.device, capture: Capture
    ) -> None:
        self._cache, self._forward, self._capture = cache, forward, capture
        rows, columns = cache.room
        self._ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._start = torch.zeros(rows, dtype=torch.long, device=device)
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._columns = torch.arange(columns, device=device)
        self._again: Callable[[], object] | None = None
        self._logits = torch.empty(0)

    def run(self, tokens: torch.Tensor, start: torch.Tensor, column: int) -> torch.Tensor:
        """Logits of the first rows: as many as there are tokens. start: the column of each one's first token."""
        n = len(tokens)
        self._ids[:n, 0], self._start[:n] = tokens, start
        # Of a row that has ended only its own token counts: its position may not go on to where the model has none.
        self._start[n:] = column
        self._column.fill_(column)
        with self._cache.at(self._column):
            if self._again is None:
                self._again, self._logits = self._capture(self._step)
            self._again()
        self._cache.advance()
        return self._logits[:n]

    def release(self) -> None:
        """Lets go of the graph and of the rows that it is of, whoever holds this."""
        self._again, self._logits = None, torch.empty(0)

    def _step(self) -> torch.Tensor:
        seen = (self._columns >= self._start[:, None]) & (self._columns <= self._column)
        return self._forward(self._ids, seen[:, None, None], (self._column - self._start)[:, None])
