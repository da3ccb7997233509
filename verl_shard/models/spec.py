"""ModelSpec: all that placing a model needs to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from verl_shard.common.errors import config_error
from verl_shard.models.meta import Task

Kind = Literal["embedding", "block", "tail", "head"]
Device = TypeVar("Device")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter or a buffer, under one of its names."""

    name: str
    n_elements: int
    n_bytes: int
    is_buffer: bool
    block: int
    """Index into ModelSpec.blocks: the Block whose device must hold it."""
    is_alias: bool
    """A second name of a tensor that is listed before; it takes no memory of its own."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the model that stays on one device: what one step along the chain holds."""

    kind: Kind
    """"embedding": all that feeds the first block and is combined outside of a module, so that it must be together;
    "block": a block; "tail": a module between or after blocks with no matrix, such as a norm; "head": one with."""
    names: tuple[str, ...]
    """Modules (or single tensors) that run at this point of the chain."""
    followers: tuple[str, ...]
    """Modules that run later but hold a weight of this piece, so that they stay on its device: a tied head."""
    weight_bytes: int
    buffer_bytes: int
    n_params: int
    stands_alone: bool
    """Worth a device of its own: a block, or what holds more than a tenth of the mean block. A norm, a dropout, a table
    of rotations and the one row of a reward head are not."""

    @property
    def n_bytes(self) -> int:
        """Bytes of weights and buffers, a tensor with several names counted once, where it is first used."""
        return self.weight_bytes + self.buffer_bytes


@dataclass(frozen=True)
class ModelSpec:
    """A model as a chain of Blocks in order of execution. Frozen and hashable; it holds no tensor and no module."""

    name: str
    """Hub id, folder or class name, for messages."""
    architecture: str
    task: Task
    dtype: str
    """The dtype of the floating-point weights; "mixed" when a given module has several."""
    blocks: tuple[Block, ...]
    order: tuple[str, ...]
    """The names of all pieces, followers included, in order of execution."""
    tensors: tuple[TensorSpec, ...]
    ties: tuple[tuple[str, ...], ...]
    """Groups of parameter names that are one tensor."""
    no_split: tuple[str, ...]
    """Classes whose instances are never divided."""
    sizes_before_quantizing: bool = False
    """True when the configuration asks for quantized weights, whose sizes are known only once they are loaded."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters, a tied one counted once."""
        return sum(block.weight_bytes for block in self.blocks)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers, those that no checkpoint has too."""
        return sum(block.buffer_bytes for block in self.blocks)

    @property
    def n_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return self.weight_bytes + self.buffer_bytes

    @property
    def n_params(self) -> int:
        """Parameters, a tied one counted once."""
        return sum(block.n_params for block in self.blocks)

    @property
    def n_blocks(self) -> int:
        """How many pieces are blocks; 0 for a model in which no list of blocks was found."""
        return sum(block.kind == "block" for block in self.blocks) if self.blocks[0].names != ("",) else 0

    @cached_property
    def head(self) -> str | None:
        """The last module that holds a matrix, tied or not, if it runs after the blocks: where the logits are made."""
        heads = {name for block in self.blocks if block.kind == "head" for name in block.names}
        heads.update(name for block in self.blocks for name in block.followers)
        last_block = max((self.order.index(b.names[-1]) for b in self.blocks if b.kind == "block"), default=-1)
        return next((name for name in reversed(self.order[last_block + 1 :]) if name in heads), None)

    def piece_of(self, tensor: str) -> str:
        """The name in `order` that a tensor belongs to."""
        while tensor and tensor not in self._pieces:
            tensor = tensor.rpartition(".")[0]
        return tensor

    @cached_property
    def _pieces(self) -> frozenset[str]:
        return frozenset(self.order)

    def devices_of(self, device_map: Mapping[str, Device]) -> tuple[Device, ...]:
        """The device of each Block under any map of names to devices, the longest name that matches deciding.

        Raises ConfigError for a map that leaves a piece out or puts one piece on several devices.
        """
        found: list[set[Device]] = [set() for _ in self.blocks]
        for block, devices in zip(self.blocks, found, strict=True):
            devices.update(device_of(device_map, name) for name in block.names if _covered(device_map, name))
        for tensor in self.tensors:
            if not _covered(device_map, tensor.name):
                why = f"it gives no device for {tensor.name}"
                raise config_error("map-incomplete", "device_map", None, why, "Use build_device_map")
            found[tensor.block].add(device_of(device_map, tensor.name))
        for block, devices in zip(self.blocks, found, strict=True):
            if len(devices) != 1:
                at = ", ".join(sorted(map(str, devices))) or "no device"
                names = ", ".join(block.names + block.followers)
                raise config_error(
                    "block-cut", "device_map", None, f"{names} must be on one device, not on {at}", "Put it on one"
                )
        return tuple(device for devices in found for device in devices)

    def loads(self, device_map: Mapping[str, Device]) -> dict[Device, int]:
        """Bytes of weights and buffers on each device of a map that covers every tensor, a tied weight counted once."""
        loads: dict[Device, int] = dict.fromkeys(device_map.values(), 0)
        for tensor in self.tensors:
            if not tensor.is_alias:
                loads[device_of(device_map, tensor.name)] += tensor.n_bytes
        return loads


def device_of(device_map: Mapping[str, Device], name: str) -> Device:
    """The device of the longest key that is `name` or a module above it; KeyError when there is none."""
    key = name
    while key not in device_map:
        if not key:
            raise KeyError(name)
        key = key.rpartition(".")[0]
    return device_map[key]


def _covered(device_map: Mapping[str, Device], name: str) -> bool:
    try:
        device_of(device_map, name)
    except KeyError:
        return False
    return True
