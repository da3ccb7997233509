"""What each operation of a pass computes and moves, from which the pass's time follows for any card.

Kept for each operation that launches a kernel, not summed: whether arithmetic or memory bounds an operation is a
question of the two together, so sums of each would lose it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch

PHASES = ("forward", "backward", "recompute", "optimizer", "decode")
"""When an operation runs, by its index here. "recompute" is the forward that gradient checkpointing runs again within the
backward; the prompt of a generation is its "forward"."""
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, DECODE = range(len(PHASES))

KINDS = ("moves", "casts", "bf16", "fp32", "attention")
"""What an operation is, by its index here: one that moves bytes, of these a change of dtype, which autocast makes without
Python; products of 16 or of 32 bits; a fused attention of 16 bits."""
MOVES, CASTS, BF16, FP32, ATTENTION = range(len(KINDS))


@dataclass(frozen=True, eq=False)
class Work:
    """Operations that launch kernels. Arrays with an entry for each, those of a Block together and in their order.

    blocks: the Block that it runs in. phases, kinds: indices into PHASES and KINDS. flops. n_bytes: read and written.
    """

    blocks: np.ndarray
    phases: np.ndarray
    kinds: np.ndarray
    flops: np.ndarray
    n_bytes: np.ndarray

    def of(self, phase: int, first: int, end: int) -> Work:
        """Those of Blocks first..end-1 in one phase."""
        return self._picked((self.phases == phase) & (self.blocks >= first) & (self.blocks < end))

    def unfolded(self, middle: range, copies: int) -> Work:
        """With the Blocks `middle` there `copies` times, and all behind them moved along."""
        before = self._picked(self.blocks < middle.start)
        inside = self._picked((self.blocks >= middle.start) & (self.blocks < middle.stop))
        after = self._picked(self.blocks >= middle.stop)
        repeated = [inside._moved(copy * len(middle)) for copy in range(copies)]
        parts = [before, *repeated, after._moved((copies - 1) * len(middle))]
        return Work(*(np.concatenate([getattr(part, name) for part in parts]) for name in vars(self)))

    def _moved(self, by: int) -> Work:
        return replace(self, blocks=self.blocks + by)

    def _picked(self, which: np.ndarray) -> Work:
        return Work(*(values[which] for values in vars(self).values()))

    def _in_order(self) -> Work:
        return self._picked(np.argsort(self.blocks, kind="stable"))


class WorkCounter:
    """Collects the Work of a pass while it is recorded."""

    def __init__(self) -> None:
        self._blocks, self._phases, self._kinds = array("i"), array("b"), array("b")
        self._flops, self._bytes, self._at = array("q"), array("q"), array("q")

    def operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, block: int, phase: int, at: int,
        flops: int,
    ) -> None:  # fmt: skip
        """One operation that ran. at: how many events there were before it."""
        cost = _cost_of(func)
        made = tensors_in((result,))
        if cost.free or not (made or cost.written):
            return
        read = [*tensors_in(args), *tensors_in(kwargs.values())]
        written = tensors_in(args[i] for i in cost.written if i < len(args)) if cost.written else made
        n_written = sum(map(_size, written))
        if cost.gathers:
            n_read = sum(min(_size(tensor), n_written) for tensor in read)
        else:
            n_read = sum(map(_size, read)) - (n_written if cost.overwrites else 0)
        kind = CASTS if cost.casts else MOVES
        if flops:
            kind = FP32 if made and made[0].dtype in (torch.float32, torch.float64) else BF16
        self._add(block, phase, kind, flops, n_read + n_written, at)

    def stand_in(
        self, block: int, phase: int, kind: int, at: int, *, flops: int, in_backward: int, n_bytes: int
    ) -> None:
        """What computes nothing itself. Its backward is counted with the forward, as no operation will tell of it."""
        self._add(block, phase, kind, flops, n_bytes, at)
        if phase == FORWARD and torch.is_grad_enabled():
            self._add(block, BACKWARD, kind, in_backward, 2 * n_bytes, at)

    def optimizer(self, func: Any, args: Sequence[Any], result: Any, owners: Sequence[int | None]) -> None:
        """An operation of the optimizer's step, on lists or alone. owners: the Block of each of the first operand's.

        Of a list each Block gets the bytes of its own tensors. Counts of steps have no owner: they are on the host.
        """
        cost = _cost_of(func)
        if cost.free:
            return
        lists = [tensors_in((arg,)) for arg in args]
        written = [lists[i] for i in cost.written if i < len(lists)] if cost.written else [tensors_in((result,))]
        by_block: dict[int, int] = {}
        for tensors in (*lists, *written):
            if len(tensors) == len(owners):
                for owner, tensor in zip(owners, tensors, strict=True):
                    if owner is not None:
                        by_block[owner] = by_block.get(owner, 0) + _size(tensor)
        for block, size in by_block.items():
            self._add(block, OPTIMIZER, MOVES, 0, size, 0)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._blocks)

    def repeat(self, since: int, times: Fraction) -> None:
        """Has the entries from `since` on so many times instead of once, the last time in part."""
        whole, part = divmod(times, 1)
        of_one = [values[since:] for values in (self._blocks, self._phases, self._kinds, self._at)]
        n_copies = int(whole) - 1 + (part > 0)
        for values, mine in zip((self._blocks, self._phases, self._kinds, self._at), of_one, strict=True):
            values.extend(mine * n_copies)
        for numbers in (self._flops, self._bytes):
            one = numbers[since:]
            numbers.extend(one * (int(whole) - 1))
            if part:
                numbers.extend(array("q", [int(number * part) for number in one]))

    def _add(self, block: int, phase: int, kind: int, flops: int, n_bytes: int, at: int) -> None:
        self._blocks.append(block)
        self._phases.append(phase)
        self._kinds.append(kind)
        self._flops.append(flops)
        self._bytes.append(n_bytes)
        self._at.append(at)

    def result(self, *, fp32: bool, decode_from: int | None) -> Work:
        """What was counted. fp32: all is of 32 bits. decode_from: the event from which on a generation decodes."""
        phases, kinds = np.array(self._phases, dtype=np.int8), np.array(self._kinds, dtype=np.int8)
        if decode_from is not None:
            phases[np.array(self._at, dtype=np.int64) >= decode_from] = DECODE
        if fp32:
            kinds[kinds > CASTS] = FP32
        whole = Work(
            np.array(self._blocks, dtype=np.int32),
            phases,
            kinds,
            np.array(self._flops, dtype=np.int64),
            np.array(self._bytes, dtype=np.int64),
        )
        return whole._in_order()


@dataclass(frozen=True)
class _Cost:
    """free: it launches nothing. written: the arguments that it writes, by position; none when it makes new tensors.
    overwrites: it does not read what it writes. gathers: of each operand it reads no more than it writes. casts: it
    changes the dtype."""

    free: bool
    written: tuple[int, ...]
    overwrites: bool
    gathers: bool
    casts: bool


_FREE = frozenset({"_unsafe_view", "lift_fresh", "_reshape_alias", "is_same_size"})
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "_foreach_copy_"})
_GATHERING = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
_NOT_WRITTEN = frozenset({"grads", "state_steps"})
"""Arguments of fused optimizers that are written for a gradient scaler only, or hold one number each."""


@cache
def _cost_of(func: Any) -> _Cost:
    schema = func._schema
    name = schema.name.partition("::")[2]
    views = not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)
    free = views or name in _FREE or name.startswith(("empty", "new_empty", "sym_")) or schema.name.startswith("prim")
    written = tuple(
        i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in _NOT_WRITTEN
    )
    written = written if schema.is_mutable else ()
    return _Cost(free, written, name in _OVERWRITING, name in _GATHERING, name == "_to_copy")


def _size(tensor: torch.Tensor) -> int:
    """Bytes that it has; one that is expanded has no more than its storage."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors of some arguments, those in lists and mappings included, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, Mapping):
            found += tensors_in(value.values())
    return found
