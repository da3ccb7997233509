"""GPUs, nodes and CPUs against what the configuration wants of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.tree import MISSING, Composed

A, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
NODES, GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel", "mindspeed", "device_map")
ROLLOUTS = ("vllm", "sglang", "trtllm", "hf")
CPUS_A_GPU = 3
"""Each bundle of verl's pools asks for so many (max_colocate_count)."""


@dataclass(frozen=True)
class Machines:
    """What there is. gpus: by node. cpus and host_memory (bytes): of each node."""

    gpus: tuple[int, ...] = ()
    cpus: int | None = None
    host_memory: int | None = None


def find(made: Composed, machines: Machines) -> Iterator[Finding]:
    """Of the training pool, the engines in it, and the machines."""
    yield from _engines(made)
    for key in (NODES, GPUS):
        number = made.number(key)
        if number is not None and number < 1:
            yield made.fault(key, "verl divides by the number of GPUs, which would be 0", f"{key}=1", code="no-gpu")
    if made.text("trainer.device") == "cpu" and made.strategy != "device_map":
        why = "verl overwrites it with what it finds, and has no CPU engine of its own"
        fix = "Leave it out, or use model_engine=device_map of verl_shard with VERL_PLATFORM=cpu"
        yield made.fault("trainer.device", why, fix, "warning", "no-effect")
    world = made.world
    if world is not None and world > 0:
        yield from _rollout(made, world)
        yield from _shards(made, world)
        yield from _sequence(made, world)
        yield from _there(made, machines, world)
    yield from _cpus(made, machines)


def _engines(made: Composed) -> Iterator[Finding]:
    for key in (f"{A}.strategy", "critic.strategy"):
        name = made.text(key)
        if name and name not in STRATEGIES and (key != "critic.strategy" or made.has_critic):
            near = get_close_matches(name, STRATEGIES, 1, 0.0)[0]
            why = "no such engine; verl says so in the worker only"
            yield made.fault(key, why, f"{key}={near}", code="unknown-strategy")
    actor, critic = made.strategy, made.text("critic.strategy")
    if made.has_critic and critic and critic != actor and {actor, critic} == {"fsdp", "fsdp2"}:
        why = f"the actor has {actor}; nothing forbids it, and few mean it"
        yield made.fault("critic.strategy", why, f"critic.strategy={actor}", "warning", "two-strategies")
    key = f"{RO}.name"
    name, set_ = made.text(key), made.value(key)
    if set_ is MISSING and key not in made.given:
        engine = "hf" if made.strategy == "device_map" else "vllm"
        yield made.fault(key, "it has no default", f"{key}={engine}", code="no-rollout")
    elif name and name not in ROLLOUTS:
        near = get_close_matches(name, ROLLOUTS, 1, 0.0)[0]
        yield made.fault(key, "no such rollout", f"{key}={near}", code="unknown-rollout")
    elif name == "hf" and made.strategy != "device_map":
        why = (
            f"verl has no hf rollout since 0.7, and verl_shard's goes with model_engine=device_map, not {made.strategy}"
        )
        yield made.fault(key, why, f"{key}=vllm, or model_engine=device_map", code="no-such-pair")
    elif name and name != "hf" and made.strategy == "device_map":
        why = "the device_map engine gives its weights to the hf rollout only"
        yield made.fault(key, why, f"{key}=hf", code="no-such-pair")
    mode = made.text(f"{RO}.mode")
    if mode and mode != "async":
        yield made.fault(f"{RO}.mode", "only async is left", f"Leave it out, or {RO}.mode=async", code="removed")
    trainer = made.text("trainer.v1.trainer_mode")
    modes = ("sync", "colocate_async", "separate_async")
    if trainer and trainer not in modes and made.strategy != "device_map":
        near = get_close_matches(trainer, modes, 1, 0.0)[0]
        yield made.fault(
            "trainer.v1.trainer_mode", "no such trainer", f"trainer.v1.trainer_mode={near}", code="unknown-mode"
        )


def _rollout(made: Composed, world: int) -> Iterator[Finding]:
    tp, dp, pp = (made.number(f"{RO}.{kind}_parallel_size") for kind in ("tensor_model", "data", "pipeline_model"))
    if pp is not None and pp > 1:
        key = f"{RO}.pipeline_model_parallel_size"
        yield made.fault(key, "verl has it for no rollout yet", f"{key}=1", code="not-implemented")
    if tp is None or dp is None or made.text("trainer.v1.trainer_mode") == "separate_async":
        return
    key, size = f"{RO}.tensor_model_parallel_size", tp * dp
    if size < 1:
        yield made.fault(key, "a number of 1 or more is needed", f"{key}=1", code="world")
    elif world % size:
        product = f"{tp} x data_parallel_size {dp} = {size}" if dp != 1 else str(tp)
        default = "" if key in made.given else " (verl's default)"
        why = f"an engine is on {product} GPUs{default}, and {world} % {size} = {world % size}, not 0; the worker asserts it"
        best = next(n for n in range(min(tp, world), 0, -1) if world % (n * dp) == 0 or n == 1)
        yield made.fault(key, why, f"{key}={best}", code="world")
    ep = made.number(f"{RO}.expert_parallel_size")
    if ep is not None and ep > 1 and ep != size and made.text(f"{RO}.name") != "trtllm":
        key = f"{RO}.expert_parallel_size"
        why = f"it must be 1 or tensor_model_parallel_size x data_parallel_size = {size}"
        yield made.fault(key, why, f"{key}={size}", code="world")


