"""Averages gradients over processes in buckets, while the backward of the last micro-batch is still running.

What DistributedDataParallel does, without its wrapper: a wrapped model is not the model that generates, that is saved and
that has adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BUCKET_BYTES = 25 * 2**20
"""As DistributedDataParallel's: large enough for the network, small enough to begin early."""
UNDER_WAY = 4
"""Buckets that travel at a time, beside those left when the backward ends."""


class _Bucket:
    """Parameters of one device and dtype whose gradients travel together, with a mark for each: whether it has one."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.missing = 0
        self.flat: torch.Tensor | None = None
        self.work: Any = None

    def start(self, group: Any) -> None:
        grads = [param.grad for param in self.params]
        # Made on the device: a list copied to it would wait for the backward that goes on there.
        marks = self.params[0].new_ones(len(grads)).detach()
        for number, grad in enumerate(grads):
            if grad is None:
                marks[number].zero_()
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, grads, strict=True)]
        self.flat = torch.cat([marks, *(part.reshape(-1) for part in parts)])
        self.work = torch.distributed.all_reduce(self.flat, group=group, async_op=True)

    def drop(self) -> None:
        """Waits for it, and makes nothing of it."""
        self.work.wait()
        self.flat = self.work = None

    def finish(self, size: int) -> None:
        assert self.flat is not None, "started first"
        self.work.wait()
        marks, flat = torch.split(self.flat, [len(self.params), self.flat.numel() - len(self.params)])
        flat.div_(size)
        # What no process has a gradient of keeps none: an optimizer must not touch it. Where all are here nobody is asked,
        # as reading an answer waits for the GPU.
        whole = all(param.grad is not None for param in self.params)
        used = [True] * len(self.params) if whole else [mark > 0 for mark in marks.tolist()]
        parts = torch.split(flat, [p.numel() for p in self.params])
        for param, part, is_used in zip(self.params, parts, used, strict=True):
            if is_used and param.grad is None:
                param.grad = part.view_as(param).clone()
            elif is_used:
                assert param.grad is not None
                param.grad.copy_(part.view_as(param))
        self.flat = self.work = None


def make_buckets(params: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> list[_Bucket]:
    """The trainable parameters from the last to the first, as a backward reaches them, in buckets of about such a size."""
    open_: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    buckets = []
    for param in reversed([param for param in params if param.requires_grad]):
        key = (param.device, param.dtype)
        filling = open_.setdefault(key, [])
        filling.append(param)
        if sum(p.numel() * p.element_size() for p in filling) >= bucket_bytes:
            buckets.append(_Bucket(open_.pop(key)))
    return buckets + [_Bucket(left) for left in open_.values()]


class GradientAverager:
    """The gradients of a module, averaged over the processes of a group. All processes hold the same parameters.

    Buckets leave in order, so that one which is never complete holds up those behind it. After the first time what got a
    gradient in no process goes to the end.
    """

    def __init__(self, module: nn.Module, group: Any, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.group, self.size = group, torch.distributed.get_world_size(group)
        self._params = [param for param in module.parameters() if param.requires_grad]
        self._bucket_bytes = bucket_bytes
        self._settled = False
        self._started = self._finished = 0
        self._arrange(frozenset())

    def _arrange(self, silent: Collection[int]) -> None:
        """Puts parameters into buckets; silent: ids of those that go to the end."""
        heard = make_buckets((param for param in self._params if id(param) not in silent), self._bucket_bytes)
        self.buckets = heard + make_buckets((p for p in self._params if id(p) in silent), self._bucket_bytes)
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}

    def _settle(self, heard: Collection[int]) -> None:
        """heard: ids of parameters that got a gradient here. All processes arrange their buckets alike."""
        self._settled = True
        if not self._params:
            return
        marks = torch.tensor([id(param) in heard for param in self._params], dtype=torch.int32)
        marks = marks.to(self._params[0].device)
        torch.distributed.all_reduce(marks, op=torch.distributed.ReduceOp.MAX, group=self.group)
        silent = {id(param) for param, mark in zip(self._params, marks.tolist(), strict=True) if not mark}
        if silent:
            self._arrange(silent)

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Around the backward of the last micro-batch: after it every process has the averaged gradients.

        Buckets leave in one order in all processes, whichever is complete first: collectives are matched by their order.
        """
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)
        # Each GPU has a thread of its own in a backward.
        lock = threading.Lock()
        heard: set[int] = set()

        def arrived(param: torch.Tensor) -> None:
            with lock:
                heard.add(id(param))
                self._bucket_of[id(param)].missing -= 1
                while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
                    self.buckets[self._started].start(self.group)
                    self._started += 1
                    # A bucket is a copy of its gradients: only a few are there at a time.
                    if self._started - self._finished > UNDER_WAY:
                        self.buckets[self._finished].finish(self.size)
                        self._finished += 1

        params: list[Any] = [param for bucket in self.buckets for param in bucket.params]
        hooks = [param.register_post_accumulate_grad_hook(arrived) for param in params]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        while self._started < len(self.buckets):
            self.buckets[self._started].start(self.group)
            self._started += 1
        while self._finished < len(self.buckets):
            self.buckets[self._finished].finish(self.size)
            self._finished += 1
        self._started = self._finished = 0
        if not self._settled:
            self._settle(heard)

    def catch_up(self) -> None:
        """After a failure in this process, wherever it was in a mini-batch: joins what the others wait for.

        They go on to the end of the mini-batch, and average with what is sent here: it is of no use, and they have to be
        told. One bucket at a time, as memory may be short.
        """
        for bucket in self.buckets[self._finished : self._started]:
            bucket.drop()
        for bucket in self.buckets[self._started :]:
            bucket.start(self.group)
            bucket.drop()
        self._started = self._finished = 0
        if not self._settled:
            self._settle({id(param) for param in self._params})

    def again(self) -> None:
        """After a mini-batch of no use: which parameters get a gradient is not known from it."""
        self._settled = False


def same_parameters(module: nn.Module, group: Any) -> None:
    """Gives all processes of the group the first one's trainable parameters; new adapters and heads are drawn at random."""
    for param in module.parameters():
        if param.requires_grad:
            torch.distributed.broadcast(param.data, src=0, group=group)
