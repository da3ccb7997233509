"""Starts the server of a served reward model, on the GPUs that verl gave its replica."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.single_controller.base import Worker
from verl.utils.device import get_device_name

from verl_shard.common.errors import config_error
from verl_shard.verl_plugin.reward.server import RewardServer
from verl_shard.verl_plugin.reward.settings import scoring_settings

_NAMED_PLACES = ("device_map", "devices", "copies_on")
_CONCURRENCY = 10_000


class RewardSeat(Worker):
    """Holds one GPU of a replica's pool for the server. It computes nothing, and joins no process group."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


@dataclass(frozen=True)
class Seat:
    """Where a seat is. gpu: the id that Ray knows it by; None where there are none."""

    node: str
    gpu: str | None


def where_is(_worker: Any) -> Seat:
    """Called in a seat, through Ray's `__ray_call__`."""
    context = ray.get_runtime_context()
    ids = context.get_accelerator_ids().get("GPU", [])
    return Seat(str(context.get_node_id()), str(ids[0]) if ids else None)


def server_options(name: str, seats: list[Seat], *, cpu: bool, placed: bool) -> dict[str, Any]:
    """How Ray starts the server. placed: the user has named its devices, as the launching process sees them.

    Otherwise it sees the GPUs of its seats, and no others. Raises ConfigError for seats of several nodes.
    """
    if len({seat.node for seat in seats}) > 1:
        key = "reward.reward_model.rollout.tensor_model_parallel_size"
        why = "the GPUs of a replica are on several nodes, and one process has them all"
        raise config_error("replica-on-nodes", key, len(seats), why, "Set it to at most the GPUs of a node")
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": 0,
        "max_concurrency": _CONCURRENCY,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=seats[0].node, soft=False),
    }
    if not cpu:
        env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if not placed:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(seat.gpu) for seat in seats)
        elif visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            env["CUDA_VISIBLE_DEVICES"] = visible
        options["runtime_env"] = {"env_vars": env}
    return options


async def launch_reward_server(replica: Any) -> None:
    """Starts the replica's server, loads its model, and tells the replica its address. Raises what loading raises."""
    cpu = get_device_name() == "cpu"
    seats = [await worker.__ray_call__.remote(where_is) for worker in replica.workers]
    settings = scoring_settings(replica.config, len(seats), cpu=cpu)
    placed = any(name in (replica.config.engine_kwargs or {}).get("hf", {}) for name in _NAMED_PLACES)
    options = server_options(
        f"verl_shard_hf_reward_server_{replica.replica_rank}{replica.name_suffix}", seats, cpu=cpu, placed=placed
    )
    server = ray.remote(RewardServer).options(**options).remote(str(replica.model_config.path), settings)
    try:
        address = await server.launch.remote()
    except RayTaskError as error:
        raise error.cause from None
    replica.servers.append(server)
    replica._server_handle, replica._server_address = server, address
