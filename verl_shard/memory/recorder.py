"""Records what a pass allocates and frees, in order, and for which Block of the model.

A TorchDispatchMode sees each operation under autograd, in the forward and in the backward. Memory is counted by
storage, from the operation that made it until nothing refers to it. The Block is the one whose module runs; in the
backward, the one in whose forward the running autograd node was made, which its sequence number tells. Recomputed
forwards of gradient checkpointing run the modules again, so they need nothing special.
"""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from verl_shard.memory.recording import (
    ACTIVATIONS,
    LOGITS,
    NO_PRODUCT,
    PRODUCT,
    PRODUCT_WITH_BIAS,
    Pieces,
    Recording,
)
from verl_shard.memory.work import ATTENTION, BACKWARD, BF16, FORWARD, RECOMPUTE, WorkCounter

ROUND = 512
"""The CUDA caching allocator gives out multiples of this many bytes (c10/cuda/CUDACachingAllocator.cpp)."""


_DEVICE = torch.ops.prim.device.default
_ADDMM = torch.ops.aten.addmm.default
_ADD = torch.ops.aten.add.Tensor
_ALONE = 2


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Events of one pass. `sizes`, `owners`, `in_head` and `of_product` are by storage, numbered as they appear.

    events: storage number + 1 for an allocation, its negative for a release. actors: for each event the Block that
    ran then. steps: for each event the number of the operation. uses: (event, storage, Block) the first time that a
    Block reads a storage of another. flops: of the forward, by Block. work: every operation's FLOPs and bytes.
    """

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.owners = array("q"), array("i")
        self.in_head, self.of_product = bytearray(), bytearray()
        self.events, self.actors, self.steps = array("q"), array("i"), array("q")
        self.uses: list[tuple[int, int, int]] = []
        self.flops = [0] * pieces.n_blocks
        self.flops_in_backward = [0] * pieces.n_blocks
        self.work = WorkCounter()
        self._used: set[tuple[int, int]] = set()
        self._static = 0
        self._known: dict[int, tuple[int, Any]] = {}
        self.n_blocks = pieces.n_blocks
        self._pieces = pieces
        self._stack: list[int] = []
        self._slots: list[tuple[int, bool]] = [(0, False)]
        self._starts = [0]
        self._slot_of_entry = [0]
        self._slot = 0
        self._by_operand = False
        self._step = 0

    # What it saw

    def kinds(self) -> np.ndarray:
        """By storage LOGITS for what the head made, else ACTIVATIONS; whoever ran the pass knows the rest."""
        kinds = np.full(len(self.sizes), ACTIVATIONS, dtype=np.int8)
        kinds[np.frombuffer(self.in_head, dtype=np.uint8).astype(bool)] = LOGITS
        return kinds

    def recording(
        self, kinds: np.ndarray, *, n_static: int, marks: Sequence[tuple[str, int]], kept: np.ndarray, fp32: bool
    ) -> Recording:
        """All of it, once the pass has run. fp32: its products are of 32 bits. The rest: see Recording."""
        return Recording(
            sizes=np.array(self.sizes, dtype=np.int64),
            owners=np.array(self.owners, dtype=np.int32),
            kinds=kinds,
            events=np.array(self.events, dtype=np.int64),
            actors=np.array(self.actors, dtype=np.int32),
            steps=np.array(self.steps, dtype=np.int64),
            uses=tuple(self.uses),
            n_static=n_static,
            marks=tuple(marks),
            kept=kept,
            flops=tuple(self.flops),
            flops_in_backward=tuple(self.flops_in_backward),
            of_product=np.array(self.of_product, dtype=np.int8),
            work=self.work.result(fp32=fp32, decode_from=next((at for name, at in marks if name == "decode"), None)),
        )

    # Where it runs

    def watch(self, module: nn.Module) -> None:
        """Hooks on the pieces of `module`, so that it is known which one runs."""
        modules = dict(module.named_modules())
        for name, block in self._pieces.block_of.items():
            piece = modules.get(name)
            if piece is None:  # a tensor that a divided module holds itself
                continue
            slot = len(self._slots)
            self._slots.append((block, name == self._pieces.head))
            piece.register_forward_pre_hook(self._enter(slot), prepend=True)
            piece.register_forward_hook(self._leave, always_call=True)

    def _enter(self, slot: int) -> Any:
        def hook(*_: Any) -> None:
            self._stack.append(slot)
            self._slot = slot
            self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._slot_of_entry.append(slot)

        return hook

    def _leave(self, *_: Any) -> None:
        self._slot = self._stack.pop()

    def _place(self) -> int:
        """The slot that runs."""
        if not self._stack:
            node = torch._C._current_autograd_node()
            if node is not None:
                number = node._sequence_nr()
                if number < 1 << 62:  # an AccumulateGrad has the largest number there is
                    self._slot = self._slot_of_entry[bisect_right(self._starts, number) - 1]
        return self._slot

    # What it holds

    def add_static(self, tensor: torch.Tensor, block: int) -> int:
        """Counts a tensor that is there before the pass; returns its number."""
        number = self._add(tensor.untyped_storage(), block, False)
        self._static = len(self.sizes)
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage, if it was seen."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    @contextmanager
    def at(self, block: int) -> Iterator[None]:
        """While it is on, `block` is the one that runs."""
        slot = next(index for index, (owner, _) in enumerate(self._slots[1:], 1) if owner == block)
        self._enter(slot)()
        try:
            yield
        finally:
            self._leave()

    def by_operand(self, on: bool) -> None:
        """While on, what an operation makes belongs to the Block of its operand: the optimizer's step."""
        self._by_operand = on

    def _add(self, storage: torch.UntypedStorage, block: int, in_head: bool, product: int = NO_PRODUCT) -> int:
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            return known[0]
        number = len(self.sizes)
        self.sizes.append(-(-storage.nbytes() // ROUND) * ROUND)
        self.owners.append(block)
        self.in_head.append(in_head)
        self.of_product.append(product)
        self._follow(storage, number)
        self._event(number + 1, block)
        return number

    def _follow(self, storage: torch.UntypedStorage, number: int) -> None:
        key = storage._cdata

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self._event(-number - 1, self._slots[self._slot][0])

        self._known[key] = (number, weakref.ref(storage, gone))

    def _adds_in_place(self, func: Any, args: Any) -> bool:
        """Whether autograd sums two gradients and nothing else holds the first, which is then the sum.

        Under a mode such as this it makes a new tensor (can_accumulate_inplace, torch/csrc/autograd/input_buffer.cpp).
        Seen from here the storage has one more user, its Python object.
        """
        if func is not _ADD or self._stack or torch._C._current_autograd_node() is None:
            return False
        if len(args) != 2 or not all(isinstance(arg, torch.Tensor) for arg in args) or args[0].shape != args[1].shape:
            return False
        held = args[0].untyped_storage()._cdata
        return held in self._known and torch._C._storage_Use_Count(held) <= _ALONE

    def _event(self, what: int, actor: int) -> None:
        self.events.append(what)
        self.actors.append(actor)
        self.steps.append(self._step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        in_place = self._adds_in_place(func, args)
        result = func(*args, **(kwargs or {}))
        if func is _DEVICE:  # asked for all the time, by everybody
            return result
        self._step += 1
        if self._by_operand:
            self._add_by_operand(func, args, result)
            return result
        block, in_head = self._slots[self._place()]
        for tensor in _tensors(args):
            known = self._known.get(tensor.untyped_storage()._cdata)
            if known is not None and known[0] >= self._static and self.owners[known[0]] != block:
                use = (known[0], block)
                if use not in self._used:
                    self._used.add(use)
                    self.uses.append((len(self.events), *use))
        if in_place:
            number, _ = self._known.pop(args[0].untyped_storage()._cdata)
            if self.owners[number] == block:
                self._follow(result.untyped_storage(), number)
            else:  # another block's: it goes first, and the sum takes its place
                self._event(-number - 1, block)
        before = len(self.events)
        count = flop_registry.get(func._overloadpacket)
        product = NO_PRODUCT if count is None else PRODUCT_WITH_BIAS if func is _ADDMM else PRODUCT
        for tensor in _tensors((result,)):
            self._add(tensor.untyped_storage(), block, in_head, product)
        flops = 0
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=result)
            self._count(block, flops)
        self.work.operation(func, args, kwargs or {}, result, block, self._phase(), before, flops)
        return result

    def _count(self, block: int, flops: int) -> None:
        in_backward = torch._C._current_autograd_node() is not None
        (self.flops_in_backward if in_backward else self.flops)[block] += flops

    def add_attention(self, flops: int, n_bytes: int = 0) -> None:
        """Counts a stand-in attention, which computes nothing itself; its backward takes five products for two.

        n_bytes: of its operands and its result; without, its FLOPs alone take time.
        """
        self._add_stand_in(flops, flops * 5 // 2, n_bytes, ATTENTION)

    def add_product(self, flops: int, n_bytes: int = 0) -> None:
        """Counts a stand-in product; its backward takes two of the same size."""
        self._add_stand_in(flops, 2 * flops, n_bytes, BF16)

    def _add_stand_in(self, flops: int, in_backward: int, n_bytes: int, kind: int) -> None:
        block = self._slots[self._place()][0]
        self._count(block, flops)
        if torch._C._current_autograd_node() is None:
            self.flops_in_backward[block] += in_backward
        now, at = self._phase(), len(self.events)
        self.work.stand_in(block, now, kind, at, flops=flops, in_backward=in_backward, n_bytes=n_bytes)

    @contextmanager
    def repeated(self, times: Fraction) -> Iterator[None]:
        """What runs while it is on stands for as many of its kind: counted so often as work, and once as memory."""
        since, flops = len(self.work), (self.flops[:], self.flops_in_backward[:])
        yield
        self.work.repeat(since, times)
        for counts, before in zip((self.flops, self.flops_in_backward), flops, strict=True):
            counts[:] = [old + int((now - old) * times) for now, old in zip(counts, before, strict=True)]

    def _phase(self) -> int:
        if torch._C._current_autograd_node() is None:
            return FORWARD
        return RECOMPUTE if self._stack else BACKWARD  # a module's forward runs within the backward

    def _add_by_operand(self, func: Any, args: Any, result: Any) -> None:
        operands = list(_tensors(args[:1]))
        made = list(_tensors((result,)))
        numbers = [self.number_of(operand) for operand in operands]
        self.work.optimizer(func, args, result, [None if n is None else self.owners[n] for n in numbers])
        for index, tensor in enumerate(made):
            operand = operands[index] if len(operands) == len(made) else (operands[0] if operands else None)
            number = None if operand is None else self.number_of(operand)
            self._add(tensor.untyped_storage(), 0 if number is None else self.owners[number], False)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
