"""The CPU as a platform of verl's."""

from __future__ import annotations

import inspect
import pickle

import psutil
import torch
from verl.plugin.platform import PlatformBase, get_platform
from verl.utils.device import get_device_id, get_device_name, get_torch_device

from verl_shard.verl_plugin.platform_cpu import PlatformCPU


def test_every_method_that_verl_asks_for_is_there() -> None:
    abstract = {
        name for name, member in inspect.getmembers(PlatformBase) if getattr(member, "__isabstractmethod__", False)
    }
    assert abstract
    assert not PlatformCPU.__abstractmethods__
    PlatformCPU()


def test_verl_is_on_the_cpu() -> None:
    assert isinstance(get_platform(), PlatformCPU)
    assert get_device_name() == "cpu"
    assert torch.ones(2).to(get_device_id()).device.type == "cpu"
    assert get_platform().is_available()
    assert get_platform().device_count() == 1


def test_the_device_module_passes_for_torch_cpu_and_has_what_cuda_has() -> None:
    module = get_torch_device()
    assert module == torch.cpu
    assert module != torch.cuda
    assert pickle.loads(pickle.dumps(module)) == torch.cpu
    assert module.is_available()
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(module, name)() == 0
    module.empty_cache()
    module.reset_peak_memory_stats(0)
    free, total = module.mem_get_info()
    assert 0 < free <= total == psutil.virtual_memory().total


def test_random_states_are_the_hosts() -> None:
    module = get_torch_device()
    get_platform().manual_seed(5)
    state = module.get_rng_state()
    first = torch.rand(4)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    get_platform().manual_seed_all(5)
    assert torch.equal(torch.rand(4), first)


def test_seconds_are_marked_and_profiled_by_nobody() -> None:
    with get_platform().nvtx_range("step"):
        pass
    get_platform().synchronize()
    get_platform().set_device(0)
    assert get_platform().communication_backend_name() == "gloo"
    assert get_platform().ray_resource_name() == "GPU"
    assert get_platform().get_device_capability() == (None, None)
