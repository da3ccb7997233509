"""What was going on when a GPU's memory ran out: in which module, and which tensors were there."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from verl_shard.common.errors import ShardError
from verl_shard.common.units import format_bytes
from verl_shard.memory.estimate import estimate_memory
from verl_shard.models.dtypes import dtype_name
from verl_shard.runtime.ladder import one_line


@dataclass(frozen=True)
class LiveTensor:
    """Tensors of one kind that were alive. owner: the weight's name, "gradient of" it, or nothing for others."""

    owner: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    size: int
    count: int = 1

    def __str__(self) -> str:
        many = f"{self.count} x " if self.count > 1 else ""
        what = self.owner or "a tensor that is no weight"
        return f"{format_bytes(self.size * self.count)}: {many}{list(self.shape)} {self.dtype} on {self.device}, {what}"


@dataclass(frozen=True)
class OutOfMemoryReport:
    """where: role and pass, as the ladder has it. module: the innermost one that was computing, by its name in the model,
    empty outside of the model (in a loss, say). gpus: by id, bytes allocated, reserved and free. planned: what a plan
    expected this pass to need of the fullest GPU, None without a plan. In bytes."""

    where: str
    said: str
    module: str
    largest: tuple[LiveTensor, ...]
    gpus: dict[int, dict[str, int]]
    planned: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """For events.jsonl."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> OutOfMemoryReport:
        """What to_dict gave, also after JSON."""
        largest = tuple(LiveTensor(**{**kind, "shape": tuple(kind["shape"])}) for kind in record["largest"])
        gpus = {int(gpu): dict(sizes) for gpu, sizes in record["gpus"].items()}
        return cls(record["where"], record["said"], record["module"], largest, gpus, record["planned"])

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.said}.", f"Computing: {self.module or 'outside of the model'}."]
        for gpu, sizes in self.gpus.items():
            lines.append(
                f"GPU {gpu}: " + ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items()) + "."
            )
        if self.planned is not None:
            lines.append(f"The plan expected at most {format_bytes(self.planned)} in this pass.")
        if self.largest:
            lines.append("Largest tensors: " + "; ".join(map(str, self.largest)) + ".")
        return "\n".join(lines)


def report_out_of_memory(
    error: BaseException, model: nn.Module, where: str, *, planned: int | None = None, n_largest: int = 5
) -> OutOfMemoryReport:
    """To be called while the error's frames are alive: they hold what is to be counted."""
    gpus = {}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Of those that this process uses: the driver's answer costs a context of half a GiB on any other.
        for gpu in (gpu for gpu in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(gpu)):
            free, _ = torch.cuda.mem_get_info(gpu)
            sizes = torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu), free
            gpus[gpu] = dict(zip(("allocated", "reserved", "free"), sizes, strict=True))
    module = module_of(error.__traceback__, model)
    return OutOfMemoryReport(where, one_line(error), module, tuple(largest_tensors(model, n_largest)), gpus, planned)


def estimated(model: Any, tokens: int, **fields: Any) -> str:
    """What one sequence of so many tokens needs of a GPU, in words. model, fields: as for estimate_memory."""
    try:
        found = estimate_memory(model, batch_size=1, seq_len=tokens, **fields)
    except (ShardError, ValueError, RuntimeError) as error:
        return f"(It could not be estimated: {error})"
    return f"One of {tokens} tokens is estimated to take {format_bytes(found.peak)} of a GPU, the model included."


def on_gpus(model: Any) -> dict[str, Any] | None:
    """The model's device_map without what is off the GPUs, for an estimate; None for one that is on one device."""
    return {
        name: gpu for name, gpu in getattr(model, "hf_device_map", {}).items() if gpu not in ("cpu", "disk")
    } or None


def module_of(traceback: TracebackType | None, model: nn.Module) -> str:
    """The name of the innermost module of the model that is `self` in a frame of the traceback."""
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
    found = ""
    while traceback is not None:
        own = traceback.tb_frame.f_locals.get("self")
        found = names.get(id(own), found) if isinstance(own, nn.Module) else found
        traceback = traceback.tb_next
    return found


def largest_tensors(model: nn.Module, n: int) -> list[LiveTensor]:
    """Live tensors on the model's devices, those of one shape and owner together, the largest first. Views count once."""
    devices = {parameter.device for parameter in model.parameters()}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        owners[parameter.data_ptr()] = name
        if parameter.grad is not None:
            owners[parameter.grad.data_ptr()] = f"gradient of {name}"
    seen: set[int] = set()
    counted: dict[LiveTensor, int] = defaultdict(int)
    for item in gc.get_objects():
        try:
            # By its type: asking some objects for their class runs their code.
            if not issubclass(type(item), torch.Tensor) or item.device not in devices:
                continue
            storage = item.untyped_storage()
            # Of the storage: a fake tensor says that it is on a GPU, takes nothing there, and complains when asked where.
            if storage.device.type == "meta":
                continue
            key = storage.data_ptr()
            if key in seen or not storage.nbytes():
                continue
        except (ReferenceError, RuntimeError, NotImplementedError):  # weak proxies, and tensors without a storage
            continue
        seen.add(key)
        owner = owners.get(item.data_ptr(), "")
        kind = LiveTensor(owner, tuple(item.shape), dtype_name(item.dtype), str(item.device), storage.nbytes())
        counted[kind] += 1
    kinds = [LiveTensor(k.owner, k.shape, k.dtype, k.device, k.size, count) for k, count in counted.items()]
    return sorted(kinds, key=lambda kind: -kind.size * kind.count)[:n]
