"""The CPU as a platform of verl's."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import psutil
import pytest
import torch
from verl.plugin.platform import PlatformBase, get_platform
from verl.utils.device import get_device_id, get_device_name, get_torch_device

from verl_shard.resources import limits
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
    assert 0 < free <= total <= psutil.virtual_memory().total


def test_its_memory_is_what_a_container_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, group = tmp_path / "own", tmp_path / "groups" / "box"
    own.write_text("0::/box\n")
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{64 * 2**20}\n")
    (group / "memory.current").write_text(f"{48 * 2**20}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {2**20}\n")
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "OWN", own)
    assert get_torch_device().mem_get_info() == (17 * 2**20, 64 * 2**20)


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
