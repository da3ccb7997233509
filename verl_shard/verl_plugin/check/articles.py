"""What widely read articles tell people to write and verl never had, or has with another meaning: each with the answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl_shard.common.errors import Finding, Level

Answer = tuple[str, str]
"""Why, and what to write instead."""

_ATTENTION = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"

VARIABLES: dict[str, Answer] = {
    "VERL_OFFLOAD_DIR": (
        "verl never had it: what is offloaded goes to host RAM, there is no disk tier",
        "Leave it out; actor_rollout_ref.actor.fsdp_config.param_offload=True offloads",
    ),
    "VERL_OFFLOAD_DEVICE": (
        "verl never had it: what is offloaded goes to host RAM",
        "Leave it out; actor_rollout_ref.actor.fsdp_config.param_offload=True offloads",
    ),
    "VLLM_USE_MODELSCOPE": (
        "it makes vLLM download from ModelScope and chooses no device; verl's switch for that is VERL_USE_MODELSCOPE",
        "Leave it out, or export VERL_USE_MODELSCOPE=True for downloads",
    ),
    "NCCL_ASYNC_ERROR_HANDLING": (
        "it is torch's old variable, not verl's, and torch has it on by another name",
        "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1, or leave it out",
    ),
}  # fmt: skip
WRONG_VARIABLES_ARE = {"VLLM_USE_MODELSCOPE": "warning", "NCCL_ASYNC_ERROR_HANDLING": "warning"}
"""Those that do something, though not what is meant."""

FLAGS: dict[str, Answer] = {
    "--log-level": ("verl never had it", "export VERL_LOGGING_LEVEL=DEBUG"),
    "--no-pin-memory": (
        "verl never had it: FSDP2's host offload always pins its memory", "Leave it out; offload less, or raise ulimit -l",
    ),
    "--device": ("verl never had it: Ray says which GPUs a worker has", "trainer.n_gpus_per_node=8"),
    "--config": ("verl reads Hydra's flags", "--config-path=/folder --config-name=file_without_yaml"),
}  # fmt: skip

KEYS: dict[str, Answer] = {
    "model_config": (
        "verl never had it: every role is on every GPU of its pool, and Ray chooses them",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 for a dtype; for devices by role use model_engine=device_map",
    ),
    "generation_config": (
        "verl has no such section",
        "data.max_response_length for max_new_tokens, actor_rollout_ref.rollout.max_num_seqs for batch_size, "
        "actor_rollout_ref.rollout.top_p for top_p",
    ),
    "ppo_config": (
        "verl has no such section",
        "algorithm.kl_ctrl.kl_coef for kl_coef, actor_rollout_ref.actor.ppo_epochs for max_epochs; the reference runs as "
        "long as algorithm.use_kl_in_reward or actor_rollout_ref.actor.use_kl_loss is true",
    ),
    "kl_coef": ("it scales a term, and runs no forward less", "algorithm.kl_ctrl.kl_coef=0.001"),
    "max_epochs": ("verl has other names", "actor_rollout_ref.actor.ppo_epochs=1, or trainer.total_epochs=30"),
    "max_new_tokens": ("verl has another name", "data.max_response_length=128"),
    "use_gradient_checkpointing": (
        "verl has another name, and has it on by default", "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    ),
    "gradient_checkpointing_kwargs": ("verl always checkpoints with use_reentrant=False", "Leave it out"),
    "sharding_strategy": (
        "it follows from other keys: all shards by default",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 and reshard_after_forward=True are FULL_SHARD; "
        "reshard_after_forward=False is SHARD_GRAD_OP",
    ),
    "grad_offload": ("it is gone since verl 0.3", "actor_rollout_ref.actor.fsdp_config.offload_policy=True with strategy=fsdp2"),
    "device_map": (
        "verl gives it to nothing: models are loaded on the CPU and sharded by FSDP",
        "model_engine=device_map, verl_shard's engine, lays a model over GPUs",
    ),
    "device_ids": (
        "verl takes no GPU ids: Ray chooses GPUs for a pool",
        "trainer.n_gpus_per_node=8, or a plan: verl-shard plan --set actor.devices=[0,1]",
    ),
    "device_type": (
        "rewards by rule are in CPU processes anyway, and a reward model is always served on GPUs",
        "reward.num_workers=8, or leave it out",
    ),
    "resource_config": ("verl reads no such file", "trainer.n_gpus_per_node and trainer.nnodes, or verl-shard plan"),
    "vllm_args": (
        "verl has other names", "actor_rollout_ref.rollout.gpu_memory_utilization, .enforce_eager, .engine_kwargs.vllm.KEY",
    ),
    "comm_backend": ("verl has it for the weight sync alone", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"),
    "timeout_seconds": ("verl has no such key, and actor_rollout_ref.nccl_timeout is read by nothing", "Leave it out"),
    "use_token_level_loss": ("it has another name since 0.3", "actor_rollout_ref.actor.loss_agg_mode=token-mean"),
    "offload_dir": VARIABLES["VERL_OFFLOAD_DIR"],
    "offload_device": VARIABLES["VERL_OFFLOAD_DEVICE"],
    "hybrid_trainer": ("verl never had it", "trainer.v1.trainer_mode=sync, colocate_async or separate_async"),
    "pin_memory": FLAGS["--no-pin-memory"],
    "log_level": FLAGS["--log-level"],
}  # fmt: skip
"""By the last or the first part of a key that verl does not have."""


@dataclass(frozen=True)
class Phrase:
    """A line of a script that means nothing, or something else, to verl."""

    pattern: re.Pattern[str]
    where: str
    why: str
    fix: str
    level: Level = "error"


def _phrase(pattern: str, where: str, why: str, fix: str, level: Level = "error") -> Phrase:
    return Phrase(re.compile(pattern), where, why, fix, level)


PHRASES = (
    _phrase(r"from\s+verl(\.trainer\.ppo_trainer)?\s+import\s+.*\bPPOTrainer\b", "PPOTrainer",
            "verl never exported it there; verl.trainer.ppo.v1.PPOTrainer is abstract and takes a whole configuration",
            "from verl_shard import PPOTrainer, or python3 -m verl.trainer.main_ppo"),
    _phrase(r"verl(\.trainer)?(\.hybrid_trainer)?\s+import\s+.*\bHybridTrainer\b|verl\.trainer\.(hybrid_trainer|HybridTrainer)",
            "HybridTrainer", "verl never had it",
            "trainer.v1.trainer_mode=sync, colocate_async or separate_async, or verl_shard.HybridTrainer"),
    _phrase(r"verl\.utils\.resource\b|\bload_resource_config\b.*verl|from\s+verl\S*\s+import\s+.*\b(ResourceAllocator|DeviceMeshConfig)\b",
            "verl.utils.resource", "verl never had it: Ray counts and gives out GPUs, and nothing shrinks a batch by itself",
            "trainer.n_gpus_per_node and trainer.nnodes, or a plan: verl-shard plan"),
    _phrase(r"\bupdate_resource\s*\(", "update_resource", "verl moves no role while it trains",
            "trainer.v1.separate_async.hybrid_rollout.enable_switch=True lends idle GPUs to the rollout; "
            "verl_shard's trainers have update_resource"),
    _phrase(r"verl\.utils\.logging\b(?!_)", "verl.utils.logging", "there is no such module",
            "from verl.utils.profiler import log_gpu_memory_usage, and export VERL_LOGGING_LEVEL=DEBUG"),
    _phrase(r"\b(ActorModel\.load|RolloutBatcher\.generate)\b", "ActorModel", "verl never had it",
            "actor_rollout_ref.model.path=MODEL"),
    _phrase(r"\bmodel_config\s*=\s*\{", "model_config", *KEYS["model_config"]),
    _phrase(r"\bgeneration_config\s*=\s*\{", "generation_config", *KEYS["generation_config"]),
    _phrase(r"\bppo_config\s*=\s*\{", "ppo_config", *KEYS["ppo_config"]),
    _phrase(r"\buse_gradient_checkpointing\s*=\s*True", "use_gradient_checkpointing", *KEYS["use_gradient_checkpointing"]),
    _phrase(r"\bgradient_checkpointing_kwargs\s*=", "gradient_checkpointing_kwargs", *KEYS["gradient_checkpointing_kwargs"]),
    _phrase(r"\bcpu_offload\s*\(\s*reward_model", "cpu_offload(reward_model)",
            "verl's reward model is a server, which sleeps when it is colocated",
            "reward.reward_model.rollout.free_cache_engine=True; in a process of your own verl_shard.offload_model"),
    _phrase(r"device_map\s*=\s*\{\s*layer\s*:\s*i\s*%", "device_map", "round robin copies activations at every layer",
            "verl_shard.build_device_map(model, n_gpus)", "warning"),
    _phrase(r"\breward_model\s*=\s*None\b", "reward_model", "verl has none by default",
            "reward.reward_model.enable=False", "warning"),
)  # fmt: skip
"""Of Python in scripts."""
LAUNCHERS = {
    "torchrun": "verl's RL trainer is one process, which has Ray start the workers; torchrun is for its SFT trainer",
    "accelerate": "verl's RL trainer is one process, which has Ray start the workers",
    "deepspeed": "verl's RL trainer is one process, which has Ray start the workers",
    "mpirun": "verl's RL trainer is one process, which has Ray start the workers",
}


def of_environment(environment: dict[str, tuple[str, str]]) -> Iterator[Finding]:
    """Findings of variables. environment: values and where they are set."""
    for name, (value, at) in environment.items():
        if name in VARIABLES:
            why, fix = VARIABLES[name]
            level: Level = "warning" if name in WRONG_VARIABLES_ARE else "error"
            yield Finding(level, "never-in-verl", name, value, f"{why}, {at}", fix)


def of_text(lines: list[tuple[str, str]], *, local: bool = False) -> Iterator[Finding]:
    """Findings of a script's lines, each with where it is. local: the script uses verl_shard's own names, which are fine."""
    said = set()
    for at, line in lines:
        for phrase in PHRASES:
            if phrase.pattern.search(line) and phrase.where not in said and not (local and "verl." not in line):
                said.add(phrase.where)
                given = line.strip()[:80]
                yield Finding(phrase.level, "never-in-verl", phrase.where, given, f"{phrase.why}, {at}", phrase.fix)


def of_launcher(name: str, at: str) -> Finding:
    """Of a program that starts verl and should not."""
    return Finding(
        "error",
        "wrong-launcher",
        name,
        "",
        f"{LAUNCHERS[name]}, {at}",
        "python3 -m verl.trainer.main_ppo KEY=VALUE ...",
    )