def _shards(made: Composed, world: int) -> Iterator[Finding]:
    if not made.sharded:
        return
    sections = [(f"{A}.fsdp_config", True), (f"{REF}.fsdp_config", made.has_ref), ("critic.fsdp", made.has_critic)]
    for section, used in sections:
        key = f"{section}.fsdp_size"
        size = made.number(key)
        if not used or size is None or size < 0 or size >= world:
            continue
        if size == 0 or world % size:
            rest = f"{world} % {size} = {world % size}, not 0" if size else "there is no group of none"
            why = f"{rest}: ranks would be outside of every shard group (TypeError: NoneType is not subscriptable)"
            yield made.fault(key, why, f"{key}=-1", code="world")
        elif size == 1 and made.strategy == "fsdp":
            why = f"FSDP1 with groups of one on {world} GPUs fails to synchronize its weights (verl issue 7494)"
            yield made.fault(key, why, f"{key}=-1, or strategy=fsdp2", code="world")


def _sequence(made: Composed, world: int) -> Iterator[Finding]:
    key = f"{A}.ulysses_sequence_parallel_size"
    sp = made.number(key)
    if sp is None or sp <= 1 or not made.sharded:
        return
    if world % sp:
        why = f"{world} GPUs % {sp} = {world % sp}, not 0"
        best = next(n for n in range(min(sp, world), 0, -1) if world % n == 0)
        yield made.fault(key, why, f"{key}={best}", code="world")
    if not made.on("actor_rollout_ref.model.use_remove_padding"):
        why = "a sequence is only cut over GPUs where inputs are packed, and use_remove_padding is false"
        yield made.fault(key, why, "actor_rollout_ref.model.use_remove_padding=True", code="world")


def pools_of(made: Composed) -> dict[str, tuple[str, int, int]]:
    """(key of its GPUs, nodes, GPUs a node) by pool, of those that verl would make."""
    pools = {"training": (GPUS, made.number(NODES) or 0, made.number(GPUS) or 0)}
    model = "reward.reward_model"
    if made.on(f"{model}.enable_resource_pool"):
        pools["reward"] = (
            f"{model}.n_gpus_per_node", made.number(f"{model}.nnodes") or 0, made.number(f"{model}.n_gpus_per_node") or 0,
        )  # fmt: skip
    if made.text("trainer.v1.trainer_mode") == "separate_async":
        pools["rollout"] = (
            f"{RO}.n_gpus_per_node",
            made.number(f"{RO}.nnodes") or 0,
            made.number(f"{RO}.n_gpus_per_node") or 0,
        )
    if made.on("distillation.enabled"):
        at = "distillation"
        pools["teacher"] = (
            f"{at}.n_gpus_per_node",
            made.number(f"{at}.nnodes") or 0,
            made.number(f"{at}.n_gpus_per_node") or 0,
        )
    return pools


def _there(made: Composed, machines: Machines, world: int) -> Iterator[Finding]:
    if not machines.gpus or made.strategy == "device_map":
        return
    pools = pools_of(made)
    wanted, there = sum(nodes * gpus for _, nodes, gpus in pools.values()), sum(machines.gpus)
    shown = " + ".join(f"{nodes} x {gpus} ({name})" for name, (_, nodes, gpus) in pools.items())
    nodes = made.number(NODES) or 1
    if wanted > there:
        why = f"{shown} = {wanted} GPUs, and there are {there}; verl waits for the rest, or stops"
        yield made.fault(GPUS, why, f"{GPUS}={max((there - wanted + world) // nodes, 1)}", code="gpus")
        return
    for key, pool_nodes, gpus in pools.values():
        enough = sum(1 for node in machines.gpus if node >= gpus)
        if gpus and enough < pool_nodes:
            by_node = ", ".join(map(str, machines.gpus))
            why = f"{pool_nodes} nodes of {gpus} GPUs are wanted, and the nodes have {by_node}: Ray would wait for ever"
            least = sorted(machines.gpus, reverse=True)[min(pool_nodes, len(machines.gpus)) - 1]
            yield made.fault(key, why, f"{key}={least}", code="unequal-nodes")
    if wanted < there and "trainer.n_gpus_per_node" not in made.given:
        why = f"{shown} = {wanted} of {there} GPUs are used"
        yield made.fault(GPUS, why, f"{GPUS}={there // nodes}", "warning", "gpus")


def _cpus(made: Composed, machines: Machines) -> Iterator[Finding]:
    key = "ray_kwargs.ray_init.num_cpus"
    said, gpus = made.number(key), made.number(GPUS) or 0
    pools = pools_of(made)
    here = sum(gpus for _, nodes, gpus in pools.values() if nodes)
    wanted = CPUS_A_GPU * (here if (made.number(NODES) or 1) == 1 else gpus)
    if said is not None and said < wanted:
        why = f"verl asks Ray for {CPUS_A_GPU} CPUs with each GPU, {wanted} a node, and waits in silence when it has fewer"
        yield made.fault(key, why, f"{key}={wanted + 8}", code="cpus")
    elif said is None and machines.cpus is not None and machines.cpus < wanted:
        why = (
            f"verl asks Ray for {CPUS_A_GPU} CPUs with each GPU, {wanted} a node, and waits: there are {machines.cpus}"
        )
        yield made.fault(key, why, f"{key}={wanted + 8} (Ray counts what it is told)", code="cpus")
