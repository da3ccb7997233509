"""Traces that were made before: who plans asks for the same pass of the same model many times."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from verl_shard.memory.passes import PassSpec
from verl_shard.memory.run_pass import record
from verl_shard.memory.trace import Trace
from verl_shard.models.spec import ModelSpec

SIZE = 32
"""Traces that are kept, the last used: 2 MB each for Qwen2-0.5B, 10 for a model of 80 blocks."""

_lock = threading.Lock()
_kept: OrderedDict[Hashable, Trace] = OrderedDict()


def cached_trace(spec: ModelSpec, module: nn.Module, wanted: PassSpec) -> Trace:
    """As `trace`: the same Trace for the same spec and pass of an equal module, which is made once. Not to be changed.

    Modules are equal when their configurations are, and the classes, plain attributes and tensors' names, shapes, dtypes
    and requires_grad of all their submodules: a dropout that was changed afterwards is another module. What no
    configuration describes is traced each time, since its forward may depend on anything.
    Raises ConfigError when its forward cannot be traced.
    """
    described = _description(module)
    if described is None:
        return Trace.of(record(spec, module, wanted), wanted)
    key = (spec, wanted, described)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    made = Trace.of(record(spec, module, wanted), wanted)
    with _lock:
        _kept[key] = made
        while len(_kept) > SIZE:
            _kept.popitem(last=False)
    return made


def forget_traces() -> None:
    """Empties the cache."""
    with _lock:
        _kept.clear()


def _description(module: nn.Module) -> Hashable | None:
    config: Any = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    # What is chosen after a configuration was read is in no JSON of it.
    chosen = tuple(str(getattr(config, name, None)) for name in ("_attn_implementation", "_experts_implementation"))
    parts = tuple(
        (name, type(part), part.training, _plain(part), _tensors(part)) for name, part in module.named_modules()
    )
    return type(config), config.to_json_string(use_diff=False), chosen, parts


def _plain(module: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple(
        (key, value) for key, value in vars(module).items() if isinstance(value, int | float | bool | str | type(None))
    )


def _tensors(module: nn.Module) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for group in (module._parameters, module._buffers)
        for name, tensor in group.items()
        if tensor is not None
    )
