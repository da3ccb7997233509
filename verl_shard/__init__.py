"""verl_shard: which model goes on which GPU, does it fit, and verl's own trainer run over the answer.

The public names load on first use, so that `import verl_shard` costs nothing and imports neither torch nor verl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl_shard._version import __version__

if TYPE_CHECKING:
    from verl_shard.common.errors import ConfigError as ConfigError
    from verl_shard.common.errors import DoesNotFitError as DoesNotFitError
    from verl_shard.common.errors import Finding as Finding
    from verl_shard.common.errors import MissingExtraError as MissingExtraError
    from verl_shard.common.errors import RunError as RunError
    from verl_shard.common.errors import ShardError as ShardError
    from verl_shard.config.resource_config import load_resource_config as load_resource_config
    from verl_shard.mapping.build import build_device_map as build_device_map
    from verl_shard.mapping.check import check_device_map as check_device_map
    from verl_shard.mapping.device_map import DeviceMap as DeviceMap
    from verl_shard.memory.estimate import MemoryEstimate as MemoryEstimate
    from verl_shard.memory.estimate import estimate_memory as estimate_memory
    from verl_shard.planning.build import build_plan as build_plan
    from verl_shard.planning.plan import Plan as Plan
    from verl_shard.resources.pin import pin_to_device as pin_to_device
    from verl_shard.resources.usage import get_gpu_usage as get_gpu_usage
    from verl_shard.runtime.allocator import ResourceAllocator as ResourceAllocator
    from verl_shard.runtime.load import load_sharded as load_sharded
    from verl_shard.runtime.micro_batches import run_micro_batches as run_micro_batches
    from verl_shard.runtime.offload import offload_model as offload_model
    from verl_shard.runtime.pipeline import dispatch_model as dispatch_model
    from verl_shard.training.hybrid_trainer import HybridTrainer as HybridTrainer
    from verl_shard.training.ppo_trainer import PPOTrainer as PPOTrainer
    from verl_shard.verl_plugin.overrides_plan import to_verl_overrides as to_verl_overrides

_HOME = {
    "build_device_map": "verl_shard.mapping.build",
    "check_device_map": "verl_shard.mapping.check",
    "DeviceMap": "verl_shard.mapping.device_map",
    "estimate_memory": "verl_shard.memory.estimate",
    "MemoryEstimate": "verl_shard.memory.estimate",
    "build_plan": "verl_shard.planning.build",
    "Plan": "verl_shard.planning.plan",
    "to_verl_overrides": "verl_shard.verl_plugin.overrides_plan",
    "load_resource_config": "verl_shard.config.resource_config",
    "get_gpu_usage": "verl_shard.resources.usage",
    "pin_to_device": "verl_shard.resources.pin",
    "load_sharded": "verl_shard.runtime.load",
    "offload_model": "verl_shard.runtime.offload",
    "dispatch_model": "verl_shard.runtime.pipeline",
    "run_micro_batches": "verl_shard.runtime.micro_batches",
    "ResourceAllocator": "verl_shard.runtime.allocator",
    "PPOTrainer": "verl_shard.training.ppo_trainer",
    "HybridTrainer": "verl_shard.training.hybrid_trainer",
    "Finding": "verl_shard.common.errors",
    "ShardError": "verl_shard.common.errors",
    "ConfigError": "verl_shard.common.errors",
    "DoesNotFitError": "verl_shard.common.errors",
    "MissingExtraError": "verl_shard.common.errors",
    "RunError": "verl_shard.common.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'verl_shard' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    from verl_shard.common.collection import no_collection

    with no_collection():
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
