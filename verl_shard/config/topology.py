"""The `topology` block of verl's RFC #7269 (a draft of August 2026): clusters, pools of their GPUs, models on pools.

It says which model is on which pool and nothing else, so that what else a ResourceConfig says is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from pydantic import Field

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.config.device_ids import show_ids
from verl_shard.config.resource_rules import faults_of, gpus_of
from verl_shard.config.roles import ROLES, Count, Nodes, ResourceConfig, Role, RoleConfig, VllmArgs
from verl_shard.config.validated import config_class, read

CONFIG_KEYS: dict[Role, str] = {
    "actor": "actor_rollout_ref",
    "critic": "critic",
    "ref": "actor_rollout_ref",
    "reward": "reward",
    "rollout": "actor_rollout_ref",
}
"""Where verl's configuration has each role."""


@config_class
class Cluster:
    """Machines of one type."""

    name: str
    nnodes: Count
    n_gpus_per_node: Count


@config_class
class Pool:
    """GPUs of a cluster."""

    name: str
    cluster: str
    nnodes: Count
    n_gpus_per_node: Count
    attributes: dict[str, Any] = Field(default_factory=dict)


@config_class
class Placed:
    """A model on a pool."""

    name: str
    worker: str
    config_key: str
    resource_pool: str
    device_range: Any = None


@config_class
class Topology:
    """The three levels."""

    clusters: tuple[Cluster, ...]
    device_pools: tuple[Pool, ...]
    models: tuple[Placed, ...]


def from_topology(given: Mapping[str, Any]) -> ResourceConfig:
    """The components of a topology, with or without its root key: pools take the cluster's GPUs in their order.

    Raises ConfigError with every fault: what the RFC does not have, and what a ResourceConfig has not: several types of
    machines, pools in reserve or without a model, teachers, two models of a role, a part of a pool.
    """
    inner = given.get("topology", given) if isinstance(given, Mapping) else given
    if not isinstance(inner, Mapping):
        why, fix = "no clusters, device_pools and models", "Give the block that verl's RFC #7269 describes"
        raise config_error("not-a-topology", "topology", type(inner).__name__, why, fix)
    topology = read(Topology, inner, "topology")
    if faults := list(_topology_faults(topology)):
        raise ConfigError(faults)
    (cluster,) = topology.clusters
    ids = _ids_of_pools(topology)
    roles: dict[str, Any] = {model.worker: RoleConfig(devices=ids[model.resource_pool]) for model in topology.models}
    groups = tuple(
        group
        for pool in topology.device_pools
        if (
            group := tuple(
                role for role in ROLES for m in topology.models if (m.worker, m.resource_pool) == (role, pool.name)
            )
        )
    )
    roles.setdefault("actor", RoleConfig())
    nodes = Nodes(count=cluster.nnodes, gpus=cluster.n_gpus_per_node)
    return ResourceConfig(**roles, colocation=groups, nodes=nodes)


