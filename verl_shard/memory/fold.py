"""A long chain of equal blocks is run short, and what was recorded is unfolded to its real length.

Eighty equal blocks allocate and free the same in turn, so a model is run with a few of them and the events of the one
in the middle are repeated, with each tensor's numbers moved along. Equal means: the same classes, scalar attributes
and tensor shapes all the way down, apart from the number of the layer. Blocks that alternate repeat as a period. What
does not come out congruent is not unfolded, and the model is run whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from verl_shard.common.errors import ConfigError
from verl_shard.memory.recording import Pieces, Recording
from verl_shard.models.spec import ModelSpec

_LONGEST_PERIOD = 8


@dataclass(frozen=True)
class Fold:
    """Blocks first..end-1 of the whole model repeat with `period`; `copies` of the middle period are left out.

    Kept are all before `first`, two periods, one more at the end of the run, and all after.
    """

    first: int
    period: int
    copies: int
    """How often the middle period runs in the whole model."""

    @property
    def middle(self) -> int:
        """The first block of the middle period, in the folded model."""
        return self.first + self.period

    @property
    def left_out(self) -> range:
        """Blocks of the whole model that the folded one lacks."""
        start = self.middle + self.period
        return range(start, start + (self.copies - 1) * self.period)


def find_fold(module: nn.Module, names: Sequence[str], n_before: int) -> Fold | None:
    """The longest run of repeating blocks among `names`, the names of the chain's blocks in order.

    n_before: pieces of the chain before the first block. One block at each end is never part of the run: the first is
    fed by the embedding, and the last feeds the head.
    """
    modules = dict(module.named_modules())
    if any(name not in modules for name in names) or not _is_one_list(names):
        return None
    types = _layer_types(module, len(names))
    signatures = [(_signature(modules[name], index), types[index]) for index, name in enumerate(names)]
    best: tuple[int, Fold] | None = None
    for period in range(1, _LONGEST_PERIOD + 1):
        start = 1
        while start < len(names) - 1:
            end = start + period
            while end < len(names) - 1 and signatures[end] == signatures[end - period]:
                end += 1
            runs = (end - start) // period
            left_out = (runs - 3) * period
            # Models look masks up by the number of a block that runs: what follows must find its own kind there.
            moved = start + 3 * period
            alike = left_out <= 0 or types[moved + left_out :] == types[moved : len(types) - left_out]
            if runs > 3 and alike and (best is None or left_out > best[0]):
                best = left_out, Fold(n_before + start, period, runs - 2)
            start = max(end - period + 1, start + 1)
    return None if best is None else best[1]


def fold_module(module: nn.Module, names: Sequence[str], fold: Fold, n_before: int) -> None:
    """Takes the blocks that are left out from the module's list, in place."""
    path = names[0].rpartition(".")[0]
    gone = {index - n_before for index in fold.left_out}
    kept = [child for index, child in enumerate(module.get_submodule(path).children()) if index not in gone]
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, nn.ModuleList(kept))


def fold_pieces(pieces: Pieces, names: Sequence[str], fold: Fold, n_before: int) -> Pieces:
    """The pieces of the folded module: its blocks are renumbered."""
    path = names[0].rpartition(".")[0]
    n_out = len(fold.left_out)
    gone = set(fold.left_out)
    block_of = {}
    for name, block in pieces.block_of.items():
        if block in gone:
            continue
        moved = block - n_out if block > fold.left_out[-1] else block
        if name in names and block != moved:
            name = f"{path}.{names.index(name) - n_out}"
        block_of[name] = moved
    return replace(pieces, block_of=block_of, n_blocks=pieces.n_blocks - n_out)


def _is_one_list(names: Sequence[str]) -> bool:
    """Whether they are all elements 0..n-1 of one list."""
    path = names[0].rpartition(".")[0] if names else ""
    return len(names) > 1 and list(names) == [f"{path}.{index}" for index in range(len(names))]


def _layer_types(module: nn.Module, n: int) -> list[object]:
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = getattr(text, "layer_types", None)
    return list(types) if isinstance(types, list | tuple) and len(types) == n else [None] * n


def _signature(block: nn.Module, index: int) -> object:
    parts: list[object] = []
    for name, module in block.named_modules():
        scalars = tuple(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, int | float | bool | str | type(None)) and not _is_number(key, value, index)
        )
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for group in (module._parameters, module._buffers)
            for key, tensor in group.items()
            if tensor is not None
        )
        parts.append((name, type(module), scalars, tensors))
    return tuple(parts)


def _is_number(key: str, value: object, index: int) -> bool:
    """Whether an attribute is the layer's own number."""
    return ("layer" in key or "idx" in key or "index" in key) and value == index and not isinstance(value, bool)


