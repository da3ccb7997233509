"""A reference with a whole copy of its module on each of several GPUs: a batch is divided over them, and all work at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.units import format_bytes
from verl_shard.mapping.devices import DeviceId, device_label, torch_device
from verl_shard.models.devices import parse_device
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.ladder import give_memory_back
from verl_shard.runtime.offload import several_calls
from verl_shard.runtime.pipeline_links import GpuLinks, Links
from verl_shard.runtime.relocate import move_model
from verl_shard.verl_plugin.engine_batches import MicroBatches
from verl_shard.verl_plugin.engine_inputs import on_host
from verl_shard.verl_plugin.engine_pieces import InPieces

Load = Callable[[Mapping[str, DeviceId]], nn.Module]
"""Loads the engine's model once more, by a device map."""


class Copy:
    """The engine as the micro-batches of one copy see it: with that copy for its module, and no process beside this one, as
    copies wait for nobody. One that runs out of memory goes on by itself in smaller pieces."""

    averager = None

    def __init__(self, engine: Any, device: DeviceId, module: nn.Module) -> None:
        self._engine, self.device, self.module = engine, device, module
        self.batches = MicroBatches(self)
        self.pieces = _Pieces(self, forward_only=True)
        self.pieces.ladder.where = f"{self.pieces.phase} on {device_label(device)}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def get_data_parallel_size(self) -> int:
        """Of the processes that work on a copy's share."""
        return 1

    def get_data_parallel_group(self) -> None:
        """None: it communicates with nobody."""

    def in_flight(self, *, forward_only: bool) -> int:
        """As the engine's."""
        return self.batches.window_of(forward_only=forward_only).most

    def work(self, data: TensorDict, rows: Sequence[int], n_calls: int | None, logits: float) -> Any:
        """What verl's engines make of a share of a batch, on the host. rows: where it is in the batch, for messages."""

        def run(cut: TensorDict) -> Any:
            with several_calls(self.module, each=n_calls if cut is data else None):
                return self.batches.run(cut, None, forward_only=True)

        def at() -> Mapping[str, Any]:
            seen = self.batches.at
            return {**seen, "rows": [rows[row] for row in seen.get("rows", ())]}

        device = input_device(self.module)
        # Some kernels start on the thread's own GPU, wherever their tensors are.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            made = self.pieces.run(run, data, at, logits=logits)
            return {**made, "model_output": {name: _fetched(value) for name, value in made["model_output"].items()}}


class _Pieces(InPieces):
    def foresee(self, data: TensorDict, logits: float) -> None:
        """Has the passes traced that the allocator will ask for: what traces does so for the process, and not for a thread."""
        if self.allocator is not None and self.allocator.free():
            self._lengths = sorted(data["input_ids"].offsets().diff().tolist(), reverse=True)
            self._packed = bool(tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True))
            self._logits = logits
            self._needed(self.asked(data))


class Copies:
    """The copies of an engine's module. The engine's own module is the first of them."""

    def __init__(self, engine: Any, modules: Mapping[DeviceId, nn.Module]) -> None:
        self._engine = engine
        self.each = [Copy(engine, device, module) for device, module in modules.items()]
        for copy in self.each:
            copy.module.eval()

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Where they are."""
        return tuple(copy.device for copy in self.each)

    @property
    def remedies(self) -> int:
        """Those that the copy with the least memory has taken."""
        return max(copy.pieces.ladder.taken for copy in self.each)

    def run(self, data: TensorDict, loss_function: Any) -> dict[str, Any]:
        """What forward_backward_batch gives of a batch: no row is lost, and all are in their order. On the host.

        Raises what a copy raises, once all have ended; of several errors one that is not of memory.
        """
        assert loss_function is None, "a reference is asked for log-probabilities, and for no loss"
        data = on_host(data)
        shares = divide(data, len(self.each))
        jobs = []
        for copy, (rows, part, n_calls) in zip(self.each, shares, strict=False):
            logits = copy.batches.share_of_logits(part, None)
            copy.pieces.foresee(part, logits)
            jobs.append((copy, part, rows, n_calls, logits))
        if len(jobs) == 1:
            made = [jobs[0][0].work(*jobs[0][1:])]
        else:
            with ThreadPoolExecutor(len(jobs), thread_name_prefix="verl_shard_copy") as pool:
                running = [pool.submit(copy.work, *job) for copy, *job in jobs]
            errors = [error for one in running if (error := one.exception()) is not None]
            if errors:
                raise min(errors, key=lambda error: isinstance(error, DoesNotFitError))
            made = [one.result() for one in running]
        return _together(made, [rows for rows, _, _ in shares], len(data))


def copies_asked(planned: Mapping[str, Any], engine_config: Any) -> tuple[DeviceId, ...] | None:
    """Where a role is to have copies, by its entry in a plan, else by the engine's configuration; None for one module."""
    asked = planned.get("copies_on")
    if asked is None and (planned.get("settings") or {}).get("strategy") == "data_parallel":
        asked = planned.get("devices")
    if asked is None and not planned:
        asked = engine_config.copies_on
    return tuple(parse_device(device, "copies_on") for device in asked) if asked else None


def load_copies(engine: Any, load: Load, devices: Sequence[DeviceId]) -> Copies:
    """The engine's module, which is on the first of the devices, and one more on each of the others."""
    first, *others = devices
    return Copies(engine, {first: engine.module, **{device: load({"": device}) for device in others}})


