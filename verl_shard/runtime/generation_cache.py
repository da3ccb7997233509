"""A key-value cache for rows that come and go: one allocation for each layer, filled from prefills, written in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

_NAMES = ("keys", "values")


class RowsLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (rows, heads, columns, size), with room for more of both.

    All rows end at the same column, as when they are padded on the left, so that a token is one slice to write, and the
    model's own masks hold. `seen` columns count for masks; of a window only the last `window - 1` of them are kept, and
    `end` is where the next token is written. Row i is moved to j by a copy; nothing else moves between two relays.
    """

    keys: Any
    values: Any

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.is_sliding = window, window is not None
        self.rows = self.seen = self.end = 0
        self._shape = (0, 0)
        self.column: torch.Tensor | None = None

    def relay(self, rows: int, columns: int, spare: int) -> int:
        """Makes room for `rows` rows of `columns` columns and `spare` more; rows that are there come along, with their
        last columns. Returns the most bytes that this layer had meanwhile, beyond what it has then."""
        held = columns if self.window is None else min(columns, self.window - 1)
        kept, extra = min(self.end, held), 0
        self._shape = (rows, held + spare)
        if self.keys is not None:
            for name in _NAMES:
                old = getattr(self, name)
                new = old.new_zeros(rows, old.shape[1], held + spare, old.shape[3])
                new[: self.rows, :, held - kept : held] = old[: self.rows, :, self.end - kept : self.end]
                setattr(self, name, new)
                extra = max(extra, old.nbytes)
        self.seen, self.end = columns, held
        return extra

    def add(self, prefilled: Any, index: torch.Tensor | None) -> None:
        """More rows: those of a layer of a DynamicCache that `index` names, which end at the same column."""
        n = len(prefilled.keys) if index is None else len(index)
        for name in _NAMES:
            source = getattr(prefilled, name)
            if getattr(self, name) is None:
                # Zeros: what is masked is multiplied by a weight of 0, and must be a number.
                rows, columns = self._shape
                setattr(self, name, source.new_zeros(rows, source.shape[1], columns, source.shape[3]))
            width = min(source.shape[2], self.end)
            source = source[:, :, source.shape[2] - width :]
            source = source if index is None else source[index.to(source.device)]
            getattr(self, name)[self.rows : self.rows + n, :, self.end - width : self.end] = source
        self.rows += n
        self.is_initialized = True

    def move(self, source: int, target: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[target, :, : self.end] = tensor[source, :, : self.end]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("rows are added by `add`")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the next tokens of all rows; returns what attention looks at."""
        if self.column is not None:
            # Under autocast a kernel may give other types than the prefill's; a slice that is set casts them by itself.
            self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
            self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
            return self.keys, self.values
        n = key_states.shape[2]
        here = slice(self.end, self.end + n)
        self.keys[: self.rows, :, here], self.values[: self.rows, :, here] = key_states, value_states
        self.end, self.seen = self.end + n, self.seen + n
        first = 0 if self.window is None else max(0, self.end - (self.window - 1) - n)
        return self.keys[: self.rows, :, first : self.end], self.values[: self.rows, :, first : self.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.window is None:
            return self.seen + query_length, 0
        return min(self.seen, self.window - 1) + query_length, max(self.seen - self.window + 1, 0)

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def get_max_cache_shape(self) -> int:
        """What transformers before 5.15 asks instead."""
        return self.get_max_length()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values) if tensor is not None)


class RowsCache(Cache):  # type: ignore[misc]
    """The cache of all layers, for the layers that transformers' DynamicCache has for a configuration."""

    layers: Any

    def __init__(self, like: DynamicCache) -> None:
        super().__init__(
            layers=[RowsLayer(layer.sliding_window if layer.is_sliding else None) for layer in like.layers]
        )
        self.peak_bytes = 0

    def relay(self, rows: int, columns: int, spare: int) -> None:
        for layer in self.layers:
            extra = layer.relay(rows, columns, spare)
            self.peak_bytes = max(self.peak_bytes, self.nbytes + extra)

    def add(self, prefilled: DynamicCache, index: torch.Tensor | None) -> None:
        """Rows of a prefill, freed layer by layer."""
        for mine, layer in zip(self.layers, prefilled.layers, strict=True):
            mine.add(layer, index)
            self.peak_bytes = max(self.peak_bytes, self.nbytes + dynamic_bytes(prefilled))
            layer.keys = layer.values = None

    def move(self, source: int, target: int) -> None:
        for layer in self.layers:
            layer.move(source, target)

    @contextmanager
    def at(self, column: torch.Tensor) -> Iterator[None]:
        """While it is open, all rows that there is room for write at this column, (1,), and see all columns."""
        for layer in self.layers:
            layer.column = column
        try:
            yield
        finally:
            for layer in self.layers:
                layer.column = None

    def advance(self) -> None:
        """The column that was written so counts."""
        for layer in self.layers:
            layer.end, layer.seen = layer.end + 1, layer.seen + 1

    @property
    def room(self) -> tuple[int, int]:
        """Rows and columns, of whole layers."""
        rows, columns = self.layers[0].keys.shape[0], self.layers[0].keys.shape[2]
        return rows, columns

    def keep_first(self, rows: int) -> None:
        for layer in self.layers:
            layer.rows = rows

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


def dynamic_bytes(cache: Cache) -> int:
    """Bytes of the keys and values of one of transformers' caches."""
    tensors: list[Any] = [getattr(layer, name, None) for layer in cache.layers for name in _NAMES]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def rows_can_come_and_go(cache: DynamicCache) -> bool:
    """Whether all layers of a model's cache are keys and values by token, whole or of a window."""
    return bool(cache.layers) and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
    )