def record_short(
    spec: ModelSpec,
    module: nn.Module,
    prepare: Callable[[Sequence[str]], nn.Module],
    run: Callable[[Pieces, Sequence[str], nn.Module], Recording],
    *,
    fold: bool = True,
) -> Recording:
    """What `run` records of a model, whose long chain of equal blocks is run short where that gives the same.

    prepare: makes a copy of `module` to run, anew each time; it is given names of blocks that need not be copied.
    run: is given the pieces, the names of the blocks that run, and the copy.
    Raises ConfigError for what `run` raises of the whole model.
    """
    pieces = Pieces.of(spec)
    names = [block.names[0] for block in spec.blocks if block.kind == "block" and len(block.names) == 1]
    n_before = next((i for i, block in enumerate(spec.blocks) if block.kind == "block"), 0)
    found = find_fold(module, names, n_before) if fold else None
    if found is None:
        return run(pieces, names, prepare(()))
    copied = prepare([names[index - n_before] for index in found.left_out])
    fold_module(copied, names, found, n_before)
    folded = fold_pieces(pieces, names, found, n_before)
    kept = names[: len(names) - len(found.left_out)]
    try:
        recording = unfold(run(folded, kept, copied), found)
    except ConfigError:  # a model that counts its layers; run whole it says what is wrong, if anything is
        recording = None
    return run(pieces, names, prepare(())) if recording is None else recording


class _NotCongruentError(Exception):
    """The periods did not record the same."""


def unfold(recording: Recording, fold: Fold) -> Recording | None:
    """The recording of the whole model; None when its periods are not congruent."""
    try:
        return _Unfolding(recording, fold).result()
    except _NotCongruentError:
        return None