def lay_out_copies(engine: Any, load: Load, devices: Sequence[DeviceId], links: Links | None) -> Copies:
    """Copies on these devices, of whatever the engine has now: those that are where they should be stay, others move, and
    what is missing is loaded. Raises DoesNotFitError before anything changes. links: for tests."""
    there = {copy.device: copy.module for copy in engine.copies.each} if engine.copies else _whole(engine.module)
    kept = {device: there.pop(device) for device in devices if device in there}
    absent, spare = [device for device in devices if device not in kept], list(there.values())
    if links is None:  # the first that moves is looked at by move_model
        _check_room(engine.module, absent[1:] if spare else absent)
    loaded: dict[DeviceId, nn.Module] = {}
    # What can fail comes first: then all is what it was.
    for device in absent[len(spare) :]:
        loaded[device] = load({"": device})
        if links is not None:
            move_model(loaded[device], {"": device}, links=links)
    for device, module in zip(absent, spare, strict=False):
        move_model(module, {"": device}, links=links)
        kept[device] = module
    return Copies(engine, {device: {**kept, **loaded}[device] for device in devices})


def join_copies(engine: Any, load: Load, device_map: Mapping[str, Any], links: Links | None) -> nn.Module:
    """One module again, laid over a map; the others are dropped first, as they may be where it goes. Where that fails they are
    loaded anew, and all is what it was. Raises as move_model. links: for tests."""
    copies, going = engine.copies, {parse_device(device) for device in device_map.values()}
    devices = copies.devices
    kept = next((copy for copy in copies.each if copy.device in going), copies.each[0])
    module: nn.Module = kept.module
    copies.each = [kept]
    _own(engine, module)
    give_memory_back()
    try:
        move_model(module, device_map, links=links)
    except BaseException:
        again = {device: module if device == kept.device else load({"": device}) for device in devices}
        engine.copies = Copies(engine, again)
        _own(engine, engine.copies.each[0].module)
        raise
    return module


def take_copies(engine: Any, copies: Copies | None, module: nn.Module) -> None:
    """Has the engine work with these from now on, and gives back what others held."""
    engine.copies = copies
    _own(engine, module)
    give_memory_back()


def _own(engine: Any, module: nn.Module) -> None:
    engine.module = engine.checkpoint_manager.model = module


def _whole(module: nn.Module) -> dict[DeviceId | None, nn.Module]:
    """A module by the one device that it is on; by None where it is laid over several."""
    applied: Any = module.hf_device_map
    devices = {parse_device(device) for device in applied.values()}
    return {devices.pop() if len(devices) == 1 else None: module}


def _check_room(module: nn.Module, devices: Sequence[DeviceId]) -> None:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    short = []
    for device in devices:
        room = GpuLinks().room(torch_device(device))
        if room is not None and room < needed:
            short.append(f"{device_label(device)} has {format_bytes(room)} free for {format_bytes(needed)} of a copy")
    if short:
        raise DoesNotFitError(
            f"{type(module).__name__} cannot be copied: {'; '.join(short)}. Name other GPUs, or move something else away first."
        )


Share = tuple[list[int], TensorDict, int | None]
"""Rows of a batch, what is in them, and how many micro-batches they are where that is known before they are cut."""


def divide(data: TensorDict, n: int) -> list[Share]:
    """A batch in at most n shares of about as much work each, cut by verl's keys as the batch itself is.

    Where tokens decide it, sequences (groups of them, where those stay together) are divided. Where a number does, whole
    micro-batches are, each as one copy alone would have it; with fewer of them than copies they are made smaller.
    """
    lengths: torch.Tensor = data["input_ids"].offsets().diff()
    group = tu.get_non_tensor_data(data=data, key="force_group_size", default=1)
    groups = len(data) // group
    size = None
    if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        asked = int(data["micro_batch_size_per_gpu"])
        most = asked if groups >= n * asked else math.ceil(groups / n)
        size = next(s for s in range(most, 0, -1) if groups % s == 0)
    width = group * (size or 1)
    work = calculate_workload(lengths.long()).view(-1, width).sum(1).tolist()
    shares: list[Share] = []
    for units in get_seqlen_balanced_partitions(work, min(n, len(work)), equal_size=False):
        rows = [row for unit in units for row in range(unit * width, (unit + 1) * width)]
        part = tu.index_select_tensor_dict(data, rows)
        if size is not None:
            tu.assign_non_tensor(part, micro_batch_size_per_gpu=size)
        shares.append((rows, part, None if size is None else len(units)))
    return shares


def _fetched(value: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a nested tensor, on the host."""
    ends: torch.Tensor = value.offsets()  # type: ignore[attr-defined]
    return list(torch.split(value.values().cpu(), ends.diff().tolist()))


def _together(made: Sequence[Any], rows: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """verl's output of a whole batch from those of its shares."""
    outputs: dict[str, torch.Tensor] = {}
    for name in made[0]["model_output"]:
        whole: list[Any] = [None] * n
        for one, own in zip(made, rows, strict=True):
            for row, value in zip(own, one["model_output"][name], strict=True):
                whole[row] = value
        outputs[name] = torch.nested.as_nested_tensor(whole, layout=torch.jagged)
    return {"model_output": outputs, "loss": [loss for one in made for loss in one["loss"]], "metrics": {}}