def to_topology(config: ResourceConfig, *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The topology of a config, ready for YAML: roles on the same GPUs share a pool.

    leave_out: fields that verl's own configuration says, such as "strategy" and "vllm_args" (with all that may be in them);
        they are not refused.
    Raises ConfigError with every fault: settings that a topology does not have, and GPUs that make no pools.
    """
    faults = faults_of(config)
    if not faults:
        faults = [*_other_settings(config, leave_out), *_no_pools(config)]
    if faults:
        raise ConfigError(faults)
    owned = gpus_of(config)
    groups: dict[tuple[int, ...], list[Role]] = {}
    for role, ids in sorted(owned.items(), key=lambda item: item[1]):
        groups.setdefault(tuple(sorted(ids)), []).append(role)
    total = sum(map(len, groups))
    nodes, per = _machines(config.nodes, total)
    pools, models = [], []
    for ids, roles in groups.items():
        name = _pool_name(roles)
        whole = len(ids) % per == 0
        size = (
            {"nnodes": len(ids) // per, "n_gpus_per_node": per} if whole else {"nnodes": 1, "n_gpus_per_node": len(ids)}
        )
        pools.append({"name": name, "cluster": "default", **size})
        models += [(role, name) for role in roles]
    return {
        "topology": {
            "clusters": [{"name": "default", "nnodes": nodes, "n_gpus_per_node": per}],
            "device_pools": pools,
            "models": [
                {"name": role, "worker": role, "config_key": CONFIG_KEYS[role], "resource_pool": pool}
                for role, pool in sorted(models, key=lambda item: ROLES.index(item[0]))
            ],
        }
    }


def _topology_faults(topology: Topology) -> Iterator[Finding]:
    if len(topology.clusters) != 1:
        why = f"there are {len(topology.clusters)} types of machines, and a ResourceConfig has one"
        yield _fault("does-not-map", "topology.clusters", len(topology.clusters), why, "Convert each by itself")
        return
    cluster = topology.clusters[0]
    names = [pool.name for pool in topology.device_pools]
    for n, pool in enumerate(topology.device_pools):
        at = f"topology.device_pools.{n}"
        if pool.attributes:
            why = "a ResourceConfig has no pools in reserve and no other attributes"
            yield _fault("does-not-map", f"{at}.attributes", pool.attributes, why, "Leave out the pool")
        if pool.cluster != cluster.name:
            yield _fault(
                "no-such-cluster", f"{at}.cluster", pool.cluster, "there is no such cluster", f"Use {cluster.name}"
            )
        if names.count(pool.name) > 1:
            yield _fault("name-twice", f"{at}.name", pool.name, "several pools have it", "Give each its own")
        if pool.n_gpus_per_node > cluster.n_gpus_per_node or pool.nnodes > cluster.nnodes:
            why = f"the cluster has {cluster.nnodes} nodes of {cluster.n_gpus_per_node} GPUs"
            yield _fault("too-large", f"{at}.nnodes", f"{pool.nnodes} x {pool.n_gpus_per_node}", why, "Make it smaller")
        elif pool.nnodes > 1 and pool.n_gpus_per_node != cluster.n_gpus_per_node:
            why = f"a part of {pool.nnodes} nodes is no run of GPU ids"
            yield _fault("does-not-map", f"{at}.n_gpus_per_node", pool.n_gpus_per_node, why, "Take whole nodes")
        else:
            first, last = _first_gpu(topology, n), _first_gpu(topology, n + 1) - 1
            on = last // cluster.n_gpus_per_node - first // cluster.n_gpus_per_node + 1
            if on > pool.nnodes:
                why = f"pools take GPUs in their order, and it would have {first} to {last}, which are on {on} nodes"
                yield _fault("does-not-map", f"{at}.nnodes", pool.nnodes, why, "Put larger pools first")
        if (
            not pool.attributes
            and names.count(pool.name) == 1
            and pool.name not in [model.resource_pool for model in topology.models]
        ):
            why = "no model is on it, and a ResourceConfig has no pools in reserve"
            yield _fault("does-not-map", f"{at}.name", pool.name, why, "Leave out the pool")
    asked, there = (
        sum(p.nnodes * p.n_gpus_per_node for p in topology.device_pools),
        cluster.nnodes * cluster.n_gpus_per_node,
    )
    if asked > there:
        yield _fault("too-large", "topology.device_pools", asked, f"the cluster has {there} GPUs", "Make pools smaller")
    workers = [model.worker for model in topology.models]
    for n, model in enumerate(topology.models):
        at = f"topology.models.{n}"
        if model.worker not in ROLES:
            why, fix = "a ResourceConfig has no such component", f"It has {', '.join(ROLES)}"
            yield _fault("does-not-map", f"{at}.worker", model.worker, why, fix)
        elif model.config_key != CONFIG_KEYS[model.worker]:
            right = CONFIG_KEYS[model.worker]
            yield _fault(
                "does-not-map", f"{at}.config_key", model.config_key, f"verl has it in {right}", f"Write {right}"
            )
        if workers.count(model.worker) > 1:
            why = "a ResourceConfig has one model of a role"
            yield _fault("does-not-map", f"{at}.worker", model.worker, why, "Leave out the others")
        if model.resource_pool not in names:
            fix = f"Use one of {', '.join(names)}"
            yield _fault("no-such-pool", f"{at}.resource_pool", model.resource_pool, "there is no such pool", fix)
        if model.device_range is not None:
            why = "a component has all GPUs of its pool"
            yield _fault("does-not-map", f"{at}.device_range", model.device_range, why, "Make it a pool of its own")


def _first_gpu(topology: Topology, n: int) -> int:
    """The id that the n-th pool begins with."""
    return sum(pool.nnodes * pool.n_gpus_per_node for pool in topology.device_pools[:n])


def _ids_of_pools(topology: Topology) -> dict[str, tuple[int, ...]]:
    return {
        pool.name: tuple(range(_first_gpu(topology, n), _first_gpu(topology, n + 1)))
        for n, pool in enumerate(topology.device_pools)
    }


def _other_settings(config: ResourceConfig, leave_out: Collection[str]) -> Iterator[Finding]:
    left = {"devices", *leave_out} | (
        {"tensor_parallel_size", "gpu_memory_utilization"} if "vllm_args" in leave_out else set()
    )
    for role, own in config.roles.items():
        for item in fields(RoleConfig):
            value = getattr(own, item.name)
            if item.name in left or value is None or (item.name, value) == ("device_type", "cuda"):
                continue
            if isinstance(value, VllmArgs):
                value = ", ".join(name for name, given in asdict(value).items() if given is not None)
            fix = f'Say it in verl\'s configuration ({CONFIG_KEYS[role]}), and give leave_out=["{item.name}"]'
            yield _fault(
                "does-not-map", f"{role}.{item.name}", value, "a topology says where a model is, and not this", fix
            )
    for name in ("comm_backend", "timeout_seconds"):
        value = getattr(config, name)
        if value is not None and name not in leave_out:
            yield _fault("does-not-map", name, value, "a topology does not have it", f'Give leave_out=["{name}"]')
    for name in ("card", "memory", "host_memory"):
        value = getattr(config.nodes, name, None)
        if value is not None and name not in leave_out:
            yield _fault(
                "does-not-map",
                f"nodes.{name}",
                value,
                "a cluster has a number of GPUs only",
                f'Give leave_out=["{name}"]',
            )


def _no_pools(config: ResourceConfig) -> Iterator[Finding]:
    owned = gpus_of(config)
    for role, own in config.roles.items():
        if role not in owned and own.device_type != "cpu":
            yield _fault(
                "does-not-map", f"{role}.device_ids", None, "a topology has a pool for every model", "Say which GPUs"
            )
    sets = list(dict.fromkeys(tuple(sorted(ids)) for ids in owned.values() if ids))
    for role, ids in owned.items():
        mine = set(ids)
        if others := [other for other in sets if mine & set(other) and mine != set(other)]:
            why = f"it shares a part of its GPUs with [{show_ids(others[0])}], and pools share none"
            yield _fault(
                "does-not-map", f"{role}.device_ids", f"[{show_ids(ids)}]", why, "Give both the same, or others"
            )
            return
    order = [gpu for ids in sorted(sets) for gpu in ids]
    if order != list(range(len(order))):
        why = "pools take a cluster's GPUs in their order, from 0 on and without gaps"
        given = "; ".join(f"[{show_ids(ids)}]" for ids in sets)
        yield _fault("does-not-map", "device_ids", given, why, "Number them so")
        return
    _, per = _machines(config.nodes, len(order))
    for ids in sets:
        if len(ids) % per and ids[0] // per != ids[-1] // per:
            why = f"a pool is whole nodes of {per} GPUs or a part of one"
            yield _fault("does-not-map", "device_ids", f"[{show_ids(ids)}]", why, "Number them so")


def _machines(nodes: Nodes | None, total: int) -> tuple[int, int]:
    """(nodes, GPUs on each): as the config says it, else all on one."""
    if nodes is None or nodes.gpus is None:
        count = 1 if nodes is None else nodes.count
        return count, max(1, -(-total // count))
    return nodes.count, nodes.gpus


def _pool_name(roles: list[Role]) -> str:
    """As the RFC's examples name them."""
    if "actor" in roles:
        return "hybrid_pool" if "rollout" in roles else "train_pool"
    return "infer_pool" if "rollout" in roles else f"{roles[0]}_pool"


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, "" if given is None else str(given), why, fix)
