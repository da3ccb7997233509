"""A resource config in the local runner: our strategies for what it names of verl's, each said once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.notices import notice
from verl_shard.config.device_ids import show_ids
from verl_shard.config.resource_rules import ENGINES, SHARDED, faults_of, gpus_of
from verl_shard.config.roles import TRAINED, ResourceConfig, Role, RoleConfig

_ENGINE_FIELDS = ("vllm_args", "tensor_parallel_size", "gpu_memory_utilization")
_SHARDED_FIELDS = ("param_offload", "optimizer_offload", "offload_policy")
_ELSEWHERE = {
    "model": "give it as {role}_model",
    "optimizer": "the local runner trains with adamw; leave it out",
    "gradient_checkpointing": "write use_gradient_checkpointing=True",
    "micro_batch_size": "write ppo_config['micro_batch_size']",
    "in_flight": "leave it out: as many as keep all GPUs of a role at work, as memory holds them",
    "lora_rank": "write ppo_config['lora_rank']",
    "logits": "leave it out: those of responses are made, and log-probabilities taken in chunks",
}
"""Fields that PPOTrainer takes in another argument."""
_REWARD_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def for_local(config: ResourceConfig) -> ResourceConfig:
    """The same on the device_map backend: verl's strategies become ours, which a notice says, once for each.

    The rollout generates on the actor's own module, so that GPUs it names for itself stay free. Raises ConfigError with
    every fault of the config.
    """
    if faults := faults_of(config):
        raise ConfigError(faults)
    made: dict[str, Any] = {role: _ours(role, own, config) for role, own in config.roles.items()}
    if config.comm_backend is not None:
        why = "no weights travel to a rollout here: it generates on the actor's own module"
        notice("no-effect", "comm_backend", config.comm_backend, why, "no transfer")
    if config.timeout_seconds is not None:
        why = "the local runner does not take it"
        notice("no-effect", "timeout_seconds", config.timeout_seconds, why, "its own patience between processes")
    return replace(config, backend="device_map", **made)


def _ours(role: Role, own: RoleConfig, config: ResourceConfig) -> RoleConfig:
    changed: dict[str, Any] = {}
    if own.strategy in SHARDED:
        changed = dict.fromkeys(_SHARDED_FIELDS)
        changed["strategy"] = "device_map"
        why = "the local runner lays a model over its GPUs by layers and shards no tensor"
        notice("our-strategy", f"{role}.strategy", own.strategy, why, "device_map")
    elif own.strategy in ENGINES and role == "reward":
        changed = dict.fromkeys(_ENGINE_FIELDS)
        changed["strategy"] = "device_map"
        why = "the local runner serves no models"
        notice("our-strategy", f"{role}.strategy", own.strategy, why, "device_map, in this process")
    elif role == "rollout":
        changed = dict.fromkeys(("devices", *_ENGINE_FIELDS))
        changed["strategy"] = "hf"
        owned = gpus_of(config)
        others = {gpu for other, ids in owned.items() if other != "rollout" for gpu in ids}
        free = tuple(gpu for gpu in owned.get("rollout", ()) if gpu not in others)
        if own.strategy in ENGINES or free:
            used = "the actor's own module"
            if free:
                used += f" (GPU {show_ids(free)} stays free: the actor can have it)"
            why = "the local runner has no engine beside the actor"
            notice("our-strategy", "rollout.strategy", own.strategy or "GPUs of its own", why, used)
    return replace(own, **changed) if changed else own


def model_config_of(config: ResourceConfig) -> dict[str, dict[str, Any]]:
    """By role, the keys of PPOTrainer's `model_config`: devices, precision, attention and offload.

    Raises ConfigError with every fault: settings that PPOTrainer takes elsewhere, and those that it has not.
    """
    local = for_local(config)
    owned = gpus_of(local)
    faults: list[Finding] = []
    made: dict[str, dict[str, Any]] = {}
    for role, own in local.roles.items():
        if role == "rollout":
            faults += _of_the_rollout(own)
            continue
        section: dict[str, Any] = {}
        ids = owned.get(role)
        if own.device_type == "cpu":
            section["device"] = "cpu"
        elif ids and own.strategy == "data_parallel":
            section["copies_on"] = list(ids)
        elif ids:  # of a group's GPUs strategy none has the first
            one = len(ids) == 1 or own.strategy == "none"
            section |= {"device": ids[0]} if one else {"devices": list(ids)}
        elif own.strategy in ("none", "data_parallel"):  # of GPUs that only the process knows
            section["strategy"] = own.strategy
        faults += _precision(role, own, section)
        if own.attn_implementation is not None:
            section["attn_implementation"] = own.attn_implementation
        if own.offload not in (None, "none"):
            section["offload"] = own.offload
        if own.task is not None and role == "reward":
            section["task"] = own.task
        if own.micro_batch_size is not None and role == "reward":
            section["batch_size"] = own.micro_batch_size
        faults += _left(role, own)
        made[role] = section
    if faults:
        raise ConfigError(faults)
    return made


def _precision(role: Role, own: RoleConfig, section: dict[str, Any]) -> list[Finding]:
    if own.precision is None:
        return []
    if role != "reward":
        section["precision"] = own.precision
    elif own.precision in _REWARD_DTYPES:
        section["dtype"] = _REWARD_DTYPES[own.precision]
    else:
        why = "a reward model only scores, in the dtype of its weights"
        return [_fault("precision", "reward.precision", own.precision, why, "Use bf16 or fp32")]
    return []


def _left(role: Role, own: RoleConfig) -> list[Finding]:
    """What is set and has no key in model_config."""
    found = []
    for item in fields(RoleConfig):
        value = getattr(own, item.name)
        if value in (None, False, 0) or (role == "reward" and item.name == "micro_batch_size"):
            continue
        if item.name in _ELSEWHERE:
            fix = _ELSEWHERE[item.name].format(role=role)
            why = "PPOTrainer takes it in another place"
            found.append(_fault("elsewhere", f"{role}.{item.name}", value, why, fix[0].upper() + fix[1:]))
        elif item.name in (*_SHARDED_FIELDS, *_ENGINE_FIELDS):
            found.append(
                _fault(
                    "other-backend", f"{role}.{item.name}", value, "the local runner does not have it", "Leave it out"
                )
            )
        elif item.name == "task" and role in (*TRAINED, "ref"):
            found.append(_fault("no-effect", f"{role}.task", value, f"the {role} has always the same", "Leave it out"))
    return found


def _of_the_rollout(own: RoleConfig) -> list[Finding]:
    found = []
    for item in fields(RoleConfig):
        value = getattr(own, item.name)
        if item.name in ("strategy", "device_type") or value in (None, False, 0):
            continue
        fix = (
            "Write generation_config['batch_size']"
            if item.name == "micro_batch_size"
            else "Leave it out, or set the actor's"
        )
        why = "the rollout generates on the actor's own module"
        found.append(_fault("rollout-is-actor", f"rollout.{item.name}", value, why, fix))
    return found


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, "" if given is None else str(given), why, fix)
