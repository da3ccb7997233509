"""From what was asked of each role to what each role does: blanks filled, contradictions refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.config.resource_local import for_local
from verl_shard.config.resource_rules import ENGINES, role_faults
from verl_shard.config.roles import ROLES, TRAINED, Backend, ResourceConfig, Role, RoleConfig
from verl_shard.config.validated import read
from verl_shard.config.workload import Workload

MOST_IN_A_MICRO_BATCH = 16
_BLANK = (None, "auto")
"""What leaves a field to the planner."""
MOST_GENERATED_AT_ONCE = 256
_ENGINE_ONLY = ("tensor_parallel_size", "gpu_memory_utilization", "vllm_args")
_FSDP_ONLY = ("param_offload", "optimizer_offload", "offload_policy")
_TAKEN_BY: dict[str, tuple[tuple[str, ...], tuple[Backend, ...]]] = {
    "logits": (("actor", "ref"), ("device_map", "fsdp", "fsdp2")),
    "offload": (("ref", "reward"), ("device_map",)),
    "tensor_parallel_size": (("rollout", "reward"), ("fsdp", "fsdp2")),
    "gpu_memory_utilization": (("rollout", "reward"), ("fsdp", "fsdp2")),
    "vllm_args": (("rollout", "reward"), ("fsdp", "fsdp2")),
    "param_offload": (TRAINED, ("fsdp", "fsdp2")),
    "devices": ((), ("fsdp", "fsdp2")),
}
"""Fields that some roles only take, and on which backends."""
_STOCK_ENGINES = {"rollout": ENGINES, "reward": ENGINES}
_STRATEGIES: dict[Backend, dict[str, tuple[str, ...]]] = {
    "device_map": {
        "rollout": ("hf",),
        **dict.fromkeys(("ref", "reward"), ("device_map", "none", "data_parallel")),
        "": ("device_map", "none"),
    },
    "fsdp": {**_STOCK_ENGINES, "": ("fsdp",)},
    "fsdp2": {**_STOCK_ENGINES, "": ("fsdp2",)},
}
"""What each backend makes of a role, the default first; "" is of roles that it does not name."""


@dataclass(frozen=True)
class Settings:
    """Every role's configuration without blanks, and which fields were blank, so that the planner may change them."""

    backend: Backend
    roles: Mapping[Role, RoleConfig]
    blank: Mapping[Role, frozenset[str]]

    def changed(self, role: Role, **fields: Any) -> Settings:
        """The same with some fields of a role set."""
        return replace(self, roles={**self.roles, role: replace(self.roles[role], **fields)})

    @property
    def ref_in_actor(self) -> bool:
        """Whether the reference is the actor without its adapters, as verl has it with LoRA."""
        return bool("ref" in self.roles and self.roles["actor"].lora_rank)


def read_roles(roles: ResourceConfig | Mapping[str, Any], backend: Backend | None = None) -> ResourceConfig:
    """Roles as people give them: a ResourceConfig, or a dict of role to a model or to a dict of RoleConfig's fields.

    A ResourceConfig with verl's strategies gets ours on the device_map backend, which a notice says.
    Raises ConfigError with every fault.
    """
    if isinstance(roles, ResourceConfig):
        if backend == "device_map" != roles.backend:
            return for_local(roles)
        return roles if backend is None else replace(roles, backend=backend)
    if not isinstance(roles, Mapping):
        raise _not_roles(roles)
    nested: dict[str, Any] = {}
    for name, given in roles.items():
        named = name in ROLES
        nested[name] = given if not named or isinstance(given, Mapping | RoleConfig) else {"model": given}
    if backend is not None:
        nested["backend"] = backend
    return read(ResourceConfig, nested, "roles")


def _not_roles(given: object) -> ConfigError:
    """For what is no mapping: most often the one model that somebody has."""
    fix = 'Write {"actor": MODEL}, MODEL a folder, a hub id, a PretrainedConfig or a module, or give a ResourceConfig'
    if not isinstance(given, str | os.PathLike):
        why = "not a mapping of roles to their models"
        return config_error("not-roles", "roles", type(given).__name__, why, fix)
    name = os.fspath(given)
    if str(name).endswith((".yaml", ".yml")):
        why = "the name of a file, which is read first"
        return config_error("not-roles", "roles", repr(name), why, f"Write load_resource_config({name!r})")
    why = "a model alone, and a plan asks for the role that it has"
    return config_error("not-roles", "roles", repr(name), why, f'Write {{"actor": {json.dumps(name)}}}')


