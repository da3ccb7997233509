"""What of a resource config cannot work whatever the machine: each role by itself, and the roles together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.common.units import parse_bytes
from verl_shard.config.cards import card_of_memory, find_card
from verl_shard.config.device_ids import show_ids
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import ROLES, TRAINED, Backend, Nodes, ResourceConfig, Role, RoleConfig

STRATEGIES: dict[Role, tuple[str, ...]] = {
    "actor": ("none", "device_map", "fsdp", "fsdp2"),
    "critic": ("none", "device_map", "fsdp", "fsdp2"),
    "ref": ("none", "device_map", "data_parallel", "fsdp", "fsdp2"),
    "reward": ("none", "device_map", "data_parallel", "vllm", "sglang"),
    "rollout": ("hf", "vllm", "sglang"),
}
"""What each role can do with its devices."""
ENGINES = ("vllm", "sglang")
SHARDED = ("fsdp", "fsdp2")
_ON_GPUS_ONLY = (*SHARDED, *ENGINES, "data_parallel")
_WHY_NOT = {
    "data_parallel": (
        "a role that is trained has a copy in each process",
        "Use device_map, and start as many processes with accelerate launch",
    ),
    "vllm": ("the engine generates and scores, and trains nothing", "Use fsdp2, or device_map"),
    "sglang": ("the engine generates and scores, and trains nothing", "Use fsdp2, or device_map"),
}


def n_gpus(own: RoleConfig) -> int | None:
    """How many GPUs a role asks for; None leaves it to the planner."""
    return len(own.devices) if isinstance(own.devices, tuple) else own.devices


def role_faults(role: Role, own: RoleConfig) -> Iterator[Finding]:
    """What of one role cannot work: `where` is a field of it."""
    strategy, n = own.strategy, n_gpus(own)
    if strategy is not None and strategy not in STRATEGIES[role]:
        why, fix = _WHY_NOT.get(strategy, ("", "")) if role in TRAINED else ("", "")
        why = why or f"{'an' if role == 'actor' else 'a'} {role} does not have it"
        yield _fault("strategy", "strategy", strategy, why, fix or f"Use one of {', '.join(STRATEGIES[role])}")
        return
    if strategy in _ON_GPUS_ONLY and own.device_type == "cpu":
        yield _fault("strategy", "strategy", strategy, "it works on GPUs, and device_type is cpu", "Use none")
    if strategy == "none" and n is not None and n > 1:
        many = "device_map lays it over them" + (
            ", data_parallel has a copy on each" if role in ("ref", "reward") else ""
        )
        yield _fault(
            "strategy-and-gpus", "strategy", strategy, f"it is for one GPU, and there are {n}", f"{many}; or name one"
        )
    if strategy == "data_parallel" and n == 1:
        yield _fault(
            "strategy-and-gpus", "strategy", strategy, "there is one GPU, and so one copy", "Use none, or more GPUs"
        )
    size = own.tensor_parallel_size
    if size is not None and n is not None and n % size:
        why = f"{n} GPUs % {size} of an engine = {n % size}, not 0"
        divisors = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        yield _fault("strategy-and-gpus", "tensor_parallel_size", size, why, f"Choose a divisor: {divisors}")
    if own.vllm_args is not None and strategy not in (None, "vllm"):
        yield _fault(
            "no-effect", "vllm_args", "", f"they are of strategy vllm, and this is {strategy}", "Leave them out"
        )
    for name in ("tensor_parallel_size", "gpu_memory_utilization"):
        if getattr(own, name) is not None and strategy not in (None, *ENGINES):
            why = f"it is of vllm and sglang, and this is {strategy}"
            yield _fault("no-effect", name, getattr(own, name), why, "Leave it out")


def backend_of(roles: Mapping[Role, RoleConfig]) -> Backend:
    """Who holds the weights, as the strategies say it."""
    named = [roles[role].strategy for role in ("actor", "critic", "ref") if role in roles]
    for backend in SHARDED:
        if backend in named:
            return backend  # type: ignore[return-value]
    rollout = roles.get("rollout")
    served = rollout is not None and rollout.strategy in ENGINES
    return "fsdp" if served and "device_map" not in named and "none" not in named else "device_map"


def backend_faults(backend: Backend, roles: Mapping[Role, RoleConfig]) -> Iterator[Finding]:
    """Trained roles and the reference are on one backend."""
    for role in ("actor", "critic", "ref"):
        own = roles.get(role)
        if own is None or own.strategy is None:
            continue
        theirs = own.strategy if own.strategy in SHARDED else "device_map"
        if theirs != backend:
            why = f"the run is on {backend}, which holds actor, critic and ref alike"
            yield _fault(
                "two-backends", f"{role}.strategy", own.strategy, why, f"Use {backend} for all of them, or for none"
            )


def groups_of(colocation: Any, roles: Sequence[Role]) -> tuple[tuple[Role, ...], ...]:
    """The roles that share GPUs, group by group; none where any may share with any."""
    if colocation == "separate":
        return tuple((role,) for role in roles)
    return () if colocation in (None, "shared") else tuple(colocation)


def colocation_faults(
    colocation: Any, roles: Mapping[Role, RoleConfig], known: Iterable[str] | None = None
) -> Iterator[Finding]:
    """Groups that contradict the devices or each other. known: the components that there are, if `roles` lacks some."""
    there = set(roles) if known is None else set(known)
    groups = groups_of(colocation, tuple(roles))
    named = [role for group in groups for role in group]
    for role in dict.fromkeys(role for role in named if named.count(role) > 1):
        yield _fault("role-twice", "colocation", role, "it is named more than once", "Name each component once")
    for role in dict.fromkeys(role for role in named if role not in there):
        yield _fault(
            "no-such-role", "colocation", role, "there is no such component in this file", "Leave it out, or add it"
        )
    owner: dict[int, Role] = {}
    for group in groups:
        mine: dict[int, Role] = {}
        asked: tuple[Role, tuple[int, ...] | int] | None = None
        for role in dict.fromkeys(group):
            own = roles.get(role)
            if own is None or own.devices is None:
                continue
            if asked is not None and not _may_be_same(own.devices, asked[1]):
                why = f"it shares GPUs with {asked[0]}, which has {_shown(asked[1])}"
                yield _fault(
                    "colocated-apart", f"{role}.devices", _shown(own.devices), why, "Give both the same, or one none"
                )
            asked = asked or (role, own.devices)
            for gpu in own.devices if isinstance(own.devices, tuple) else ():
                if gpu in owner:
                    why = f"{owner[gpu]} has GPU {gpu}, and colocation says that they share none"
                    yield _fault(
                        "device-twice", f"{role}.devices", _shown(own.devices), why, "Give each GPU to one group"
                    )
                    break
                mine[gpu] = role
        owner |= mine


def node_faults(nodes: Nodes | None, roles: Mapping[Role, RoleConfig]) -> Iterator[Finding]:
    """Machines that are not described as they can be, and ids that are beyond them."""
    if nodes is None:
        return
    if nodes.card is not None and nodes.memory is not None:
        yield _fault(
            "gpu-and-memory", "nodes.memory", nodes.memory, "the card says how much it has", "Give one of the two"
        )
    for name, parse in (("card", find_card), ("memory", card_of_memory), ("host_memory", parse_bytes)):
        value = getattr(nodes, name)
        if value is not None:
            try:
                parse(value, f"nodes.{name}")
            except ConfigError as error:
                yield from (
                    replace(fault, fix=fault.fix.replace("--gpu-memory", "nodes.memory")) for fault in error.findings
                )
    if nodes.gpus is None:
        if nodes.card is not None or nodes.memory is not None:
            yield _fault("how-many", "nodes.gpus", None, "which GPUs, but not how many", "Add gpus: 8")
        return
    yield from missing_gpus(roles, nodes.count * nodes.gpus)


def missing_gpus(roles: Mapping[Role, RoleConfig], there: int | Inventory) -> Iterator[Finding]:
    """Ids and counts that are more than there are."""
    n = there if isinstance(there, int) else len(there)
    for role, own in roles.items():
        many = isinstance(own.devices, int) and own.devices > n
        beyond = isinstance(own.devices, tuple) and any(id >= n for id in own.devices)
        if many or beyond:
            why = f"there are {n} GPUs" + (f", 0 to {n - 1}" if beyond else "")
            yield _fault("no-such-gpu", f"{role}.devices", _shown(own.devices), why, "Name GPUs that there are")


def faults_of(config: ResourceConfig) -> list[Finding]:
    """All of the above, of a config that was made in Python."""
    roles = config.roles
    found = [
        Finding(fault.level, fault.code, f"{role}.{fault.where}", fault.given, fault.why, fault.fix)
        for role, own in roles.items()
        for fault in role_faults(role, own)
    ]
    found += backend_faults(config.backend, roles)
    found += colocation_faults(config.colocation, roles)
    found += node_faults(config.nodes, roles)
    return found


def gpus_of(config: ResourceConfig) -> dict[Role, tuple[int, ...]]:
    """The GPU ids of each role that says which or how many: a count takes the first that are free to its group, or simply
    the first where roles may share. Empty for the CPU; a role that the planner places is not in it."""
    roles = config.roles
    groups = groups_of(config.colocation, tuple(roles))
    found = {role: own.devices for role, own in roles.items() if isinstance(own.devices, tuple)}
    taken = {gpu for ids in found.values() for gpu in ids}
    for group in groups:
        ids = next((found[role] for role in group if role in found), None)
        count = max((d for role in group if role in roles and isinstance(d := roles[role].devices, int)), default=0)
        if ids is None and count:
            free = (gpu for gpu in range(len(taken) + count) if gpu not in taken)
            ids = tuple(next(free) for _ in range(count))
            taken |= set(ids)
        if ids is not None:
            found |= {role: ids for role in group if role in roles and roles[role].device_type != "cpu"}
    for role, own in roles.items():
        if role not in found and isinstance(own.devices, int):
            found[role] = tuple(range(own.devices))
        if own.device_type == "cpu":
            found[role] = ()
    return {role: found[role] for role in ROLES if role in found}


def _may_be_same(one: tuple[int, ...] | int, other: tuple[int, ...] | int) -> bool:
    """Whether a count or ids may be the same GPUs as others."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return set(one) == set(other)
    first, second = (len(devices) if isinstance(devices, tuple) else devices for devices in (one, other))
    return first == second


def _shown(devices: tuple[int, ...] | int | None) -> str:
    return f"[{show_ids(devices)}]" if isinstance(devices, tuple) else str(devices)


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, "" if given is None else str(given), why, fix)
