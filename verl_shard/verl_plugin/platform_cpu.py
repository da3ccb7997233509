"""A CPU as a verl platform: what verl asks of an accelerator, answered by the host.

Registered under "cpu" and chosen by `VERL_PLATFORM=cpu`. verl's trainer then runs on a machine without any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_shard.resources.limits import host_memory


class _CpuModule:
    """`torch.cpu`, with the functions of `torch.cuda` that verl calls without asking whether they are there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def __eq__(self, other: object) -> bool:
        # verl's memory logger asks `get_torch_device() == torch.cpu`.
        return other is torch.cpu or isinstance(other, _CpuModule)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[_CpuModule], tuple[()]]:
        return _CpuModule, ()

    @staticmethod
    def _no_bytes(*_args: Any, **_kwargs: Any) -> int:
        return 0

    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = _no_bytes
    reset_peak_memory_stats = empty_cache = ipc_collect = set_per_process_memory_fraction = _no_bytes

    @staticmethod
    def mem_get_info(*_args: Any) -> tuple[int, int]:
        memory = host_memory()
        return memory.available, memory.total

    @staticmethod
    def get_device_name(*_args: Any) -> str:
        return "cpu"

    @staticmethod
    def get_rng_state(*_args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_args: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl's platform interface on the host; see `PlatformBase` for what each method is for."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _CpuModule()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        # verl hands this to `tensor.to(...)`, where an int would mean a GPU.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        del device_index

    def synchronize(self, device_index: Any = None) -> None:
        del device_index

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: Any) -> None:
        del settings

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        del device_index
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        del msg
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl's ResourcePoolManager counts only resources named GPU or NPU, so a CPU run gives Ray one GPU by name.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
