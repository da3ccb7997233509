"""Whether it fits, from the planner: what was given as roles and a workload."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import format_bytes
from verl_shard.config.inventory import Inventory, Node
from verl_shard.config.workload import Kl, Workload
from verl_shard.verl_plugin.check.tree import Composed

A, M, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))
MODEL_KEY = f"{M}.path"
_CRITIC_TOKENS = 32768


@dataclass
class Fit:
    """findings, and in words what was found, or why nothing was."""

    findings: list[Finding] = field(default_factory=list)
    verdict: str = ""
    left_out: str = ""


def fit(made: Composed, inventory: Inventory | None) -> Fit:
    """Plans what was given, every field of it set. Nothing is loaded, and no GPU is asked."""
    reason = _cannot(made, inventory)
    if reason:
        return Fit(left_out=reason)
    assert inventory is not None, "a reason was given otherwise"
    models: dict[str, Any] = {}
    for role, key in (
        ("actor", MODEL_KEY),
        ("critic", "critic.model.path"),
        ("reward", "reward.reward_model.model_path"),
    ):
        if (
            role == "actor"
            or (role == "critic" and made.has_critic)
            or (role == "reward" and made.on("reward.reward_model.enable"))
        ):
            found = find_config(made.text(key), trust=made.on(f"{M}.trust_remote_code"))
            if isinstance(found, str):
                return Fit(left_out=f"whether it fits: {found} ({key})")
            models[role] = found
    from verl_shard.planning.build import build_plan

    pool = _pool(made, inventory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = build_plan(
                _roles(made, models, len(pool)),
                gpus=pool,
                workload=_workload(made),
                backend=made.strategy,  # type: ignore[arg-type]
            )
    except ConfigError as error:
        # What the planner refuses is a finding where it is about sizes, and otherwise out of its reach.
        sizes = [f for f in error.findings if f.code == "engine-too-small"]
        if not sizes:
            return Fit(left_out=f"whether it fits: {error}")
        key = f"{RO}.gpu_memory_utilization" if sizes[0].where == "rollout" else "reward.reward_model.rollout"
        fix = re.sub(r"(\w+)=", lambda m: f"{_KEYS.get((sizes[0].where, m[1]), m[1])}=", sizes[0].fix)
        return Fit([made.fault(key, sizes[0].why, fix, code="does-not-fit")], "It does not fit.")
    return Fit(list(_findings(made, plan, inventory)), _verdict(plan))


def _cannot(made: Composed, inventory: Inventory | None) -> str:
    """Why the planner has nothing to say; empty where it has."""
    if inventory is None:
        return "whether it fits: which GPUs is not said (--gpus 8 --gpu-memory 80GiB)"
    if not made.sharded:
        return f"whether it fits: that is planned for fsdp and fsdp2, not for {made.strategy or 'this engine'}"
    mode = made.text("trainer.v1.trainer_mode")
    if mode == "separate_async":
        return "whether it fits: that is planned for colocated trainers, not for separate_async"
    world = made.world
    if world is None:
        return "whether it fits: the number of GPUs is not known"
    for section, used in ((f"{A}.fsdp_config", True), ("critic.fsdp", made.has_critic)):
        size = made.number(f"{section}.fsdp_size")
        if used and size is not None and 0 < size < world:
            return f"whether it fits: {section}.fsdp_size={size} is more than one shard group, which is not planned"
    if (made.number(f"{A}.ulysses_sequence_parallel_size") or 1) > 1:
        return "whether it fits: sequence parallelism is not planned"
    if not made.text(MODEL_KEY) or MODEL_KEY not in made.given:
        return f"whether it fits: {MODEL_KEY} is not known"
    return ""


def find_config(name: str, *, trust: bool = False) -> Any:
    """The configuration of a model that is here, or whose few lines the hub gives at once; else, in words, why not."""
    from transformers import AutoConfig

    folder = Path(name).expanduser()
    if folder.is_dir():
        from verl_shard.models.source import read_config

        try:
            return read_config(str(folder), trust_remote_code=trust)
        except ConfigError as error:
            return str(error)
    if name.startswith(("/", ".", "~", "hdfs:")) or name.count("/") > 1:
        return f"{name} is not a folder here"
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=trust)
    except (OSError, ValueError, KeyError):
        pass
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes"):
        return f"{name} is no folder and not in the cache, and the hub is not asked (HF_HUB_OFFLINE)"
    try:
        from huggingface_hub import hf_hub_download

        hf_hub_download(name, "config.json", etag_timeout=3)
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # noqa: BLE001 - the hub's client has many of its own
        return f"{name} is no folder, and the hub gave no configuration ({type(error).__name__})"


def _pool(made: Composed, inventory: Inventory) -> Inventory:
    """The GPUs of the training pool, of those that there are."""
    nodes, gpus = made.number("trainer.nnodes") or 1, made.number("trainer.n_gpus_per_node") or 1
    first = inventory.nodes[0]
    return Inventory((Node((first.cards[0],) * gpus, first.host_memory),) * nodes)


def _workload(made: Composed) -> Workload:
    kl: Kl = "reward" if made.on("algorithm.use_kl_in_reward") else "loss" if made.on(f"{A}.use_kl_loss") else "none"
    return Workload(
        algorithm=made.text("algorithm.adv_estimator"),  # type: ignore[arg-type]
        train_batch_size=made.number("data.train_batch_size") or 1,
        n=made.number(f"{RO}.n") or 1,
        prompt_length=made.number("data.max_prompt_length") or 1,
        response_length=made.number("data.max_response_length") or 1,
        ppo_mini_batch_size=made.number(f"{A}.ppo_mini_batch_size") or 1,
        ppo_epochs=made.number(f"{A}.ppo_epochs") or 1,
        kl=kl,
        remove_padding=made.on(f"{M}.use_remove_padding"),
    )


def _roles(made: Composed, models: dict[str, Any], world: int) -> dict[str, Any]:
    length = (made.number("data.max_prompt_length") or 1) + (made.number("data.max_response_length") or 1)
    mini = (made.number(f"{A}.ppo_mini_batch_size") or 1) * (made.number(f"{RO}.n") or 1)
    dynamic = made.on(f"{A}.use_dynamic_bsz")
    lora = made.lora_rank

    def sequences(micro: str, tokens: str, *, by_tokens: bool) -> int:
        budget = made.number(tokens)
        wanted = (budget or _CRITIC_TOKENS) // length if by_tokens else made.number(micro) or 1
        wanted = max(min(wanted, max(mini // world, 1)), 1)
        return next(size for size in range(wanted, 0, -1) if mini % size == 0)

    def logits(section: str) -> str:
        if made.on(f"{M}.use_fused_kernels"):
            return "fused"
        return "chunked" if made.on(f"{section}.entropy_from_logits_with_chunking") else "full"

    attention = made.text(f"{M}.override_config.attn_implementation") or "flash_attention_2"
    roles: dict[str, Any] = {
        "actor": {
            "model": models["actor"],
            **_sharded(made, f"{A}.fsdp_config"),
            "optimizer": _optimizer(made, f"{A}.optim"),
            "attn_implementation": attention,
            "gradient_checkpointing": made.on(f"{M}.enable_gradient_checkpointing"),
            "micro_batch_size": sequences(
                f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_max_token_len_per_gpu", by_tokens=dynamic
            ),
            "lora_rank": lora,
            "logits": logits(A),
        },
        "rollout": _engine(made, RO),
    }
    if made.has_critic:
        roles["critic"] = {
            "model": models["critic"],
            **_sharded(made, "critic.fsdp"),
            "optimizer": _optimizer(made, "critic.optim"),
            "attn_implementation": "flash_attention_2",
            "gradient_checkpointing": made.on("critic.model.enable_gradient_checkpointing"),
            "micro_batch_size": sequences("", "critic.ppo_infer_max_token_len_per_gpu", by_tokens=True),
            "lora_rank": made.number("critic.model.lora_rank") or 0,
        }
    if made.has_kl:
        by_tokens = made.on(f"{REF}.log_prob_use_dynamic_bsz")
        roles["ref"] = {
            "precision": _precision(made, f"{REF}.fsdp_config"),
            "attn_implementation": attention,
            "micro_batch_size": sequences(
                f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu", by_tokens=by_tokens
            ),
            "logits": logits(REF),
        }
    if "reward" in models and not made.on("reward.reward_model.enable_resource_pool"):
        roles["reward"] = {"model": models["reward"], **_engine(made, "reward.reward_model.rollout")}
    return roles


def _engine(made: Composed, key: str) -> dict[str, Any]:
    share = made.value(f"{key}.gpu_memory_utilization")
    return {
        "tensor_parallel_size": made.number(f"{key}.tensor_model_parallel_size") or 1,
        "gpu_memory_utilization": min(float(share), 1.0) if isinstance(share, int | float) else 0.5,
    }


def _precision(made: Composed, key: str) -> str:
    held = made.text(f"{key}.model_dtype") or "fp32"
    computed = made.text(f"{key}.mixed_precision.param_dtype") or "bf16"
    if held in ("bf16", "bfloat16"):
        return "bf16"
    return "fp32" if computed in ("fp32", "float32") else "bf16-mixed"


def _optimizer(made: Composed, key: str) -> str:
    if made.text(f"{key}.optimizer").lower() == "sgd":
        return "sgd"
    return "adamw-fused" if made.on(f"{key}.override_optimizer_config.fused") else "adamw"


def _sharded(made: Composed, key: str) -> dict[str, Any]:
    policy = made.on(f"{key}.offload_policy") and made.strategy == "fsdp2"
    return {
        "precision": _precision(made, key),
        "offload_policy": policy,
        "param_offload": made.on(f"{key}.param_offload") and not policy,
        "optimizer_offload": made.on(f"{key}.optimizer_offload") and not policy,
    }


def _verdict(plan: Any) -> str:
    tightest = max(plan.phases, key=lambda phase: max(phase.peaks.values()))
    peak, limit = max(tightest.peaks.values()), min(plan.limits.values())
    fits = "It fits" if plan.fits else "It does not fit"
    return f"{fits}: {tightest.phase} takes {format_bytes(peak)} of {format_bytes(limit)} on each GPU (estimated)."


def _findings(made: Composed, plan: Any, inventory: Inventory) -> Iterator[Finding]:
    limit = min(plan.limits.values())
    for phase in plan.phases:
        peak = max(phase.peaks.values())
        if peak > limit:
            parts = ", ".join(
                f"{name} {format_bytes(size)}" for name, size in sorted(phase.parts.items(), key=lambda p: -p[1])
            )
            why = f"{phase.phase} takes {format_bytes(peak)} of {format_bytes(limit)} on each GPU (estimated): {parts}"
            yield made.fault(KEY_OF_PHASE.get(phase.phase, MODEL_KEY), why, _remedies(plan), code="does-not-fit")
    host = inventory.nodes[0].host_memory
    wanted = max(plan.host.values(), default=0)
    if host is not None and wanted > host:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.host_parts.items())
        why = f"a node keeps {format_bytes(wanted)} in RAM (estimated), and has {format_bytes(host)}: {parts}"
        fix = f"{A}.fsdp_config.optimizer_offload=False, {REF}.fsdp_config.model_dtype=bf16, or more nodes"
        yield made.fault(f"{A}.fsdp_config.param_offload", why, fix, code="host-memory")


KEY_OF_PHASE = {
    "generate": f"{RO}.gpu_memory_utilization",
    "reward": "reward.reward_model.rollout.gpu_memory_utilization",
    "old_log_prob": f"{RO}.log_prob_micro_batch_size_per_gpu",
    "ref_log_prob": f"{REF}.log_prob_micro_batch_size_per_gpu",
    "values": "critic.ppo_infer_max_token_len_per_gpu",
    "update_critic": "critic.ppo_infer_max_token_len_per_gpu",
    "update_actor": f"{A}.ppo_micro_batch_size_per_gpu",
    "weight_sync": f"{A}.fsdp_config.param_offload",
}
"""The setting that a phase's memory depends on first."""