def fill(config: ResourceConfig, workload: Workload) -> Settings:
    """Every blank with its default, and the roles that the workload implies: a critic for ppo, a reference for the KL.

    Defaults: bf16-mixed for trained roles and bf16 for scoring ones, sdpa, adamw, no gradient checkpointing, micro-batches
    of 16 sequences or what divides the mini-batch, full logits, nothing offloaded. For stock verl, as verl has them:
    flash_attention_2 and gradient checkpointing.
    Raises ConfigError with every fault: a role that the workload has no use for, settings of another backend.
    """
    asked = dict(config.roles)
    faults: list[Finding] = []
    model = asked["actor"].model
    if model is None:
        faults.append(
            _fault(
                "no-model", "actor.model", None, "the actor needs a model", "Give a folder, an id or a configuration"
            )
        )
    implied: tuple[tuple[Role, bool, str], ...] = (
        ("critic", workload.has_critic, f"algorithm={workload.algorithm} learns no values"),
        ("ref", workload.kl != "none", 'kl="none" compares with no reference'),
    )
    for role, needed, why in implied:
        if needed:
            asked.setdefault(role, RoleConfig())
        elif role in asked:
            faults.append(_fault("no-use", role, None, why, "Leave the role out, or change the workload"))
    asked.setdefault("rollout", RoleConfig())
    if "reward" in asked and asked["reward"].model is None:
        faults.append(
            _fault(
                "no-model",
                "reward.model",
                None,
                "a reward model must be named",
                "Name it, or leave the role out for a reward function",
            )
        )
    for role, own in asked.items():
        of_backend = _of_another_backend(role, own, config.backend)
        of_role = (replace(fault, where=f"{role}.{fault.where}") for fault in role_faults(role, own))
        faults += of_backend
        faults += (fault for fault in of_role if fault.where not in {other.where for other in of_backend})
    faults += _rollout_apart(asked, config.backend)
    if asked["actor"].lora_rank and "ref" in asked and asked["ref"].strategy == "data_parallel":
        why = "with lora_rank the reference is the actor without its adapters"
        faults.append(_fault("no-effect", "ref.strategy", "data_parallel", why, "Leave it out"))
    if faults:
        raise ConfigError(faults)
    filled = {role: _filled(role, asked, workload, config.backend) for role in ROLES if role in asked}
    faults = [fault for role, own in filled.items() for fault in _batch_faults(role, own, workload)]
    if faults:
        raise ConfigError(faults)
    blank = {
        role: frozenset(f.name for f in fields(RoleConfig) if getattr(asked[role], f.name) in _BLANK) for role in filled
    }
    return Settings(config.backend, filled, blank)


def micro_batch(workload: Workload) -> int:
    """The largest divisor of the mini-batch that is at most MOST_IN_A_MICRO_BATCH sequences."""
    n = workload.mini_batch_sequences
    return next(size for size in range(min(MOST_IN_A_MICRO_BATCH, n), 0, -1) if n % size == 0)


def _filled(role: Role, asked: Mapping[Role, RoleConfig], workload: Workload, backend: Backend) -> RoleConfig:
    own, actor, engine = asked[role], asked["actor"], asked["rollout"].strategy
    trained, rollout = role in TRAINED, role == "rollout"
    defaults: dict[str, Any] = {
        "model": actor.model,
        "task": {"critic": "value", "reward": "reward"}.get(role, "causal-lm"),
        "device_type": "cuda",
        "strategy": _strategies(role, own, backend)[0],
        "precision": "bf16-mixed" if trained else "bf16",
        "optimizer": "adamw" if trained else None,
        "attn_implementation": "sdpa",
        "gradient_checkpointing": False if trained else None,
        "micro_batch_size": min(workload.sequences, MOST_GENERATED_AT_ONCE) if rollout else micro_batch(workload),
        "in_flight": 1 if trained else None,
        "lora_rank": 0 if trained else None,
        "logits": ("responses" if backend == "device_map" else "full") if role in ("actor", "ref") else None,
        "offload": None if trained or rollout else "none",
    }
    if own.strategy == "none" and own.device_type != "cpu":
        defaults["devices"] = 1  # it is for one GPU
    if role == "reward" and backend != "device_map" and own.device_type != "cpu":
        defaults["strategy"] = engine or "vllm"
    if rollout and backend == "device_map":  # the actor's own module
        defaults["precision"] = actor.precision or "bf16-mixed"
        defaults["attn_implementation"] = actor.attn_implementation or "sdpa"
    if backend != "device_map":
        defaults |= {"in_flight": None, "attn_implementation": "flash_attention_2"}
        if trained:  # as verl's own configuration has it
            defaults |= {"param_offload": False, "optimizer_offload": False, "offload_policy": False}
            defaults["gradient_checkpointing"] = True
        if rollout or (role == "reward" and own.device_type != "cpu"):
            defaults |= {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.5}  # see EngineShares.completed
    values = {f.name: getattr(own, f.name) for f in fields(RoleConfig)}
    return RoleConfig(**{name: defaults.get(name) if value in _BLANK else value for name, value in values.items()})


