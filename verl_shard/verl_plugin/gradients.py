"""Averages gradients over processes in buckets, while the backward of the last micro-batch is still running.

What DistributedDataParallel does, without its wrapper: a wrapped model is not the model that generates, that is saved and
that has adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
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
        first = self.params[0]
        marks = torch.tensor([float(grad is not None) for grad in grads], dtype=first.dtype).to(first.device)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, grads, strict=True)]
        self.flat = torch.cat([marks, *(part.reshape(-1) for part in parts)])
        self.work = torch.distributed.all_reduce(self.flat, group=group, async_op=True)

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
    """The gradients of a module, averaged over the processes of a group. All processes hold the same parameters."""

    def __init__(self, module: nn.Module, group: Any, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.group, self.size = group, torch.distributed.get_world_size(group)
        self.buckets = make_buckets(module.parameters(), bucket_bytes)
        self._bucket_of = {id(param): bucket for bucket in self.buckets for param in bucket.params}

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Around the backward of the last micro-batch: after it every process has the averaged gradients.

        Buckets leave in one order in all processes, whichever is complete first: collectives are matched by their order.
        """
        started = finished = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)
        # Each GPU has a thread of its own in a backward.
        lock = threading.Lock()

        def arrived(param: torch.Tensor) -> None:
            nonlocal started, finished
            with lock:
                self._bucket_of[id(param)].missing -= 1
                while started < len(self.buckets) and self.buckets[started].missing == 0:
                    self.buckets[started].start(self.group)
                    started += 1
                    # A bucket is a copy of its gradients: only a few are there at a time.
                    if started - finished > UNDER_WAY:
                        self.buckets[finished].finish(self.size)
                        finished += 1

        params: list[Any] = [param for bucket in self.buckets for param in bucket.params]
        hooks = [param.register_post_accumulate_grad_hook(arrived) for param in params]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in self.buckets[started:]:
            bucket.start(self.group)
        for bucket in self.buckets[finished:]:
            bucket.finish(self.size)


def same_parameters(module: nn.Module, group: Any) -> None:
    """Gives all processes of the group the first one's trainable parameters; new adapters and heads are drawn at random."""
    for param in module.parameters():
        if param.requires_grad:
            torch.distributed.broadcast(param.data, src=0, group=group)
