"""What a reward model served by `rollout.name=hf` needs in verl's configuration, and what its own says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.runtime.scoring_model import ScoringModel

SERVED = "pkg://verl_shard.verl_plugin.reward.served"
KWARGS = "reward.reward_model.rollout.engine_kwargs.hf"
_SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
_PLACES = ("device_map", "devices", "copies_on")


def prepare_reward_config(config: Any) -> None:
    """Has verl's reward workers ask the served model, where the user has no way of his own, and its replicas be behind our
    router; raises ConfigError with all faults. Does nothing unless `reward.reward_model.enable` is true and its
    `rollout.name` is hf.

    verl knows how to ask vLLM and SGLang only, and its managers fail on what a colocated model is given.
    """
    model = OmegaConf.select(config, "reward.reward_model")
    if not model or not model.enable or OmegaConf.select(model, "rollout.name") != "hf":
        return
    if faults := list(find_faults(config)):
        raise ConfigError(faults)
    from verl_shard.verl_plugin.reward.replicas import use_our_router

    use_our_router()
    with open_dict(config):
        reward = config.reward
        if not reward.custom_reward_function.path:
            reward.custom_reward_function.path, reward.custom_reward_function.name = SERVED, "ask"
            reward.reward_manager.source, reward.reward_manager.name = "importlib", "ServedRewardManager"
            reward.reward_manager.module.path = SERVED


def find_faults(config: Any) -> Iterator[Finding]:
    """What cannot work, each with the key and what to write instead."""
    model = config.reward.reward_model

    def fault(key: str, why: str, fix: str) -> Finding:
        return Finding("error", "served-reward-config", key, str(OmegaConf.select(config, key)), why, fix)

    if not model.model_path:
        yield fault("reward.reward_model.model_path", "no model is named", "Set it to a hub id or folder")
    own = model.enable_resource_pool
    pool = model if own else config.trainer
    gpus, where = pool.nnodes * pool.n_gpus_per_node, "reward.reward_model" if own else "trainer"
    one = 1
    for size in _SIZES:
        one *= model.rollout[size]
    if own and gpus < 1:
        why = f"nnodes {pool.nnodes} x n_gpus_per_node {pool.n_gpus_per_node} = {gpus} GPUs"
        yield fault(f"{where}.nnodes", why, "Give a pool of its own at least one")
    elif gpus % one:
        shown = " x ".join(str(model.rollout[size]) for size in _SIZES)
        why = f"{shown} = {one} GPUs for each replica, and {where} has {gpus}: {gpus} % {one} = {gpus % one}, not 0"
        fix = "Set reward.reward_model.rollout.tensor_model_parallel_size to a divisor; 1 is a replica on each GPU"
        yield fault(f"reward.reward_model.rollout.{_SIZES[0]}", why, fix)
    elif one > pool.n_gpus_per_node:
        why = f"a replica of {one} GPUs is on several nodes, which have {pool.n_gpus_per_node} each"
        yield fault(f"reward.reward_model.rollout.{_SIZES[0]}", why, f"Set it to {pool.n_gpus_per_node} or less")
    try:
        read_kwargs(OmegaConf.to_container(model.rollout.get("engine_kwargs") or OmegaConf.create({})))
    except ConfigError as error:
        yield from error.findings


def read_kwargs(engine_kwargs: Any) -> dict[str, Any]:
    """ScoringModel's arguments from a rollout's `engine_kwargs.hf`; raises ConfigError for one that it does not take."""
    given = (engine_kwargs or {}).get("hf") or {}
    takes = [
        name for name in inspect.signature(ScoringModel.__init__).parameters if name not in ("self", "path", "dtype")
    ]
    if unknown := sorted(set(given) - set(takes)):
        fix = (
            "Set dtype as reward.reward_model.rollout.dtype"
            if unknown == ["dtype"]
            else f"Use some of {', '.join(takes)}"
        )
        raise config_error("unknown-option", f"{KWARGS}.{unknown[0]}", given[unknown[0]], "it is no setting here", fix)
    return dict(given)


def scoring_settings(rollout: Any, seats: int, *, cpu: bool) -> dict[str, Any]:
    """The arguments of a replica's ScoringModel. rollout: its configuration; seats: its GPUs, which it sees as 0, 1, ...

    Where `engine_kwargs.hf` names no place, the model is on the replica's GPUs, laid over them if there are several.
    """
    given: Mapping[str, Any] = read_kwargs(rollout.engine_kwargs)
    settings = {"dtype": str(rollout.dtype), **given}
    if not any(name in given for name in _PLACES):
        if cpu or seats == 1:
            settings["device_map"] = "cpu" if cpu else 0
        else:
            settings |= {"device_map": "balanced", "devices": list(range(seats))}
    return settings
