"""What the GPUs of this machine are doing, and who uses them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import GIB, format_bytes
from verl_shard.config.device_ids import parse_device_ids
from verl_shard.resources.leases import Owner, owners
from verl_shard.resources.nvml import asked, nvml
from verl_shard.resources.visible import visible_uuids

SCHEMA = "verl_shard/gpus/1"
_UNSEEN = 3 * GIB // 2
"""Used memory beyond that of the processes that are seen, from which somebody unseen is meant; the driver has 0.5 GiB or so."""
_LONGEST = 200


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU. memory: bytes, None where the driver does not say; user and command too, for a
    process of another container."""

    pid: int
    memory: int | None
    user: str | None
    command: str | None

    @property
    def words(self) -> str:
        """For people."""
        size = "" if self.memory is None else f", {format_bytes(self.memory)}"
        who = f" of {self.user}" if self.user else ""
        return f"pid {self.pid}{who} ({self.command or 'in another container'}{size})"


@dataclass(frozen=True)
class GpuUsage:
    """One GPU now. id: as torch counts it in this process, None where it is hidden from it. index: as nvidia-smi counts it.

    total, used, free: bytes. utilization: percent of the last second or so in which it computed. temperature: Celsius. None:
    the driver does not say. leased_by: the run that has a lease on it.
    """

    id: int | None
    index: int
    uuid: str
    name: str
    total: int
    used: int
    free: int
    utilization: int | None
    temperature: int | None
    processes: tuple[GpuProcess, ...]
    leased_by: Owner | None = None


def get_gpu_usage(device_ids: Iterable[int] | str | int | None = None) -> list[GpuUsage]:
    """What each GPU of this machine is doing: memory, utilisation, temperature, and the processes on it.

    device_ids: those only, as torch counts them; 2 is GPU 2. By default all of the machine, those that torch does not see
    in this process too. Nothing is started on a GPU. Raises ConfigError without a driver, and for ids that are not there.
    """
    wanted = None if device_ids is None else read_ids(device_ids)
    with nvml() as module:
        handles = [module.nvmlDeviceGetHandleByIndex(index) for index in range(module.nvmlDeviceGetCount())]
        uuids = [_text(module.nvmlDeviceGetUUID(handle)) for handle in handles]
        names = [_text(module.nvmlDeviceGetName(handle)) for handle in handles]
        seen = {uuid: ordinal for ordinal, uuid in enumerate(visible_uuids(uuids, names))}
        if wanted is not None:
            _check_ids(wanted, len(seen))
        leased = owners()
        found = [
            _reading(module, handle, index, uuid, name, seen.get(uuid), leased.get(uuid))
            for index, (handle, uuid, name) in enumerate(zip(handles, uuids, names, strict=True))
            if wanted is None or seen.get(uuid) in wanted
        ]
    return found if wanted is None else sorted(found, key=lambda gpu: wanted.index(gpu.id))


def read_ids(device_ids: Iterable[int] | str | int) -> tuple[int, ...]:
    """Ids as people write them; a number by itself is one GPU. Raises ConfigError for what names none."""
    try:
        given = device_ids if isinstance(device_ids, str | int) else list(device_ids)
        ids = parse_device_ids([given] if isinstance(given, int) else given)
    except (ValueError, TypeError) as error:
        raise ConfigError(_fault("device-ids", "device_ids", device_ids, "they name no GPU", str(error))) from None
    assert isinstance(ids, tuple), "a list or a text gives ids"
    if not ids or len(set(ids)) != len(ids):
        why = "one is named twice" if ids else "no GPU is named"
        raise ConfigError(_fault("device-ids", "device_ids", device_ids, why, "Name each GPU once"))
    return ids


def gpu_uuids(device_ids: Sequence[int]) -> dict[int, str]:
    """The UUIDs of GPUs by torch's ids. Raises ConfigError as get_gpu_usage does."""
    return {gpu.id: gpu.uuid for gpu in get_gpu_usage(device_ids) if gpu.id is not None}


