"""A resource config on stock verl: Ray's pools of GPUs, as overrides; what Ray and verl cannot honour is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.notices import notice
from verl_shard.config.device_ids import show_ids
from verl_shard.config.resource_rules import ENGINES, SHARDED, faults_of, gpus_of
from verl_shard.config.roles import Nodes, ResourceConfig, Role, RoleConfig, VllmArgs

_ROLLOUT, _REWARD = "actor_rollout_ref.rollout", "reward.reward_model"
_TRAINER: tuple[Role, ...] = ("actor", "critic", "ref")
_FSDP = {
    "actor": "actor_rollout_ref.actor.fsdp_config",
    "ref": "actor_rollout_ref.ref.fsdp_config",
    "critic": "critic.fsdp",
}
_PLAIN = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_./][A-Za-z0-9_./:-]*", re.IGNORECASE)
"""Text that needs no quotes in Hydra's grammar, and is no other value there."""
_OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy")
_SAID = {
    "model",
    "device_type",
    "devices",
    "strategy",
    "vllm_args",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "precision",
}
"""Fields of a component that these overrides say; `model` goes with the models of the run."""


def pool_overrides(
    config: ResourceConfig, *, train_batch_size: int | None = None, mini_batch_size: int | None = None
) -> list[str]:
    """Overrides for verl's main_ppo: the trainer's pool, and pools of their own for a rollout and a reward model apart.

    A rollout on GPUs of its own is verl's separate_async. Its trainer updates the rollout every so many mini-batches, which
    train_batch_size and mini_batch_size (prompts) say. verl's own settings of batches, lengths and models are not in it.
    Raises ConfigError with every fault: ids and layouts that Ray cannot honour, strategies that verl has not.
    """
    faults = faults_of(config)
    if not faults:
        faults = [*_strategy_faults(config), *_pool_faults(config)]
    if faults:
        raise ConfigError(faults)
    owned = gpus_of(config)
    if any(isinstance(own.devices, tuple) for own in config.roles.values()):
        sizes = ", ".join(f"{role} {len(ids)}" for role, ids in owned.items() if ids)
        why = "Ray hands out the GPUs of a pool itself, and takes no ids"
        notice("ray-picks-gpus", "device_ids", "as named", why, f"as many of those that Ray sees ({sizes})")
    nodes, gpus = _extent(config.nodes, owned["actor"])
    made: dict[str, Any] = {
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": gpus,
        "actor_rollout_ref.actor.strategy": config.backend,
    }
    if config.critic is not None:
        made["critic.strategy"] = config.backend
    for role in _TRAINER:
        made |= _sharded(role, getattr(config, role))
    made |= _rollout(config, owned, train_batch_size, mini_batch_size)
    made |= _reward(config, owned)
    if config.timeout_seconds is not None:
        why = "verl 0.9.1 reads its nccl_timeout nowhere"
        notice("no-effect", "timeout_seconds", config.timeout_seconds, why, "torch's own timeout")
    return [f"{key}={_written(value)}" for key, value in made.items()]


def _strategy_faults(config: ResourceConfig) -> Iterator[Finding]:
    """What stock verl has not, by component and field."""
    for role, own in config.roles.items():
        if role in _TRAINER and own.strategy not in (None, *SHARDED):
            why, fix = "stock verl shards it over its pool", "Use fsdp2, or run it on this package's engine"
            yield _fault("verl-has-not", f"{role}.strategy", own.strategy, why, fix)
        if role == "reward" and own.strategy == "data_parallel":
            why = "verl serves a reward model by an engine, which has as many copies as its pool has room for"
            yield _fault("verl-has-not", "reward.strategy", own.strategy, why, "Use vllm")
        if role == "rollout" and own.strategy == "hf":
            yield _fault("verl-has-not", "rollout.strategy", "hf", "verl generates on an engine", "Use vllm or sglang")
        if own.device_type == "cpu":
            fix = "Give a reward function, or use runner=local" if role == "reward" else "Leave it out"
            yield _fault("verl-has-not", f"{role}.device_type", "cpu", "verl has models on GPUs only", fix)
        if role == "reward" and own.precision not in (None, "bf16"):
            yield _fault(
                "verl-has-not", "reward.precision", own.precision, "its engine holds weights in bf16", "Leave it out"
            )
        if role == "rollout" and own.precision not in (None, "bf16"):
            yield _fault(
                "verl-has-not", "rollout.precision", own.precision, "its engine holds weights in bf16", "Leave it out"
            )
        taken = _SAID | (set(_OFFLOADS) if role in _TRAINER else set())
        for item in fields(RoleConfig):
            value = getattr(own, item.name)
            if item.name not in taken and value not in (None, False, 0, "none", "auto"):
                why = "pools do not say it"
                fix = "Plan the run: build_plan and to_verl_overrides write it, for roles that are all on the same GPUs"
                yield _fault("not-of-pools", f"{role}.{item.name}", value, why, fix)
    if config.comm_backend == "gloo":
        why = "verl's checkpoint engine has no gloo"
        yield _fault("verl-has-not", "comm_backend", "gloo", why, "Use nccl, nixl or mooncake")


