"""The reward model: its pool, its engine, and whether it would ever be awake."""

from __future__ import annotations

from collections.abc import Iterator

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.tree import MISSING, Composed

_MODEL = "reward.reward_model"
_ROLLOUT = f"{_MODEL}.rollout"


def find(made: Composed) -> Iterator[Finding]:
    """Nothing where there is neither a reward model nor a pool for one."""
    enabled, own = made.on(f"{_MODEL}.enable"), made.on(f"{_MODEL}.enable_resource_pool")
    if own:
        yield from _pool(made, enabled=enabled)
    if not enabled:
        named = [key for key in (f"{_MODEL}.model_path", f"{_ROLLOUT}.name") if key in made.given]
        for key in named[:1]:
            why = f"{_MODEL}.enable is false, so that there is no reward model"
            yield made.fault(key, why, f"{_MODEL}.enable=True", "warning", "no-effect")
        return
    name = made.text(f"{_ROLLOUT}.name")
    if made.value(f"{_ROLLOUT}.name") is MISSING and f"{_ROLLOUT}.name" not in made.given:
        yield made.fault(f"{_ROLLOUT}.name", "it has no default", f"{_ROLLOUT}.name=vllm", code="no-rollout")
    elif name == "hf":
        # verl_shard's own server says what it cannot have, when the trainer is made and here. It imports torch.
        from verl_shard.verl_plugin.reward import settings

        yield from settings.find_faults(made.config)
        return
    if made.value(f"{_MODEL}.model_path") is None:
        yield made.fault(f"{_MODEL}.model_path", "no model is named", f"{_MODEL}.model_path=MODEL", code="no-model")
    yield from _engine(made, own=own)
    key = "reward.custom_reward_function.path"
    if not own and made.value(key) is not None and made.text("reward.reward_manager.source") == "register":
        why = (
            "verl's own managers look for data_source in what a colocated reward model is given, which has none: "
            "KeyError: 'data_source'"
        )
        fix = "Leave it out, give the model a pool of its own, or name a manager with reward.reward_manager.source=importlib"
        yield made.fault(key, why, fix, "warning", "colocated-reward")


def _pool(made: Composed, *, enabled: bool) -> Iterator[Finding]:
    for name in ("nnodes", "n_gpus_per_node"):
        key, size = f"{_MODEL}.{name}", made.number(f"{_MODEL}.{name}")
        if size is not None and size < 1:
            default = "" if key in made.given else ", which is verl's default"
            why = f"enable_resource_pool is true, and a pool of {size} {name.split('_')[0]}{default} is refused"
            yield made.fault(key, why, f"{key}=1", code="reward-pool")
    if not enabled:
        key = f"{_MODEL}.enable_resource_pool"
        why = f"the GPUs are taken all the same: {_MODEL}.enable is false"
        yield made.fault(key, why, f"{key}=False, or {_MODEL}.enable=True", "warning", "reward-pool")
        return
    key = f"{_ROLLOUT}.free_cache_engine"
    if made.on(key) and made.text(f"{_ROLLOUT}.name") != "hf":
        why = "in a pool of its own the server is put to sleep when it starts, and only the colocated way wakes it"
        yield made.fault(key, why, f"{key}=False", "warning", "sleeps-for-ever")


def _engine(made: Composed, *, own: bool) -> Iterator[Finding]:
    pool = _MODEL if own else "trainer"
    nodes, gpus = made.number(f"{pool}.nnodes"), made.number(f"{pool}.n_gpus_per_node")
    tp, dp = made.number(f"{_ROLLOUT}.tensor_model_parallel_size"), made.number(f"{_ROLLOUT}.data_parallel_size")
    if None in (nodes, gpus, tp, dp):
        return
    world, size, key = (nodes or 0) * (gpus or 0), (tp or 0) * (dp or 1), f"{_ROLLOUT}.tensor_model_parallel_size"
    if world < 1:
        return
    if size < 1:
        yield made.fault(key, "a number of 1 or more is needed", f"{key}=1", code="world")
    elif world % size:
        default = "" if key in made.given else " (verl's default)"
        why = f"a server is on {size} GPUs{default}, and its pool has {world}: {world} % {size} = {world % size}, not 0"
        best = next(n for n in range(min(size, world), 0, -1) if world % n == 0)
        yield made.fault(key, why, f"{key}={best}", code="world")
