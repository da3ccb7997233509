"""How many micro-batches are in flight: between the beginning of their forward and the end of their backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from verl_shard.memory.in_flight import Stage, last_stage
from verl_shard.memory.trace import Trace
from verl_shard.models.read import read_model
from verl_shard.runtime.pipeline_hooks import RootHook

_FOR_FORWARDS = 0.5
"""Of the memory a GPU has left, what "auto" gives to activations kept in flight when it is told no memory: what a pass
makes meanwhile, and gradients, need the rest."""
_A_STAGE = 1
"""Micro-batches in flight for each stage, at most, of "auto". One fills the pipeline. One more evens out micro-batches that are
not equally long: where lengths differ by up to 30 % both ways that is 1 to 2 % of the time, for twice what is kept."""


def in_flight_that_fits(
    trace: Trace, devices: Sequence[Any], memory: Mapping[Any, int], *, beside_one: bool = False
) -> int:
    """How many micro-batches may be in flight, so that on no device they keep more than `memory` bytes; at least 1.

    devices: of each Block that was traced, in their order. memory: by device; those it does not name hold any number.
    beside_one: memory is what is left beside one micro-batch at a time.
    """
    blocks = {device: [i for i, at in enumerate(devices) if at == device] for device in dict.fromkeys(devices)}
    kept = {device: trace.kept(held) for device, held in blocks.items()}
    limits = {}
    for device in kept.keys() & memory.keys():
        # The one whose backward is next has its loss too, which those behind it have not.
        one = kept[device] if beside_one else kept[device] - trace.kept(blocks[device], with_loss=True)
        limits[device] = memory[device] + one
    return _most(kept, limits, 2**31)


def _most(kept: Mapping[Any, int], limits: Mapping[Any, int], most: int) -> int:
    """kept: of one micro-batch by device, in the order of stages."""
    fits = most
    for stage, device in enumerate(kept):
        if device in limits and kept[device]:
            fits = min(fits, Stage(stage, len(kept)).in_flight(limits[device] // kept[device]))
    return max(1, fits)


class Window:
    """How many micro-batches are in flight, and how far each of them may have gone.

    limits: bytes for what they keep, by device or on each; None for a share of what is left. beside_one: limits are what is
    left beside one micro-batch at a time. trace: of one micro-batch: says what it keeps; without one, that is counted as they
    run. meant_for_others: bytes that are left now, but not later.
    """

    def __init__(
        self,
        pipe: RootHook | None,
        in_flight: int | Literal["auto"],
        *,
        limits: Mapping[Any, int] | int | None = None,
        beside_one: bool = False,
        trace: Trace | None = None,
        model: nn.Module | None = None,
        forward_only: bool = False,
        meant_for_others: Mapping[Any, int] | None = None,
    ) -> None:
        self._pipe = pipe
        self._stages = 1 if pipe is None else len(pipe.devices)
        self._forward_only, self._beside_one = forward_only, beside_one
        self._limits: dict[Any, int] = {}
        self._kept: dict[Any, int] = {}
        if in_flight != "auto" or pipe is None or self._stages == 1:
            self.most = 1 if in_flight == "auto" else in_flight
            return
        self.most = _A_STAGE * self._stages
        links = pipe.links
        if isinstance(limits, int):
            self._limits = dict.fromkeys(pipe.devices, limits)
        elif limits is not None:
            self._limits = {links.device(name): size for name, size in limits.items()}
        else:
            others = meant_for_others or {}
            rooms = {device: links.room(device) for device in pipe.devices}
            self._limits = {
                d: max(0, int(_FOR_FORWARDS * (room - others.get(d, 0))))
                for d, room in rooms.items()
                if room is not None
            }
        if trace is not None and model is not None and not forward_only:
            plain: Any = next((module for module in model.modules() if hasattr(module, "hf_device_map")), None)
            assert plain is not None, "dispatch_model, which laid it over these devices, said so in the model"
            devices = [links.device(name) for name in read_model(plain)[0].devices_of(plain.hf_device_map)]
            self.most = min(self.most, in_flight_that_fits(trace, devices, self._limits, beside_one=beside_one))
            self._limits = {}

    @property
    def number(self) -> int:
        """How many may be in flight now: one, until it is known what a micro-batch keeps."""
        if not self._limits:
            return self.most
        if not self._kept:
            return 1
        if self._forward_only:  # outputs only, where they are made
            return max(
                1, min([self.most, *(self._limits[d] // n for d, n in self._kept.items() if n and d in self._limits)])
            )
        limits = {d: size + self._beside_one * self._kept[d] for d, size in self._limits.items()}
        return _most(self._kept, limits, self.most)

    def stage(self, ahead: int, n: int) -> int:
        """The last stage that a micro-batch, of n, runs before the backward of the one that is so many before it."""
        return last_stage(ahead, self._stages, min(self.number, n))

    @contextmanager
    def counting(
        self, kept: dict[Any, int] | None = None, devices: Sequence[Any] | None = None
    ) -> Iterator[dict[Any, int]]:
        """Adds to `kept` what is on each device afterwards and was not before. devices: those, by default all."""
        counted = {} if kept is None else kept
        if not self._limits or self._pipe is None:
            yield counted
            return
        held = self._pipe.links.held
        used = self._pipe.devices if devices is None else devices
        before = {device: held(device) for device in used if device in self._limits}
        yield counted
        for device, size in before.items():
            counted[device] = counted.get(device, 0) + held(device) - size

    def learn(self, kept: Mapping[Any, int]) -> None:
        """What a micro-batch kept, after its forward."""
        if self._limits and self._pipe is not None:
            self._kept = {d: max(self._kept.get(d, 0), kept.get(d, 0)) for d in self._pipe.devices}