def _pool_faults(config: ResourceConfig) -> Iterator[Finding]:
    """Ids that make no pools: pools share no GPU, take whole runs of a node, and together all GPUs there are."""
    owned = gpus_of(config)
    train = owned.get("actor", ())
    if not train:
        why, fix = "the trainer's pool needs to know how many GPUs it has", "Write device_ids: [0, 1], or how many"
        yield _fault("no-pool", "actor.device_ids", None, why, fix)
        return
    inside: tuple[Role, ...] = ("critic", "ref")
    for role in inside:
        if role in owned and set(owned[role]) != set(train):
            why = f"verl has it in the actor's pool, GPU {show_ids(train)}"
            yield _fault("ray-cannot", f"{role}.device_ids", _ids(owned[role]), why, "Leave it out")
    named: list[tuple[Role, tuple[int, ...]]] = [("actor", train)]
    apart: tuple[Role, ...] = ("rollout", "reward")
    for role in apart:
        ids = owned.get(role)
        if not ids or set(ids) == set(train):
            continue
        for other, theirs in named:
            if shared := set(ids) & set(theirs):
                why = f"it shares GPU {show_ids(tuple(shared))} with {other}, and two of Ray's pools share no GPU"
                yield _fault(
                    "ray-cannot",
                    f"{role}.device_ids",
                    _ids(ids),
                    why,
                    f"Give it the {other}'s GPUs, or others than those",
                )
        named.append((role, ids))
    if "rollout" in dict(named) and config.reward is not None and "reward" not in dict(named):
        why = "a rollout on GPUs of its own never pauses, so that verl wants a reward model on GPUs of its own too"
        yield _fault(
            "ray-cannot", "reward.device_ids", _ids(owned.get("reward", ())), why, "Name GPUs that nothing else has"
        )
    union = _union(owned)
    if gaps := [gpu for gpu in range(max(union)) if gpu not in union]:
        worst = max(named, key=lambda pool: max(pool[1]))[0]
        used = ",".join(map(str, sorted(union)))
        why = (
            f"Ray hands out the GPUs it sees, and GPU {show_ids(tuple(gaps))} would be among them, which nothing names"
        )
        fix = f"Start Ray with CUDA_VISIBLE_DEVICES={used} and name 0 to {len(union) - 1}, or use runner=local"
        yield _fault("ray-cannot", f"{worst}.device_ids", _ids(dict(named)[worst]), why, fix)
    for role, ids in named:
        if _extent(config.nodes, ids) is None:
            per = config.nodes.gpus if config.nodes else None
            why = f"a pool has as many GPUs on each of its nodes, and these lie unevenly on nodes of {per}"
            yield _fault("ray-cannot", f"{role}.device_ids", _ids(ids), why, "Name as many on each node")