def _remedies(plan: Any) -> str:
    """The planner's, in verl's keys."""
    length = plan.workload.sequence_length
    lines = [line for row in plan.remedies for line in _translated(row.setting, row.role, length)]
    if not lines:
        return str(plan.fits_with) or "A smaller model, or more GPUs"
    return ", ".join(dict.fromkeys(lines)) + (f". {plan.fits_with}" if plan.fits_with else "")


_KEYS = {
    ("actor", "precision"): f"{A}.fsdp_config.model_dtype",
    ("actor", "optimizer"): f"+{A}.optim.override_optimizer_config.fused",
    ("actor", "logits"): f"{M}.use_fused_kernels",
    ("ref", "logits"): f"{M}.use_fused_kernels",
    ("ref", "precision"): f"{REF}.fsdp_config.model_dtype",
    ("actor", "gradient_checkpointing"): f"{M}.enable_gradient_checkpointing",
    ("actor", "micro_batch_size"): f"{A}.ppo_micro_batch_size_per_gpu",
    ("ref", "micro_batch_size"): f"{REF}.log_prob_micro_batch_size_per_gpu",
    ("actor", "attn_implementation"): f"+{M}.override_config.attn_implementation",
    ("actor", "lora_rank"): f"{M}.lora_rank",
    ("critic", "lora_rank"): "critic.model.lora_rank",
    ("critic", "precision"): "critic.fsdp.model_dtype",
    ("critic", "optimizer"): "+critic.optim.override_optimizer_config.fused",
    ("critic", "gradient_checkpointing"): "critic.model.enable_gradient_checkpointing",
    ("rollout", "gpu_memory_utilization"): f"{RO}.gpu_memory_utilization",
    ("rollout", "tensor_parallel_size"): f"{RO}.tensor_model_parallel_size",
    ("reward", "gpu_memory_utilization"): "reward.reward_model.rollout.gpu_memory_utilization",
    ("reward", "tensor_parallel_size"): "reward.reward_model.rollout.tensor_model_parallel_size",
}
"""verl's key of a planner's field."""


def _translated(text: str, role: str, length: int) -> list[str]:
    """A remedy's `role.field=value` in verl's keys. length: tokens of a sequence."""
    lines = []
    for part in text.split(", "):
        name, _, value = part.partition("=")
        setting = name.rpartition(".")[2]
        section = f"{A}.fsdp_config" if role == "actor" else "critic.fsdp"
        if setting in ("param_offload", "optimizer_offload", "offload_policy"):
            lines.append(f"{section}.{setting}={value}")
        elif (role, setting) == ("critic", "micro_batch_size"):
            lines.append(f"+critic.ppo_infer_max_token_len_per_gpu={int(value) * length}")
        elif (role, setting) in _KEYS:
            shown = {"fused": "true", "adamw-fused": "true", "bf16-mixed": "fp32"}.get(value, value)
            lines.append(f"{_KEYS[role, setting]}={shown}")
        else:
            lines.append(part)
    return lines
