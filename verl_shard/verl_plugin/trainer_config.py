"""What a run on the device_map engine needs in verl's configuration, filled in and checked when the trainer is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.notices import notice

SAMPLER = "pkg://verl_shard.verl_plugin.sampler"
AGENT_LOOP_MANAGER = "verl_shard.verl_plugin.agent_loop.ShardAgentLoopManager"


def prepare_trainer_config(config: Any) -> None:
    """Puts our sampler and agent loops where the user has none of their own; raises ConfigError with all faults.

    Does nothing for another engine.
    """
    if OmegaConf.select(config, "actor_rollout_ref.actor.strategy") != "device_map":
        return
    if faults := list(find_faults(config)):
        raise ConfigError(faults)
    sampler, agent = config.trainer.v1.sampler, config.actor_rollout_ref.rollout.agent
    with open_dict(config):
        if not sampler.custom_sampler.path:
            sampler.custom_sampler.path, sampler.custom_sampler.name = SAMPLER, "make_sampler"
        elif sampler.custom_sampler.path != SAMPLER:
            notice(
                "own-sampler", "trainer.v1.sampler.custom_sampler", sampler.custom_sampler.path,
                "another sampler does not know of failed rollouts and rewards",
                "it, and failures are written to events.jsonl but do not stop the run",
            )  # fmt: skip
        if not agent.get("agent_loop_manager_class"):
            agent.agent_loop_manager_class = AGENT_LOOP_MANAGER
        elif agent.agent_loop_manager_class != AGENT_LOOP_MANAGER:
            notice(
                "own-agent-loops", "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
                agent.agent_loop_manager_class, "another manager does not report failed rollouts and rewards",
                "it, and verl drops failed samples in silence",
            )  # fmt: skip


def find_faults(config: Any) -> Iterator[Finding]:
    """What cannot work on the device_map engine, each with the key and what to write instead."""

    def fault(key: str, why: str, fix: str) -> Finding:
        return Finding("error", "device-map-config", key, str(OmegaConf.select(config, key)), why, fix)

    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if processes != 1:
        yield fault(
            "trainer.n_gpus_per_node",
            f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node} = {processes} processes, and the device_map engine "
            "does not average gradients over processes",
            "Set trainer.nnodes=1 trainer.n_gpus_per_node=1: the one process uses all GPUs it sees",
        )
    rollout = config.actor_rollout_ref.rollout
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    if OmegaConf.select(rollout, "name") == "hf":  # it has no default, and may be missing
        for size in sizes:
            if rollout[size] != 1:
                yield fault(
                    f"actor_rollout_ref.rollout.{size}", "the hf rollout generates on the actor's own module",
                    f"Set actor_rollout_ref.rollout.{size}=1",
                )  # fmt: skip
        if config.trainer.v1.trainer_mode == "separate_async":
            yield fault(
                "trainer.v1.trainer_mode", "the hf rollout has no copy of the weights for a pool of its own",
                "Use sync or colocate_async",
            )  # fmt: skip
    for place in ("actor_rollout_ref.model", "critic.model"):
        model = OmegaConf.select(config, place)
        if model is None:
            continue
        for key in ("use_liger", "enable_activation_offload"):
            if model.get(key):
                yield fault(f"{place}.{key}", "the device_map engine does not have it", f"Set {place}.{key}=false")
        if (model.get("tiled_mlp") or {}).get("enabled"):
            yield fault(f"{place}.tiled_mlp.enabled", "the device_map engine does not have it", "Set it to false")