def _extent(nodes: Nodes | None, ids: tuple[int, ...]) -> Any:
    """(nodes, GPUs on each) of a pool; None where they lie unevenly."""
    per = None if nodes is None else nodes.gpus
    if per is None:
        count = 1 if nodes is None else nodes.count
        return (count, len(ids) // count) if len(ids) % count == 0 else None
    on = [sum(gpu // per == node for gpu in ids) for node in sorted({gpu // per for gpu in ids})]
    return (len(on), on[0]) if len(set(on)) == 1 else None


def _sharded(role: Role, own: RoleConfig | None) -> dict[str, Any]:
    if own is None:
        return {}
    key = _FSDP[role]
    made: dict[str, Any] = {}
    if own.precision is not None:
        made[f"{key}.model_dtype"] = "bf16" if own.precision == "bf16" else "fp32"
    if own.precision == "fp32":
        made[f"+{key}.mixed_precision"] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return made | {f"{key}.{name}": value for name in _OFFLOADS if (value := getattr(own, name)) is not None}


def _rollout(
    config: ResourceConfig, owned: dict[Role, tuple[int, ...]], batch: int | None, mini: int | None
) -> dict[str, Any]:
    own = config.rollout or RoleConfig()
    made = _engine(_ROLLOUT, own)
    ids = owned.get("rollout")
    if not ids or set(ids) == set(owned["actor"]):
        return made
    nodes, gpus = _extent(config.nodes, ids)
    made |= {
        "trainer.v1.trainer_mode": "separate_async",
        # No copy of the engine on the trainer's GPUs: it is where it was said to be.
        "actor_rollout_ref.hybrid_engine": False,
        f"{_ROLLOUT}.nnodes": nodes,
        f"{_ROLLOUT}.n_gpus_per_node": gpus,
        f"{_ROLLOUT}.checkpoint_engine.backend": config.comm_backend or "nccl",
    }
    if batch is not None and mini is not None:
        if batch % mini:
            why = f"train_batch_size {batch} % mini-batch {mini} = {batch % mini}, not 0"
            raise ConfigError(_fault("batch-arithmetic", "train_batch_size", batch, why, "Choose a multiple"))
        made["trainer.v1.separate_async.parameter_sync_step"] = batch // mini
    return made


def _reward(config: ResourceConfig, owned: dict[Role, tuple[int, ...]]) -> dict[str, Any]:
    own = config.reward
    if own is None:
        return {}
    if own.strategy not in (None, *ENGINES):
        why = "verl has no reward model but a served one"
        notice("verl-strategy", "reward.strategy", own.strategy, why, "vllm, a server on the reward's pool")
    made = {f"{_REWARD}.enable": True, **_engine(f"{_REWARD}.rollout", own)}
    ids = owned.get("reward")
    if not ids or set(ids) == set(owned["actor"]):
        return made | {f"{_REWARD}.enable_resource_pool": False}
    nodes, gpus = _extent(config.nodes, ids)
    return made | {
        f"{_REWARD}.enable_resource_pool": True,
        f"{_REWARD}.nnodes": nodes,
        f"{_REWARD}.n_gpus_per_node": gpus,
        # On GPUs of its own verl puts the server to sleep once and never wakes it.
        f"{_REWARD}.rollout.free_cache_engine": False,
    }


def _engine(key: str, own: RoleConfig) -> dict[str, Any]:
    made: dict[str, Any] = {
        f"{key}.name": own.strategy if own.strategy in ENGINES else "vllm",
        f"{key}.tensor_model_parallel_size": own.tensor_parallel_size or 1,
    }
    if own.gpu_memory_utilization is not None:
        made[f"{key}.gpu_memory_utilization"] = own.gpu_memory_utilization
    arguments = own.vllm_args
    for item in fields(VllmArgs) if arguments is not None else ():
        value = getattr(arguments, item.name)
        if item.name == "engine_kwargs":
            made |= {f"+{key}.engine_kwargs.vllm.{name}": inner for name, inner in (value or {}).items()}
        elif value is not None:
            made[f"{key}.{item.name}"] = value
    return made


def _union(owned: dict[Role, tuple[int, ...]]) -> set[int]:
    return {gpu for ids in owned.values() for gpu in ids}


def _ids(ids: tuple[int, ...]) -> str:
    return f"[{show_ids(ids)}]"


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_written(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{escaped}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, "" if given is None else str(given), why, fix)
