"""Settings that verl takes and does not read, or that do something else than their names say."""

from __future__ import annotations

from collections.abc import Iterator

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.tree import Composed

A, M, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))
_BUDGET = "critic.ppo_infer_max_token_len_per_gpu"
_LEGACY = {
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
}


def find(made: Composed) -> Iterator[Finding]:
    """All of them that were given."""
    yield from _legacy(made)
    if made.sharded:
        yield from _offloads(made)
        yield from _not_read(made)
    if made.has_critic and made.sharded:
        yield from _critic(made)
    yield from _memory(made)
    yield from _adapters(made)


def _legacy(made: Composed) -> Iterator[Finding]:
    """Blocks of older versions, which compose and which main_ppo does not look at."""
    for key in made.given:
        first = key.split(".")[0]
        if first not in ("reward_model", "custom_reward_function", "sandbox_fusion"):
            continue
        if made.value(key) is None or any(setting.key == key for setting in made.unplaced):
            continue
        new = _LEGACY.get(key, f"reward.{key}")
        off = first == "reward_model" and key.endswith(".enable") and not made.on(key)
        why = "verl 0.9's main_ppo does not read this block: the run would go on without it"
        yield made.fault(key, why, f"{new}={made.value(key)}", "warning" if off else "error", "legacy-block")


def _offloads(made: Composed) -> Iterator[Finding]:
    sections = [(f"{A}.fsdp_config", A, True), ("critic.fsdp", "critic", made.has_critic)]
    for section, role, used in sections:
        key = f"{section}.offload_policy"
        if not used or not made.on(key):
            continue
        if made.text(f"{role}.strategy") == "fsdp":
            why = "strategy=fsdp does not read it, and nothing is offloaded"
            yield made.fault(
                key, why, f"{role}.strategy=fsdp2, or {section}.param_offload=True", "warning", "no-effect"
            )
            continue
        for name in ("param_offload", "optimizer_offload"):
            if made.on(f"{section}.{name}"):
                why = "offload_policy has everything on the host already and switches it off"
                yield made.fault(f"{section}.{name}", why, f"{section}.{name}=False", "warning", "no-effect")
    for name in ("param_offload", "optimizer_offload", "offload_policy"):
        key = f"{REF}.fsdp_config.{name}"
        if key in made.given:
            why = "verl keeps an FSDP reference in host memory whatever it says"
            fix = f"Leave it out; {REF}.fsdp_config.model_dtype=bf16 halves what is copied in"
            yield made.fault(key, why, fix, "warning", "no-effect")


def _not_read(made: Composed) -> Iterator[Finding]:
    instead = {
        f"{A}.fsdp_config.dtype": f"{A}.fsdp_config.model_dtype=bf16 or +{A}.fsdp_config.mixed_precision.param_dtype=bf16",
        f"{A}.use_torch_compile": f"{A}.fsdp_config.use_torch_compile",
        "actor_rollout_ref.nccl_timeout": "Leave it out",
        "data.val_batch_size": "Leave it out: a validation is handed to the engine as a whole",
    }
    for key, fix in instead.items():
        if key in made.given and made.value(key) is not None:
            yield made.fault(key, "nothing reads it", fix, "warning", "no-effect")
    if made.on(f"{M}.tiled_mlp.enabled"):
        key = f"{M}.tiled_mlp.enabled"
        yield made.fault(key, "the FSDP engine is never told of it", f"{key}=False", "warning", "no-effect")
    # What is added with + to a section that is no dataclass is there, and nobody looks.
    for setting in made.unplaced:
        if setting.sign and setting.key.startswith(("trainer.", "data.")):
            continue  # keys.py says it


def _critic(made: Composed) -> Iterator[Finding]:
    """verl's critic is batched by tokens alone."""
    own = (
        "critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu", "critic.forward_micro_batch_size_per_gpu",
    )  # fmt: skip
    prompt, response = made.number("data.max_prompt_length"), made.number("data.max_response_length")
    length = (prompt or 512) + (response or 512)
    for key in own:
        if key in made.given:
            size = made.number(key) or 1
            tokens = size if "token" in key else size * length
            why = "verl asks for it and reads it nowhere: the critic is batched by tokens, 32768 on a GPU unless it is told"
            yield made.fault(key, why, f"+{_BUDGET}={tokens}", "warning", "no-effect")
    key = "critic.ppo_micro_batch_size_per_gpu"
    if key in made.given and _BUDGET not in made.given:
        size = made.number(key) or 1
        why = "verl asks for it and reads it nowhere: the critic is batched by tokens, 32768 on a GPU unless it is told"
        yield made.fault(key, why, f"Keep it, and add +{_BUDGET}={size * length}", "warning", "no-effect")


def _memory(made: Composed) -> Iterator[Finding]:
    keys = [f"{RO}.gpu_memory_utilization"]
    if made.on("reward.reward_model.enable"):
        keys.append("reward.reward_model.rollout.gpu_memory_utilization")
    for key in keys:
        try:
            share = float(made.value(key))
        except (TypeError, ValueError):
            continue
        if not 0 < share <= 1:
            why = "it is a share of a GPU's memory, above 0 and at most 1; verl hands it on and the engine fails"
            as_percent = share / 100 if 1 < share <= 100 else 0.5
            yield made.fault(key, why, f"{key}={as_percent if 0.05 <= as_percent < 1 else 0.5:g}", code="utilisation")
        elif share > 0.9:
            why = "the trainer and its NCCL buffers are on the same card, which has no room beside it"
            yield made.fault(key, why, f"{key}=0.6", "warning", "utilisation")
    key = f"{RO}.free_cache_engine"
    if not made.on(key) and key in made.given and made.text("trainer.v1.trainer_mode") != "separate_async":
        why = "weights and KV cache of the engine then stay on the card while the actor is trained"
        yield made.fault(key, why, f"{key}=True", "warning", "never-freed")


def _adapters(made: Composed) -> Iterator[Finding]:
    if not made.lora_rank or not made.sharded:
        return
    key = f"{RO}.load_format"
    if made.text(key).startswith("dummy") and not made.on(f"{M}.lora.merge"):
        why = "with LoRA the engine is sent the adapters, and its base weights would come from nowhere"
        yield made.fault(key, why, f"{key}=safetensors", "warning", "lora")
