"""The shape of verl's RFC #7269, both ways."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.common.errors import ConfigError
from verl_shard.config.resource_config import as_resource_config
from verl_shard.config.roles import ROLES, Nodes, ResourceConfig, RoleConfig
from verl_shard.config.topology import from_topology, to_topology

# The RFC's own examples: one pool for all, and a pool each.
HYBRID = {
    "topology": {
        "clusters": [{"name": "default", "nnodes": 2, "n_gpus_per_node": 8}],
        "device_pools": [{"name": "hybrid_pool", "cluster": "default", "nnodes": 2, "n_gpus_per_node": 8}],
        "models": [
            {"name": "actor", "worker": "actor", "config_key": "actor_rollout_ref", "resource_pool": "hybrid_pool"},
            {"name": "rollout", "worker": "rollout", "config_key": "actor_rollout_ref", "resource_pool": "hybrid_pool"},
        ],
    }
}
APART: dict[str, Any] = {
    "clusters": [{"name": "default", "nnodes": 5, "n_gpus_per_node": 8}],
    "device_pools": [
        {"name": "train_pool", "cluster": "default", "nnodes": 2, "n_gpus_per_node": 8},
        {"name": "infer_pool", "cluster": "default", "nnodes": 2, "n_gpus_per_node": 8},
    ],
    "models": [
        {"name": "actor", "worker": "actor", "config_key": "actor_rollout_ref", "resource_pool": "train_pool"},
        {"name": "rollout", "worker": "rollout", "config_key": "actor_rollout_ref", "resource_pool": "infer_pool"},
    ],
}
SPARE = {
    "name": "spare_pool", "cluster": "default", "nnodes": 1, "n_gpus_per_node": 8,
    "attributes": {"standby": True, "fault_tolerant": True, "protects": ["train_pool", "infer_pool"]},
}  # fmt: skip


def faults(call: Any, *given: Any, **more: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        call(*given, **more)
    return {finding.where: str(finding) for finding in caught.value.findings}


def test_the_rfcs_examples_are_configs() -> None:
    assert from_topology(HYBRID) == ResourceConfig(
        actor=RoleConfig(devices=tuple(range(16))),
        rollout=RoleConfig(devices=tuple(range(16))),
        colocation=(("actor", "rollout"),),
        nodes=Nodes(count=2, gpus=8),
    )
    apart = from_topology(APART)
    assert (apart.actor.devices, apart.rollout and apart.rollout.devices) == (tuple(range(16)), tuple(range(16, 32)))
    assert apart.colocation == (("actor",), ("rollout",))
    assert to_topology(from_topology(HYBRID)) == HYBRID
    assert to_topology(apart) == {"topology": APART}


def test_what_a_config_has_not_is_refused_by_name() -> None:
    wrong = {
        "clusters": APART["clusters"],
        "device_pools": [*APART["device_pools"], SPARE, {**SPARE, "attributes": {}, "nnodes": 2, "n_gpus_per_node": 4}],
        "models": [
            *APART["models"],
            {"name": "teacher", "worker": "teacher", "config_key": "distillation", "resource_pool": "infer_pool"},
            {"name": "ref", "worker": "ref", "config_key": "critic", "resource_pool": "pool", "device_range": [0, 4]},
            APART["models"][0],
        ],
    }
    found = faults(from_topology, wrong)
    for where, why in {
        "topology.device_pools.2.attributes": "no pools in reserve",
        "topology.device_pools.3.n_gpus_per_node": "a part of 2 nodes",
        "topology.device_pools.3.name": "several pools have it",
        "topology.device_pools": "the cluster has 40 GPUs",
        "topology.models.2.worker": "It has actor, critic, ref, reward, rollout",
        "topology.models.3.config_key": "verl has it in actor_rollout_ref",
        "topology.models.3.resource_pool": "there is no such pool",
        "topology.models.3.device_range": "a component has all GPUs of its pool",
        "topology.models.4.worker": "one model of a role",
    }.items():
        assert why in found.pop(where)
    assert list(found) == ["topology.device_pools.2.name", "topology.models.0.worker"]
    two = {**APART, "clusters": [*APART["clusters"], {"name": "b", "nnodes": 1, "n_gpus_per_node": 4}]}
    assert "there are 2 types of machines" in faults(from_topology, two)["topology.clusters"]
    assert list(faults(from_topology, {"topology": {"clusters": [{"name": "a"}], "models": []}})) == [
        "topology.clusters.0.nnodes", "topology.clusters.0.n_gpus_per_node", "topology.device_pools",
    ]  # fmt: skip


@pytest.mark.parametrize("given", [None, [], "x", {"topology": None}, {"topology": []}])
def test_what_is_no_topology(given: Any) -> None:
    assert "no clusters, device_pools and models" in faults(from_topology, given)["topology"]


@pytest.mark.parametrize(
    ("sizes", "where", "why"),
    [
        ([(1, 5), (1, 5)], "topology.device_pools.1.nnodes", "5 to 9, which are on 2 nodes"),
        ([(1, 4), (2, 8)], "topology.device_pools.1.nnodes", "4 to 19, which are on 3 nodes"),
        ([(2, 8), (1, 4), (1, 4)], "topology.device_pools.2.name", "no model is on it"),
    ],
)
def test_pools_that_a_config_cannot_say(sizes: list[tuple[int, int]], where: str, why: str) -> None:
    """None is made into GPUs of two machines where it asks for one, and none is lost."""
    pools = [
        {"name": name, "cluster": "default", "nnodes": nodes, "n_gpus_per_node": gpus}
        for name, (nodes, gpus) in zip(("train_pool", "infer_pool", "more"), sizes, strict=False)
    ]
    found = faults(from_topology, {**APART, "device_pools": pools})
    assert list(found) == [where]
    assert why in found[where]
    if where.endswith("nnodes"):  # the other way round they are whole nodes, or parts of one
        turned = from_topology(
            {**APART, "device_pools": [{**pools[0], "n_gpus_per_node": 8}, {**pools[1], "nnodes": 1}]}
        )
        assert turned.actor.devices == tuple(range(8))


ARTICLE = {
    "actor": {"device_type": "cuda", "device_ids": [0, 1], "strategy": "fsdp"},
    "reward": {"device_ids": [2], "strategy": "none"},
    "rollout": {
        "device_ids": [3],
        "strategy": "vllm",
        "vllm_args": {"gpu_memory_utilization": 0.85, "enforce_eager": False},
    },
    "comm_backend": "nccl",
    "timeout_seconds": 180,
    "nodes": {"gpus": 4, "card": "a100-80g"},
}


def test_what_a_topology_has_not_is_refused_by_name() -> None:
    config = as_resource_config(ARTICLE)
    found = faults(to_topology, config)
    assert list(found) == [
        "actor.strategy", "reward.strategy", "rollout.strategy", "rollout.vllm_args", "rollout.gpu_memory_utilization",
        "comm_backend", "timeout_seconds", "nodes.card",
    ]  # fmt: skip
    assert 'leave_out=["strategy"]' in found["actor.strategy"]
    assert "rollout.vllm_args = enforce_eager:" in found["rollout.vllm_args"]
    elsewhere = ("strategy", "vllm_args", "comm_backend", "timeout_seconds", "card")
    made = to_topology(config, leave_out=elsewhere)["topology"]
    assert made["clusters"] == [{"name": "default", "nnodes": 1, "n_gpus_per_node": 4}]
    assert made["device_pools"] == [
        {"name": "train_pool", "cluster": "default", "nnodes": 1, "n_gpus_per_node": 2},
        {"name": "reward_pool", "cluster": "default", "nnodes": 1, "n_gpus_per_node": 1},
        {"name": "infer_pool", "cluster": "default", "nnodes": 1, "n_gpus_per_node": 1},
    ]
    assert made["models"][1] == {
        "name": "reward", "worker": "reward", "config_key": "reward", "resource_pool": "reward_pool",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "where", "why"),
    [
        (
            {"actor": {"device_ids": [0, 1]}, "reward": {"device_ids": [1]}},
            "actor.device_ids",
            "shares a part of its GPUs",
        ),
        ({"actor": {"device_ids": [1, 2]}}, "device_ids", "from 0 on and without gaps"),
        ({"actor": {"device_ids": [0, 2]}, "ref": {"device_ids": [1]}}, "device_ids", "without gaps"),
        ({"actor": {}}, "actor.device_ids", "a pool for every model"),
        ({"actor": 1, "ref": {"device_type": "cpu"}}, "ref.device_type", "not this"),
        (
            {"actor": {"device_ids": "0-2"}, "ref": {"device_ids": "3-5"}, "nodes": {"count": 2, "gpus": 4}},
            "device_ids",
            "whole nodes of 4 GPUs or a part of one",
        ),
    ],
)
def test_gpus_that_make_no_pools(given: dict[str, Any], where: str, why: str) -> None:
    given = {**given, "actor": {"device_ids": 1}} if given["actor"] == 1 else given
    assert why in faults(to_topology, as_resource_config(given))[where]


@given(st.lists(st.sampled_from(ROLES), unique=True, min_size=1), st.data())
def test_what_was_said_comes_back(roles: list[Any], data: Any) -> None:
    roles = list(dict.fromkeys(["actor", *roles]))
    groups: list[list[Any]] = []
    for role in roles:
        if groups and data.draw(st.booleans()):
            groups[-1].append(role)
        else:
            groups.append([role])
    sizes = [data.draw(st.integers(1, 4)) for _ in groups]
    first, made = 0, {}
    for group, size in zip(groups, sizes, strict=True):
        made |= {role: RoleConfig(devices=tuple(range(first, first + size))) for role in group}
        first += size
    ordered = tuple(tuple(role for role in ROLES if role in group) for group in groups)
    config = ResourceConfig(**made, colocation=ordered, nodes=Nodes(count=1, gpus=first))
    assert from_topology(to_topology(config)) == config
