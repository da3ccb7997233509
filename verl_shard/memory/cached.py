"""Traces that were made before: who plans asks for the same pass of the same model many times."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import nn
from transformers import PretrainedConfig

from verl_shard.memory.adapters import with_lora
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import Recording
from verl_shard.memory.run_pass import record
from verl_shard.memory.trace import Trace, alone
from verl_shard.models.spec import ModelSpec

SIZE = 128
"""Traces that are kept, the last used: 0.5 MB each for a model of 28 blocks, 3 of 80."""
ADAPTED = 8
"""Models under adapters that are kept, on meta."""
RECORDINGS = 256
"""Recordings that are kept: 0.5 to 1 MB each for a model of 80 blocks."""
T = TypeVar("T")


class _Kept(Generic[T]):
    """What was last made, by key; size() of them."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable | None, make: Callable[[], T]) -> T:
        """What was made for the key, or is now; None is never kept."""
        if key is None:
            return make()
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = make()
        with self._lock:
            self._made[key] = made
            while len(self._made) > self._size():
                self._made.popitem(last=False)
        return made

    def __len__(self) -> int:
        return len(self._made)

    def forget(self) -> None:
        with self._lock:
            self._made.clear()


_traces: _Kept[Trace] = _Kept(lambda: SIZE)
_adapted: _Kept[tuple[ModelSpec, nn.Module]] = _Kept(lambda: ADAPTED)
_recordings: _Kept[Recording] = _Kept(lambda: RECORDINGS)


def cached_trace(spec: ModelSpec, module: nn.Module, wanted: PassSpec, described: Hashable | None = None) -> Trace:
    """As `trace`: the same Trace for the same spec and pass of an equal module, which is made once. Not to be changed.

    described: description_of(module), for whoever asks often.

    Raises ConfigError when its forward cannot be traced.
    """
    described = description_of(module) if described is None else described
    key = None if described is None else (spec, wanted, described)
    return _traces.get(key, lambda: Trace.of(record(spec, module, alone(wanted)), wanted))


def cached_lora(
    spec: ModelSpec, module: nn.Module, wanted: PassSpec, described: Hashable | None
) -> tuple[ModelSpec, nn.Module]:
    """As `with_lora`, which takes seconds for a model of 80 blocks. Not to be changed."""
    key = None if described is None else (spec, wanted.lora_rank, wanted.gradient_checkpointing, described)
    return _adapted.get(key, lambda: with_lora(spec, module, wanted))


def kept_recording(key: Hashable | None, make: Callable[[], Recording]) -> Recording:
    """The recording that was made for the key, or is made now. Not to be changed. None is no key: it is made each time."""
    return _recordings.get(key, make)


def forget_traces() -> None:
    """Empties the caches."""
    _traces.forget()
    _adapted.forget()
    _recordings.forget()


def description_of(module: nn.Module) -> Hashable | None:
    """What equal modules have in common, or None where there is no telling.

    Modules are equal when their configurations are, and the classes, plain attributes and tensors' names, shapes, dtypes
    and requires_grad of all their submodules: a dropout that was changed afterwards is another module. What no
    configuration describes is traced each time, since its forward may depend on anything.
    """
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