def _of_another_backend(role: str, own: RoleConfig, backend: Backend) -> list[Finding]:
    ours = backend == "device_map"
    faults = []
    for name in (*_FSDP_ONLY, *_ENGINE_ONLY) if ours else ("in_flight", "offload"):
        value = getattr(own, name)
        if value in (None, False, "none"):
            continue
        if ours:
            why, fix = (
                "the device_map backend keeps weights and states where the map puts them, and generates on the actor",
                'Leave it out, or plan with backend="fsdp2"',
            )
        else:
            why, fix = f"that is the device_map backend's, and this is {backend}", "Leave it out"
        faults.append(_fault("other-backend", f"{role}.{name}", value, why, fix))
    if ours and own.logits == "chunked":
        why = "the device_map engine always takes log-probabilities and entropies in chunks"
        fix = "Use responses, full or fused"
        faults.append(_fault("other-backend", f"{role}.logits", own.logits, why, fix))
    if not ours and own.logits == "responses":
        why, fix = (
            f"that is the device_map backend's; {backend} makes the logits of prompts too",
            "Use full, chunked or fused",
        )
        faults.append(_fault("other-backend", f"{role}.logits", own.logits, why, fix))
    if backend == "fsdp" and own.offload_policy:
        faults.append(
            _fault("fsdp2-only", f"{role}.offload_policy", True, "FSDP1 does not have it", 'Use backend="fsdp2"')
        )
    faults += _of_another_role(role, own, backend)
    fitting = _strategies(role, own, backend)
    if own.strategy is not None and own.strategy not in fitting:
        why = f"backend {backend} has {' or '.join(fitting)} there"
        faults.append(
            _fault("strategy", f"{role}.strategy", own.strategy, why, f"Use {' or '.join(fitting)}, or leave it out")
        )
    return faults


def _strategies(role: str, own: RoleConfig, backend: Backend) -> tuple[str, ...]:
    """Those that a backend has for a role, the default first. On the CPU a model is as it is loaded."""
    if own.device_type == "cpu" and backend != "device_map":
        return ("none",)
    of_role = _STRATEGIES[backend]
    return of_role.get(role, of_role[""])


def _of_another_role(role: str, own: RoleConfig, backend: Backend) -> list[Finding]:
    """Fields that change nothing of this role on this backend: none goes by in silence."""
    faults = []
    for name, (roles, backends) in _TAKEN_BY.items():
        value = getattr(own, name)
        if backend in backends and role not in roles and value not in (None, False, "none", "auto"):
            why = f"it is for {' and '.join(roles)}" if roles else "a plan of stock verl has every role over all GPUs"
            fix = (
                "Leave it out"
                if roles
                else 'Leave it out, use backend="device_map", or write pools with pool_overrides'
            )
            faults.append(_fault("no-effect", f"{role}.{name}", value, why, fix))
    if backend == "device_map" and own.offload in ("cpu_offload", "cpu_offload_with_hook"):
        why, fix = "accelerate's ways of keeping weights on the host are not planned", "Use stream or none"
        faults.append(_fault("offload", f"{role}.offload", own.offload, why, fix))
    if backend != "device_map" and own.device_type == "cpu" and role != "reward":
        why = "verl computes it on GPUs"
        faults.append(_fault("no-effect", f"{role}.device_type", "cpu", why, "Leave it out"))
    return faults


def _rollout_apart(asked: Mapping[Role, RoleConfig], backend: Backend) -> list[Finding]:
    rollout, actor = asked["rollout"], asked["actor"]
    if backend != "device_map":
        reward, named = asked.get("reward"), rollout.strategy or "vllm"
        if reward is None or reward.strategy not in ENGINES or reward.strategy == named:
            return []
        why = f"the rollout is on {named}, and a plan of stock verl has one engine for both"
        return [_fault("two-engines", "reward.strategy", reward.strategy, why, f"Use {named} for both")]
    faults = []
    for name in ("devices", "model", "precision", "attn_implementation", "device_type"):
        value = getattr(rollout, name)
        if value is not None and value != getattr(actor, name):
            why = "the hf rollout generates on the actor's own module"
            faults.append(
                _fault("rollout-is-actor", f"rollout.{name}", value, why, f"Leave it out, or set actor.{name}")
            )
    return faults


def _batch_faults(role: str, own: RoleConfig, workload: Workload) -> list[Finding]:
    size, n = own.micro_batch_size, workload.mini_batch_sequences
    if role not in TRAINED or size is None or n % size == 0:
        return []
    prompts = workload.ppo_mini_batch_size or workload.train_batch_size
    why = f"a mini-batch is {prompts} prompts x {workload.n} = {n} sequences, % {size} = {n % size}, not 0"
    divisors = ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
    return [_fault("batch-arithmetic", f"{role}.micro_batch_size", size, why, f"Choose a divisor: {divisors}")]


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, "" if given is None else str(given), why, fix)
