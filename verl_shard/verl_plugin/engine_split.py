"""A mini-batch on the host in micro-batches, each made when its turn comes: before the first, GPUs have nothing to do.

verl takes all nested tensors apart, row by row, and puts all micro-batches together before the first forward, which takes
tens of milliseconds for a few rows. Here values are cut by their offsets, of one micro-batch at a time; the others are made
while GPUs work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from verl_shard.common.errors import config_error

_HOW = ("use_dynamic_bsz", "max_token_len_per_gpu", "sp_size", "force_group_size")
"""Keys that say how verl packs sequences into micro-batches of about as many tokens."""


class Parts(Sequence[TensorDict]):
    """The micro-batches of a batch. rows: which of the batch each has. indices: the same, as verl wants them when it puts
    rows back in their order; None where they are in order. tokens: of each row of each."""

    def __init__(self, data: TensorDict, rows: Sequence[Sequence[int]], *, indices: list[list[int]] | None) -> None:
        """rows of a micro-batch, a range where they follow each other; as many in each, without indices."""
        lengths = data["input_ids"].offsets().diff().tolist()
        self.indices = indices
        self.rows = [list(part) for part in rows]
        self.tokens = [[lengths[row] for row in part] for part in rows]
        self._rows = rows
        items = dict(data.items())
        nested = {name: value for name, value in items.items() if isinstance(value, torch.Tensor) and value.is_nested}
        self._jagged = {name: _Jagged(value) for name, value in nested.items() if _Jagged.can(value)}
        odd = nested.keys() - self._jagged.keys()
        self._odd = _only(data, {name: nested[name] for name in nested if name in odd}) if odd else None
        self._plain = _only(data, {name: value for name, value in items.items() if name not in nested})
        # Of what is in order verl has a way for tensors that torch cannot take apart.
        self._chunks = tu.chunk_tensordict(self._odd, len(rows)) if self._odd is not None and indices is None else None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[TensorDict]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: Any) -> Any:
        """A micro-batch, its nested tensors made anew: nobody else has those. Others are views of the batch."""
        rows = self._rows[number]
        at = slice(rows.start, rows.stop) if isinstance(rows, range) else torch.tensor(rows)
        made: TensorDict = self._plain[at]
        for name, jagged in self._jagged.items():
            made[name] = jagged.part(rows)
        if self._odd is not None:
            others = (
                tu.index_select_tensor_dict(self._odd, list(rows)) if self._chunks is None else self._chunks[number]
            )
            for name, value in others.items():
                made[name] = value
        return made


def split(data: TensorDict, size: int) -> Parts:
    """Micro-batches of `size` rows each, in order, as verl's chunk_tensordict makes them."""
    if len(data) % size:
        raise _unequal(len(data), size, 1)
    return Parts(data, [range(at, at + size) for at in range(0, len(data), size)], indices=None)


def micro_batches(data: TensorDict, group: Any) -> Parts:
    """What verl's prepare_micro_batches makes of a batch on the host, whose keys say how; by all processes of a group as
    many. Raises ConfigError for rows that cannot be cut evenly."""
    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        names = data.keys() & {"input_ids", *_HOW}
        lengths = _only(data, {name: data.get(name) for name in names})
        _, indices = prepare_micro_batches(data=lengths, dp_group=group, same_micro_num_in_dp=True)
        return Parts(data, indices, indices=indices)
    together = tu.get_non_tensor_data(data=data, key="force_group_size", default=1)
    size = data["micro_batch_size_per_gpu"]
    if len(data) % (together * size):
        raise _unequal(len(data), size, together)
    return split(data, together * size)


def _unequal(rows: int, size: int, together: int) -> Exception:
    why = (
        "data size must be divisible by force_group_size * micro_batch_size_per_gpu: "
        f"the mini-batch has {rows} sequences on this GPU, and {rows} % ({together} * {size}) is {rows % (together * size)}"
    )
    fix = "Give a micro-batch size that divides the mini-batch of each GPU, or use_dynamic_bsz"
    return config_error("micro-batches-unequal", "micro_batch_size_per_gpu", size, why, fix)


def _only(data: TensorDict, items: dict[str, Any]) -> TensorDict:
    return TensorDict(items, batch_size=data.batch_size, device=data.device)


class _Jagged:
    """A nested tensor (rows, tokens, ...) whose rows lie one behind the other in its values (all tokens, ...)."""

    def __init__(self, nested: Any) -> None:
        self._values: torch.Tensor = nested.values()
        self._offsets: torch.Tensor = nested.offsets()
        self._ends: list[int] = self._offsets.tolist()

    @staticmethod
    def can(nested: Any) -> bool:
        return nested.layout == torch.jagged and nested._ragged_idx == 1 and nested.lengths() is None

    def part(self, rows: Sequence[int]) -> torch.Tensor:
        """Some rows; how long the shortest and the longest are is known, so that nobody has to ask."""
        ends = self._ends
        lengths = [ends[row + 1] - ends[row] for row in rows]
        if isinstance(rows, range):
            values = self._values[ends[rows.start] : ends[rows.stop]].clone()  # what is changed stays in the part
            offsets = self._offsets[rows.start : rows.stop + 1] - ends[rows.start]
        else:
            values = torch.cat([self._values[ends[row] : ends[row + 1]] for row in rows])
            offsets = torch.tensor([0, *lengths], dtype=self._offsets.dtype).cumsum(0)
        return jagged(values, offsets, shortest=min(lengths), longest=max(lengths))


def jagged(
    values: torch.Tensor, offsets: torch.Tensor, *, shortest: int, longest: int, ragged: int = 1
) -> torch.Tensor:
    """torch.nested.nested_tensor_from_jagged of values that want no gradient, in a quarter of its time: that goes through
    torch's dispatcher, an operator in Python, for each key of each micro-batch.

    ragged: which dimension of the nested tensor is of tokens.
    """
    kind = _kind()
    if kind is None or values.requires_grad:
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, jagged_dim=ragged, min_seqlen=shortest, max_seqlen=longest
        )
    known = {"min_seqlen": _as_torch_keeps(shortest), "max_seqlen": _as_torch_keeps(longest)}
    made: torch.Tensor = kind(values, offsets, _ragged_idx=ragged, _metadata_cache=known)
    return made


def _as_torch_keeps(number: int) -> torch.Tensor:
    """A number as the size of an empty tensor."""
    return torch.empty(number, 0)


@functools.cache
def _kind() -> Any:
    """The class of nested tensors, where it can be called as here and means the same; else None. It is not torch's public
    way of making one."""
    values, offsets = torch.arange(6.0), torch.tensor([0, 2, 6])
    public: Any = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=2, max_seqlen=4)
    try:
        known = {"min_seqlen": _as_torch_keeps(2), "max_seqlen": _as_torch_keeps(4)}
        ours = type(public)(values, offsets, _ragged_idx=1, _metadata_cache=known)
        same = ours.values() is not None and all(map(torch.equal, ours.unbind(), public.unbind()))
        return type(public) if same and _says(ours) == _says(public) else None
    except (TypeError, AttributeError, RuntimeError):
        return None


def _says(nested: Any) -> tuple[Any, ...]:
    return nested._min_seqlen, nested._max_seqlen, nested._ragged_idx, nested.is_leaf, nested.dtype, nested.layout