class _Unfolding:
    """Writes the long recording. A new storage is made for each copy of one that the middle period owns."""

    def __init__(self, recording: Recording, fold: Fold) -> None:
        self.old, self.fold = recording, fold
        first, period = fold.first, fold.period
        self.middle = range(fold.middle, fold.middle + period)
        self.before = range(first, fold.middle)
        self.after = range(fold.middle + period, fold.middle + 2 * period)
        self.copies = fold.copies
        owners = recording.owners
        inside = np.isin(owners, self.middle)
        # The number of copy 0 of each storage; the further copies of a middle one follow it.
        self.number = np.concatenate([[0], np.where(inside, self.copies, 1).cumsum()])
        self.inside = inside
        self.mirrored = self._mirrors()

    def _mirrors(self) -> dict[int, int]:
        """For storages of the periods beside the middle one, the middle one's that they correspond to."""
        by_block: dict[int, list[int]] = defaultdict(list)
        for number in self._in_order():
            by_block[int(self.old.owners[number])].append(number)
        mirrored: dict[int, int] = {}
        for offset, block in enumerate(self.middle):
            mine = by_block[block]
            for beside in (self.before, self.after):
                theirs = by_block[beside[offset]]
                if [self._kind(number) for number in theirs] != [self._kind(number) for number in mine]:
                    raise _NotCongruentError
                mirrored.update(zip(theirs, mine, strict=True))
        return mirrored

    def _in_order(self) -> Iterable[int]:
        return (int(event) - 1 for event in self.old.events if event > 0)

    def _kind(self, number: int) -> tuple[int, int]:
        return int(self.old.sizes[number]), int(self.old.kinds[number])

    def _storage(self, number: int, copy: int) -> int:
        """The new number of a storage as the middle period's copy number `copy` refers to it."""
        if self.inside[number]:
            return int(self.number[number]) + copy
        owner = int(self.old.owners[number])
        if owner in self.before and copy > 0:
            return int(self.number[self.mirrored[number]]) + copy - 1
        if owner in self.after and copy < self.copies - 1:
            return int(self.number[self.mirrored[number]]) + copy + 1
        return int(self.number[number])

    def _block(self, block: int, copy: int) -> int:
        if block < self.middle.start:
            return block
        if block in self.middle:
            return block + copy * self.fold.period
        return block + len(self.fold.left_out)

    def result(self) -> Recording:
        old = self.old
        uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, number, block in old.uses:
            uses[at].append((number, block))
        self.events: list[int] = []
        self.actors: list[int] = []
        self.steps: list[int] = []
        self.uses: list[tuple[int, int, int]] = []
        marks = {at: name for name, at in old.marks}
        step_begins = next((at for name, at in old.marks if name == "optimizer"), len(old.events))
        new_marks: list[tuple[str, int]] = []
        n_static = 0
        at, n = 0, len(old.events)
        while at < n:
            if at in marks:
                new_marks.append((marks[at], len(self.events)))
            if at == old.n_static:
                n_static = len(self.events)
            if at < old.n_static or at >= step_begins:
                end = self._run_of_one_operation(at, marks)
                self._everywhere(range(at, end))
                at = end
                continue
            end = at + 1
            if int(old.actors[at]) in self.middle:
                while end < n and end not in marks and int(old.actors[end]) in self.middle:
                    end += 1
                forward = self._goes_forward(at, end)
                for copy in range(self.copies) if forward else reversed(range(self.copies)):
                    for event in range(at, end):
                        self._one(event, copy, uses[event])
            else:
                self._outside(at, uses[at])
            at = end
        if n in marks:
            new_marks.append((marks[n], len(self.events)))
        for late in uses.get(n, []):
            self._use(*late, 0)
        self._check()
        return Recording(
            sizes=self._spread(old.sizes),
            owners=self._spread_owners(),
            kinds=self._spread(old.kinds),
            events=np.array(self.events, dtype=np.int64),
            actors=np.array(self.actors, dtype=np.int32),
            steps=np.array(self.steps, dtype=np.int64),
            uses=tuple(self.uses),
            n_static=n_static,
            marks=tuple(new_marks),
            kept=np.array(self._by_block(old.kept.tolist()), dtype=np.int64),
            flops=tuple(self._by_block(old.flops)),
            flops_in_backward=tuple(self._by_block(old.flops_in_backward)),
            of_product=self._spread(old.of_product),
            work=old.work.unfolded(self.middle, self.copies),
        )

    def _goes_forward(self, at: int, end: int) -> bool:
        """Whether the blocks run in the order of the chain: what ran before this visit says it."""
        return at == 0 or int(self.old.actors[at - 1]) < self.middle.start

    def _write(self, event: int, actor: int, step: int) -> None:
        self.events.append(event)
        self.actors.append(actor)
        self.steps.append(step)

    def _run_of_one_operation(self, at: int, marks: Mapping[int, str]) -> int:
        """The end of the middle period's events from `at` on, all of them static or of one operation; else at + 1.

        Copy by copy these come in the order of the whole model's layers, which the allocator's packing depends on.
        """
        old, end = self.old, at + 1
        if not self.inside[abs(int(old.events[at])) - 1]:
            return end
        while (
            end < len(old.events)
            and end not in marks
            and end != old.n_static
            and old.steps[end] == old.steps[at]
            and (old.events[end] > 0) == (old.events[at] > 0)
            and self.inside[abs(int(old.events[end])) - 1]
        ):
            end += 1
        return end

    def _everywhere(self, run: range) -> None:
        """Events that each copy has at the same time: what is static, and the optimizer's."""
        middle = self.inside[abs(int(self.old.events[run.start])) - 1]
        for copy in range(self.copies if middle else 1):
            for at in run:
                event = int(self.old.events[at])
                new = int(self.number[abs(event) - 1]) + copy + 1
                self._write(
                    new if event > 0 else -new, self._block(int(self.old.actors[at]), copy), int(self.old.steps[at])
                )

    def _one(self, at: int, copy: int, uses: list[tuple[int, int]]) -> None:
        for number, block in uses:
            self._use(number, block, copy)
        event = int(self.old.events[at])
        number = abs(event) - 1
        near = self.inside[number] or int(self.old.owners[number]) in (*self.before, *self.after)
        if not near:
            raise _NotCongruentError  # a copy frees what is not its own nor its neighbour's
        new = self._storage(number, copy) + 1
        self._write(new if event > 0 else -new, self._block(int(self.old.actors[at]), copy), int(self.old.steps[at]))

    def _outside(self, at: int, uses: list[tuple[int, int]]) -> None:
        actor = int(self.old.actors[at])
        neighbour = 0 if actor < self.middle.start else self.copies - 1
        for number, block in uses:
            self._use(number, block, neighbour)
        event = int(self.old.events[at])
        number = abs(event) - 1
        beside = actor in self.before or actor in self.after
        copies: Iterable[int] = [neighbour]
        if self.inside[number] and not beside:
            copies = range(self.copies)
        for copy in copies:
            new = (int(self.number[number]) + copy if self.inside[number] else int(self.number[number])) + 1
            self._write(new if event > 0 else -new, self._block(actor, 0), int(self.old.steps[at]))

    def _use(self, number: int, block: int, copy: int) -> None:
        in_middle = block in self.middle
        storage = self._storage(number, copy) if in_middle or self.inside[number] else int(self.number[number])
        self.uses.append((len(self.events), storage, self._block(block, copy)))

    def _spread(self, values: np.ndarray) -> np.ndarray:
        return np.repeat(values, np.where(self.inside, self.copies, 1))

    def _spread_owners(self) -> np.ndarray:
        owners = []
        for owner, inside in zip(self.old.owners.tolist(), self.inside, strict=True):
            owners += [self._block(owner, copy) for copy in range(self.copies)] if inside else [self._block(owner, 0)]
        return np.array(owners, dtype=np.int32)

    def _by_block(self, values: Sequence[int]) -> list[int]:
        start, end = self.middle.start, self.middle.stop
        return [*values[:start], *list(values[start:end]) * self.copies, *values[end:]]

    def _check(self) -> None:
        """Each storage appears once and goes at most once, after it appeared."""
        seen: dict[int, int] = {}
        for event in self.events:
            state = seen.get(abs(event), 0)
            if (event > 0 and state != 0) or (event < 0 and state != 1):
                raise _NotCongruentError
            seen[abs(event)] = state + 1
        if len(seen) != int(self.number[-1]):
            raise _NotCongruentError