def busy(gpus: Iterable[GpuUsage]) -> Iterator[Finding]:
    """A finding for each GPU that somebody else uses: this process, its children and those that started it are not."""
    family = _family()
    for gpu in gpus:
        others = [process for process in gpu.processes if process.pid not in family]
        counted = sum(process.memory or 0 for process in gpu.processes)
        said = [process.words for process in others]
        if not gpu.processes and gpu.used - counted > _UNSEEN:
            said.append(
                f"{format_bytes(gpu.used)} of it are used by what cannot be seen from here, such as another container"
            )
        if (
            gpu.leased_by is not None
            and gpu.leased_by.pid not in family
            and gpu.leased_by.pid not in [p.pid for p in others]
        ):
            said.append(f"leased by {gpu.leased_by.words}")
        if said:
            label = f"GPU {gpu.index if gpu.id is None else gpu.id}"
            yield _fault(
                "gpu-busy", label, gpu.name, "; ".join(said), "Name another GPU, or wait, or end what runs there"
            )


def check_idle(device_ids: Iterable[int] | str | int) -> list[GpuUsage]:
    """The GPUs, when nobody else uses them. Raises ConfigError that says of each who does: pid, user, command, memory."""
    gpus = get_gpu_usage(device_ids)
    if faults := list(busy(gpus)):
        raise ConfigError(faults)
    return gpus


def to_dict(gpus: Sequence[GpuUsage]) -> dict[str, Any]:
    """JSON-ready, opening with the schema."""
    return {"schema": SCHEMA, "gpus": [asdict(gpu) for gpu in gpus]}


def _reading(
    module: Any, handle: Any, index: int, uuid: str, name: str, ordinal: int | None, leased_by: Owner | None
) -> GpuUsage:
    memory = module.nvmlDeviceGetMemoryInfo(handle)
    rates = asked(module, lambda: module.nvmlDeviceGetUtilizationRates(handle))
    heat = asked(module, lambda: module.nvmlDeviceGetTemperature(handle, module.NVML_TEMPERATURE_GPU))
    listed = [
        process
        for ask in (module.nvmlDeviceGetComputeRunningProcesses, module.nvmlDeviceGetGraphicsRunningProcesses)
        for process in asked(module, lambda ask=ask: ask(handle)) or ()  # type: ignore[misc]
    ]
    return GpuUsage(
        id=ordinal,
        index=index,
        uuid=uuid,
        name=name,
        total=int(memory.total),
        used=int(memory.used),
        free=int(memory.free),
        utilization=None if rates is None else int(rates.gpu),
        temperature=None if heat is None else int(heat),
        processes=tuple(_process(pid, size) for pid, size in sorted({p.pid: p.usedGpuMemory for p in listed}.items())),
        leased_by=leased_by,
    )


def _process(pid: int, memory: int | None) -> GpuProcess:
    # The driver writes "not available" as the largest number there is.
    size = None if memory is None or memory >= 1 << 62 else int(memory)
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return GpuProcess(pid, size, process.username(), " ".join(process.cmdline())[:_LONGEST] or process.name())
    except psutil.Error:
        return GpuProcess(pid, size, None, None)


def _family() -> set[int]:
    me = psutil.Process(os.getpid())
    return {me.pid, *(process.pid for process in (*me.parents(), *me.children(recursive=True)))}


def _check_ids(ids: Sequence[int], there: int) -> None:
    if beyond := [id for id in ids if id >= there or id < 0]:
        why = f"this process sees {there} GPUs" + (f", 0 to {there - 1}" if there else "")
        fix = "Name GPUs that there are" if there else "Look at CUDA_VISIBLE_DEVICES"
        raise ConfigError(_fault("no-such-gpu", "device_ids", ", ".join(map(str, beyond)), why, fix))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(given), why, fix)
