"""The one table of what lowers memory: for which role, on which backend, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_shard.config.roles import TRAINED, Backend, Role, RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.planning.settings import Settings

Change = dict[str, Any]
OUR: tuple[Backend, ...] = ("device_map",)
STOCK: tuple[Backend, ...] = ("fsdp", "fsdp2")
BOTH: tuple[Backend, ...] = (*OUR, *STOCK)
LORA_RANK = 32


@dataclass(frozen=True)
class Remedy:
    """One way to need less memory.

    name: what reports call it; no two have the same. backends, roles: those that it is for.
    change: the fields of a role's configuration to set, or None where it is done already or has no meaning.
    saves, price: in words, what of memory it saves and what it costs; how many bytes and seconds is worked out for each plan.
    same_result: the run computes the same but for rounding; without, it learns differently.
    live: can be taken, and taken back, between two steps of a running training.
    """

    name: str
    backends: tuple[Backend, ...]
    roles: tuple[Role, ...]
    change: Callable[[RoleConfig, Workload], Change | None]
    saves: str
    price: str
    same_result: bool = True
    live: bool = False


def _precision(own: RoleConfig, _: Workload) -> Change | None:
    return {"precision": "bf16-mixed"} if own.precision == "fp32" else None


def _scoring_precision(own: RoleConfig, _: Workload) -> Change | None:
    return {"precision": "bf16"} if own.precision != "bf16" else None


def _attention(own: RoleConfig, _: Workload) -> Change | None:
    return {"attn_implementation": "sdpa"} if own.attn_implementation == "eager" else None


def _checkpointing(own: RoleConfig, _: Workload) -> Change | None:
    return None if own.gradient_checkpointing else {"gradient_checkpointing": True}


def _smaller_micro_batch(own: RoleConfig, workload: Workload) -> Change | None:
    """The next smaller number of sequences that divides the mini-batch, at most half."""
    now = own.micro_batch_size or 1
    n = workload.mini_batch_sequences
    return next(({"micro_batch_size": size} for size in range(now // 2, 0, -1) if n % size == 0), None)


def _half(own: RoleConfig, _: Workload) -> Change | None:
    now = own.micro_batch_size or 1
    return {"micro_batch_size": now // 2} if now > 1 else None


def _fewer_in_flight(own: RoleConfig, _: Workload) -> Change | None:
    now = own.in_flight or 1
    return {"in_flight": now // 2} if now > 1 else None


def _fused_logits(own: RoleConfig, _: Workload) -> Change | None:
    return None if own.logits == "fused" else {"logits": "fused"}


def _stream(own: RoleConfig, _: Workload) -> Change | None:
    return {"offload": "stream"} if own.offload == "none" else None


def _fused_adamw(own: RoleConfig, _: Workload) -> Change | None:
    return {"optimizer": "adamw-fused"} if own.optimizer == "adamw" else None


def _optimizer_offload(own: RoleConfig, _: Workload) -> Change | None:
    return None if own.optimizer_offload or own.offload_policy else {"optimizer_offload": True}


def _param_offload(own: RoleConfig, _: Workload) -> Change | None:
    return None if own.param_offload or own.offload_policy else {"param_offload": True}


def _offload_policy(own: RoleConfig, _: Workload) -> Change | None:
    off = {"param_offload": False, "optimizer_offload": False}
    return None if own.offload_policy else {"offload_policy": True, **off}


def _lora(own: RoleConfig, _: Workload) -> Change | None:
    return None if own.lora_rank else {"lora_rank": LORA_RANK}


def _lower_utilization(own: RoleConfig, _: Workload) -> Change | None:
    share = own.gpu_memory_utilization or 0.5
    return {"gpu_memory_utilization": round(share - 0.1, 2)} if share > 0.25 else None


REMEDIES: tuple[Remedy, ...] = (
    Remedy("mixed precision", BOTH, TRAINED, _precision, "half of the activations", "none: matrix products get faster"),
    Remedy("bf16 weights", BOTH, ("ref", "reward"), _scoring_precision, "half of the weights", "rounding of scores"),
    Remedy(
        "fused attention", BOTH, ("actor", "critic", "ref", "reward"), _attention,
        "every attention score", "none: it is faster",
    ),
    Remedy("fused AdamW", BOTH, TRAINED, _fused_adamw, "the gradients' size in the optimizer's step", "none"),
    Remedy(
        "fused logits", BOTH, ("actor", "ref"), _fused_logits, "tokens x vocabulary, several times",
        "logits are computed again in the backward",
    ),
    Remedy("fewer in flight", OUR, TRAINED, _fewer_in_flight, "their activations", "GPUs overlap less", live=True),
    Remedy(
        "gradient checkpointing", BOTH, TRAINED, _checkpointing, "all activations inside of blocks",
        "a forward more in each backward",
    ),
    Remedy(
        "smaller micro-batch", BOTH, ("actor", "critic", "ref", "reward"), _smaller_micro_batch,
        "half of activations and logits", "more launches, smaller matrix products", live=True,
    ),
    Remedy(
        "fewer responses at once", OUR, ("rollout",), _half, "half of the KV cache",
        "each decoding step serves fewer", live=True,
    ),
    Remedy(
        "lower gpu_memory_utilization", STOCK, ("rollout", "reward"), _lower_utilization, "a tenth of the GPU",
        "a smaller KV cache: fewer responses at once",
    ),
    Remedy(
        "weights streamed from host memory", OUR, ("ref", "reward"), _stream, "the weights of its blocks",
        "their copy, where it is not hidden behind compute", live=True,
    ),
    Remedy(
        "optimizer_offload", STOCK, TRAINED, _optimizer_offload, "optimizer states, outside of the role's update",
        "their copy in and out each step",
    ),
    Remedy(
        "param_offload", STOCK, TRAINED, _param_offload, "weights, outside of the role's phases",
        "their copy in and out each phase",
    ),
    Remedy(
        "offload_policy", ("fsdp2",), TRAINED, _offload_policy, "weights, gradients and states, always",
        "weights are copied in for every micro-batch, and the optimizer runs on the CPU",
    ),
    Remedy(
        "LoRA", BOTH, TRAINED, _lora, "gradients and states of all weights but the adapters'",
        "it trains adapters of low rank and not the weights", same_result=False,
    ),
)  # fmt: skip


def available(settings: Settings, workload: Workload) -> list[tuple[Remedy, Role, Change]]:
    """What can still be done: each remedy for each role of the settings that it is for and that has not had it."""
    found = []
    for remedy in REMEDIES:
        if settings.backend not in remedy.backends:
            continue
        for role in remedy.roles:
            own = settings.roles.get(role)
            if own is None or own.device_type == "cpu":
                continue
            if settings.ref_in_actor and role == "ref" and remedy.change is not _smaller_micro_batch:
                continue  # its weights are the actor's
            change = remedy.change(own, workload)
            if change is not None:
                found.append((remedy, role, change))
    return found
