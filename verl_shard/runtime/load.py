"""load_sharded: one call from a name to a model that is where its map says, computing as was asked."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.errors import ConfigError, DoesNotFitError, config_error
from verl_shard.common.notices import notice
from verl_shard.config.roles import Offload
from verl_shard.mapping.build import build_device_map
from verl_shard.mapping.check import check_device_map
from verl_shard.mapping.devices import DeviceId, parse_device
from verl_shard.models.dtypes import dtype_name, parse_dtype
from verl_shard.models.meta import auto_class, config_for, parse_task, task_of
from verl_shard.models.read import spec_of_config
from verl_shard.models.source import HUB_KEYS, read_config
from verl_shard.models.spec import ModelSpec
from verl_shard.runtime.attention import FLASH, choose_attention
from verl_shard.runtime.load_options import split_options
from verl_shard.runtime.offload_choice import check_stream_options
from verl_shard.runtime.pipeline import dispatch_model
from verl_shard.runtime.verify import check_checkpointing, check_placement

_log = logging.getLogger(__name__)


def load_sharded(
    pretrained_model_name_or_path: str | os.PathLike[str],
    device_map: str | int | torch.device | Mapping[str, Any] = "balanced",
    *,
    task: str | None = None,
    dtype: str | torch.dtype = "bfloat16",
    attn_implementation: str | None = FLASH,
    gradient_checkpointing: bool = False,
    max_memory: Mapping[Any, int | str] | None = None,
    devices: Iterable[object] | str | None = None,
    strict: bool = False,
    offload: Offload = "none",
    embeddings_on_host: bool = False,
    pin_limit: int | str | None = None,
    autocast_dtype: str | torch.dtype | None = None,
    config: PretrainedConfig | None = None,
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> Any:
    """A transformers model, loaded from a hub id or a folder onto the devices of a map, and checked to be there.

    device_map: "balanced" makes the map with build_device_map over `devices` (by default all GPUs torch sees), within
        `max_memory`; a DeviceMap or a dict is checked with check_device_map first; 0, "cuda:0" or "cpu" is that one
        device. On a machine without a GPU "balanced" is the CPU, which a notice says.
    task: "causal-lm", "reward" (a sequence classifier with one label), "process-reward" or "value" (a token classifier,
        with one label for "value"); by default what the architecture says. A checkpoint without a value head gets a
        new, random one; so does "reward", and a notice says it.
    dtype: of the weights: "bfloat16" or "bf16", "float16", "float32", or a torch.dtype.
    attn_implementation: "flash_attention_2" by default. If it cannot run, sdpa (or eager) is used and one notice says
        why. None asks for sdpa where the architecture has it, without a notice.
    gradient_checkpointing: turns it on, non-reentrant, and checks that it is on. It acts in model.train() only: the
        model comes back in eval mode, as from from_pretrained.
    max_memory, devices: as for build_device_map; with "balanced" only.
    strict: raise ConfigError wherever a notice would say that something else is used.
    offload: nothing is offloaded, unless this says so of a model that only scores: its weights stay in host memory as
        offload_model does it, the map says where it computes, and no GPU ever holds all of its share. Whoever scores
        several batches in a row gives back what waits for the next with offload_of(model).release().
    embeddings_on_host, pin_limit: with an offload that streams, as for offload_model.
    autocast_dtype: what forward passes will be autocast to; lets fp32 weights use flash attention.
    config: a configuration to use instead of the one at the path; it is copied, not changed.
    trust_remote_code: let code that comes with the model run, as from_pretrained does.
    model_kwargs: keywords of from_pretrained, such as revision or quantization_config, and fields of the configuration
        to set. Any other is refused.

    The model's hf_device_map is set, also when it is on one device. Over several it is laid out as dispatch_model does
    it: outputs stay where they are made, and micro-batches overlap (run_micro_batches).
    Raises ConfigError before any weight is read for what cannot be meant or cannot load, DoesNotFitError for a GPU that
    is too small, RunError when the loaded model is not what was asked for.
    """
    wanted = parse_task(task)
    weights_dtype = parse_dtype(dtype)
    autocast = None if autocast_dtype is None else parse_dtype(autocast_dtype, "autocast_dtype")
    name = os.fspath(pretrained_model_name_or_path)
    hub = {key: model_kwargs[key] for key in HUB_KEYS if key in model_kwargs}
    found = read_config(name, trust_remote_code=trust_remote_code, **hub) if config is None else config
    chosen_task = wanted or task_of(found)
    made = config_for(found, chosen_task)
    options, fields = split_options(model_kwargs, made)
    for key, value in fields.items():
        setattr(made, key, value)

    spec, on_meta = spec_of_config(
        made, name=name, task=chosen_task, dtype=weights_dtype, trust_remote_code=trust_remote_code
    )
    placed = _resolve_map(spec, device_map, devices, max_memory, strict)
    attention = choose_attention(
        attn_implementation,
        made,
        dtype=weights_dtype,
        autocast_dtype=autocast,
        devices=set(placed.values()),
        model_class=type(on_meta),
        strict=strict,
    )
    if gradient_checkpointing and not getattr(on_meta, "supports_gradient_checkpointing", False):
        why = f"{spec.architecture} does not support it"
        raise config_error("no-checkpointing", "gradient_checkpointing", True, why, "Leave it out")
    if offload != "none" and gradient_checkpointing:
        why = "it is for training, and weights kept in host memory are not trained"
        raise config_error("offloaded-and-trainable", "offload", offload, why, "Leave one of them out")
    check_stream_options(offload, embeddings_on_host, pin_limit)
    if embeddings_on_host:
        from verl_shard.runtime.stream_model import host_embedding

        host_embedding(on_meta)  # a head that is tied to it is said before any weight is read
    del on_meta

    cls = auto_class(made, chosen_task)
    arguments = {
        "config": made,
        "device_map": dict(placed) if offload == "none" else {"": "cpu"},
        "dtype": weights_dtype,
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
        **options,
    }
    model, missing = _read_weights(cls, spec, arguments)
    _check_missing(spec, missing, strict)
    if offload == "none":
        check_placement(model, placed)
        if len(set(placed.values())) > 1:  # in the place of accelerate's hooks, under which one GPU works at a time
            dispatch_model(model, placed)
    else:
        from verl_shard.planning.layout import buffers_of
        from verl_shard.runtime.offload import offload_model

        check_placement(model, {"": "cpu"})
        # Batches follow each other: the next one's first blocks are copied while this one's head computes.
        model = offload_model(
            model.requires_grad_(False), placed, offload=offload, ahead=buffers_of(spec), prefetch=True,
            embeddings_on_host=embeddings_on_host, pin_limit=pin_limit,
        )  # fmt: skip
    model.hf_device_map = dict(placed)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        check_checkpointing(model)
    _log.info("%s as %s on %s, attention %s", name, dtype_name(weights_dtype), set(placed.values()), attention)
    return model


def _resolve_map(
    spec: ModelSpec,
    device_map: str | int | torch.device | Mapping[str, Any],
    devices: Iterable[object] | str | None,
    max_memory: Mapping[Any, int | str] | None,
    strict: bool,
) -> Mapping[str, DeviceId]:
    """The map to load with: made or checked, and every device of it there."""
    if isinstance(device_map, str) and device_map in ("auto", "balanced_low_0", "sequential"):
        why = "it belongs to accelerate, which may leave GPUs empty and offload in silence"
        raise config_error("foreign-map", "device_map", device_map, why, 'Write "balanced"')
    if isinstance(device_map, str) and device_map == "balanced":
        placed = _balanced(spec, devices, max_memory, strict)
    else:
        if devices is not None or max_memory:
            given = "devices" if devices is not None else "max_memory"
            why = f"the device map {_shown(device_map)} says already what goes where"
            fix = 'Leave it out, or write device_map="balanced"'
            raise config_error("map-and-" + given, given, devices if given == "devices" else max_memory, why, fix)
        placed = device_map if isinstance(device_map, Mapping) else {"": _one_device(device_map)}
        findings = check_device_map(spec, placed)
        if faults := [f for f in findings if f.level == "error" or f.code == "offloaded"]:
            raise ConfigError(faults)
        for finding in findings:
            _log.warning("%s", finding)
        placed = {name: parse_device(device) for name, device in placed.items()}
    n_there = torch.cuda.device_count()
    absent = sorted({device for device in placed.values() if isinstance(device, int) and device >= n_there})
    if absent:
        why = f"it names GPU {', '.join(map(str, absent))}, and torch sees {n_there} GPUs here"
        have = f"the GPUs 0 to {n_there - 1}" if n_there else 'device_map="cpu", or a machine with GPUs'
        raise config_error("device-missing", "device_map", _shown(device_map), why, f"Use {have}")
    return placed


def _balanced(
    spec: ModelSpec, devices: Iterable[object] | str | None, max_memory: Mapping[Any, int | str] | None, strict: bool
) -> Mapping[str, DeviceId]:
    if devices is None and torch.cuda.device_count() == 0:
        why = "torch sees no GPU here" + (", so that max_memory limits nothing" if max_memory else "")
        if strict:
            raise config_error("no-gpu", "device_map", "balanced", why, 'Write device_map="cpu", or leave strict out')
        notice("no-gpu", "device_map", "balanced", why, "the CPU")
        return {"": "cpu"}
    return build_device_map(spec, devices=devices, max_memory=max_memory)


def _one_device(device: object) -> DeviceId:
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.cuda.current_device()
    try:
        return parse_device(device, "device_map")
    except ConfigError as error:
        fix = 'Write "balanced", a map of names to devices, or one device such as 0, "cuda:0" or "cpu"'
        raise config_error("not-a-device-map", "device_map", device, "not a device map", fix) from error


def _shown(device_map: object) -> str:
    return f"of {len(device_map)} names" if isinstance(device_map, Mapping) else str(device_map)


def _read_weights(cls: Any, spec: ModelSpec, arguments: dict[str, Any]) -> tuple[Any, list[str]]:
    """The model, and the names of the weights that the checkpoint does not have."""
    fix = "Check that the folder holds the weights of this very model, whole"
    try:
        with warnings.catch_warnings():
            # A divided module's own tensor has a key in our maps; accelerate looks for modules only.
            warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules", UserWarning)
            model, info = cls.from_pretrained(spec.name, output_loading_info=True, **arguments)
    except torch.cuda.OutOfMemoryError as error:
        loads = ", ".join(f"{device}: {size} bytes" for device, size in spec.loads(arguments["device_map"]).items())
        raise DoesNotFitError(f"{spec.name} did not fit while it was loaded ({loads} by device): {error}") from error
    except (OSError, SafetensorError) as error:
        raise config_error("no-weights", "model", spec.name, _first_line(error), fix) from error
    except (ValueError, RuntimeError) as error:
        raise config_error("not-loadable", "model", spec.name, _first_line(error), fix) from error
    assert isinstance(model, nn.Module)
    return model, sorted(info["missing_keys"])


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400].rstrip(". ")


def _check_missing(spec: ModelSpec, missing: list[str], strict: bool) -> None:
    """A head that the checkpoint lacks is new and random: right for a value model, said of others. No more may lack."""
    after = {name for block in spec.blocks if block.kind in ("head", "tail") for name in block.names}
    heads = [
        name for name in missing if spec.piece_of(name) in after and spec.task in ("reward", "process-reward", "value")
    ]
    lost = [name for name in missing if name not in heads]
    if lost:
        why = f"its weights lack {', '.join(lost[:5])}{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}"
        fix = "Give a checkpoint that has them; they would be random"
        raise config_error("weights-missing", "model", spec.name, why, fix)
    if heads and spec.task == "value":
        _log.info("%s: new weights for %s", spec.name, ", ".join(heads))
    elif heads:
        why = f"its weights lack the {spec.task} head ({', '.join(heads)})"
        if strict:
            fix = f"Give a checkpoint with a {spec.task} head, or leave strict out"
            raise config_error("no-head", "model", spec.name, why, fix)
        notice("no-head", "model", spec.name, why, "a new head with random weights, whose scores mean nothing yet")
