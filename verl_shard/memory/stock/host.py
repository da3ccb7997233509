"""What the ranks of a node keep in its memory."""

from __future__ import annotations

from collections.abc import Mapping

from verl_shard.config.roles import Role, RoleConfig
from verl_shard.memory.stock import terms
from verl_shard.memory.stock.part import Part
from verl_shard.memory.stock.roles import StockRole


def host_parts(
    made: Mapping[Role, StockRole], roles: Mapping[Role, RoleConfig], n_reward: int, on_node: int
) -> tuple[Part, ...]:
    """Bytes on a node in the steady state. None of them was measured; a part of no bytes is left out.

    n_reward: parameters of a colocated reward server. on_node: ranks on it.
    """
    parts = [part for role in made.values() for part in _of_role(role, on_node)]
    rollout, reward, actor = roles.get("rollout"), roles.get("reward"), made["actor"]
    if rollout is not None and actor.own.lora_rank:
        base = actor.units.n_params - actor.units.n_trained
        size = terms.engine_weights(base, rollout.tensor_parallel_size or 1) * on_node
        parts.append(("rollout engine asleep (level 1)", size))
    if reward is not None:
        size = terms.engine_weights(n_reward, reward.tensor_parallel_size or 1) * on_node
        parts.append(("reward engine asleep (level 1)", size))
    return tuple(Part(name, size, "formula", False) for name, size in parts if size)


def load_part(made: Mapping[Role, StockRole], on_node: int) -> Part:
    """The largest checkpoint that the ranks of the first node read at once; roles are made one after the other."""
    sizes = [
        terms.host_load(
            role.units.n_params,
            role.held,
            tied=bool(getattr(getattr(role.module, "config", None), "tie_word_embeddings", False)),
            ranks_on_node=on_node,
            sources_on_node=1,
        )
        for role in made.values()
    ]
    return Part("checkpoint being read", max(sizes, default=0), "formula", False)


def _of_role(role: StockRole, on_node: int) -> list[tuple[str, int]]:
    name = role.role
    parts: list[tuple[str, int]] = []
    if name == "ref":
        pieces = _pieces(role)
        parts.append(("ref weights", role.weights * on_node))
        parts.append(("ref pinning", (terms.pinned(pieces) - sum(pieces)) * on_node))
        unused = terms.host_ref_gradients(role.units.n_params, role.ranks, role.held, role.backend)
        parts.append(("ref gradients, never used", unused * on_node))
    elif role.on_host:
        whole = role.weights + role.gradients + role.states
        parts.append((f"{name} offload_policy", whole * on_node))
    else:
        parts.append((f"{name} param_offload", role.weights * bool(role.own.param_offload) * on_node))
        parts.append((f"{name} optimizer_offload", role.states * bool(role.own.optimizer_offload) * on_node))
    return parts


def _pieces(role: StockRole) -> list[int]:
    """Bytes of what is pinned at once: fsdp a unit's shard, fsdp2 each tensor's."""
    sizes = [(unit.n_params,) if role.backend == "fsdp" else unit.params for unit in role.units.units]
    return [role.held * terms.shard(n, role.ranks) for group in sizes for n in group]
