"""The replicas of a served reward model behind our router: verl's manager of them, which can add and remove some in a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.experimental.reward_loop import reward_loop
from verl.experimental.reward_loop.reward_model import RewardModelManager
from verl.workers.config import HFModelConfig

from verl_shard.common.errors import DoesNotFitError, RunError
from verl_shard.verl_plugin.reward.router import Router

ROUTER = "verl_shard_reward_router"
"""The router's name as a Ray actor, for all processes of the run."""
_CONCURRENCY = 10_000


class ServedReplicas(RewardModelManager):
    """verl's manager, with our router instead of verl's, whose list of replicas is fixed.

    A replica that ended is left out; waking, sleeping and scoring go on with the others.
    """

    def _initialize_router(self) -> None:
        node = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        options = {
            "name": ROUTER,
            "num_cpus": 0,
            "num_gpus": 0,
            "max_concurrency": _CONCURRENCY,
            "scheduling_strategy": node,
        }
        self.router = ray.remote(Router).options(**options).remote(self.server_addresses)
        self.router_address = ray.get(self.router.launch.remote(ray.util.get_node_ip_address().strip("[]")))

    def add_replica(self, address: str | None = None) -> str:
        """Starts one more replica, on GPUs that the cluster has free, and has requests go to it; its address.

        address: of a server that is there already, for which nothing is started. Raises DoesNotFitError where the GPUs are not
        free, ConfigError for a model that does not load there, and RunError for an address without a server.
        """
        if address is not None:
            _ask(self.router.add.remote(address))
            return address
        last = self.rollout_replicas[-1]
        free = ray.available_resources().get("GPU", 0)
        if free < last.world_size:
            raise DoesNotFitError(
                f"another replica takes {last.world_size} GPUs, and {free:g} of the cluster's are not taken. "
                "Add a node to it, or remove a replica before"
            )
        made = type(last)(
            replica_rank=max(replica.replica_rank for replica in self.rollout_replicas) + 1,
            config=self.config.rollout,
            model_config=HFModelConfig(path=self.config.model_path),
            gpus_per_node=self.config.n_gpus_per_node,
            is_reward_model=True,
        )
        self._run_all([made.init_standalone()])
        _ask(self.router.add.remote(made._server_address))
        self._keep([*self.rollout_replicas, made])
        found: str = made._server_address
        return found

    def remove_replica(self, address: str) -> None:
        """Sends no more requests to the replica at `address`, and ends it once it has answered those that it has.

        One that was added by its address is left running. Raises RunError for the last replica, and where there is none.
        """
        _ask(self.router.remove.remote(address))
        self._end([replica for replica in self.rollout_replicas if replica._server_address == address])

    def wake_up(self) -> None:
        """Wakes all replicas. Raises RunError when all have ended."""
        self._tell("wake_up")

    def sleep(self) -> None:
        """Puts all replicas to sleep. Raises RunError when all have ended."""
        self._tell("sleep")

    def _tell(self, what: str) -> None:
        gone: dict[Any, str] = {}

        async def tell(replica: Any) -> None:
            try:
                await getattr(replica, what)()
            except RayActorError as error:
                gone[replica] = str(error).splitlines()[0]

        self._run_all([tell(replica) for replica in self.rollout_replicas])
        for replica, why in gone.items():
            _ask(self.router.leave_out.remote(replica._server_address, why))
        self._end(list(gone))
        if gone and not _ask(self.router.addresses.remote()):
            raise RunError(f"every replica of the reward model ended; the last: {list(gone.values())[-1]}")

    def _end(self, replicas: Sequence[Any]) -> None:
        """Ends servers and seats; GPUs that were taken for a replica alone are given back."""
        for replica in replicas:
            for process in (*replica.servers, *replica.workers):
                ray.kill(process)
            if replica.rollout_mode.name == "STANDALONE":
                for group in replica.resource_pool.pgs:
                    ray.util.remove_placement_group(group)
        if replicas:
            self._keep([replica for replica in self.rollout_replicas if replica not in replicas])

    def _keep(self, replicas: list[Any]) -> None:
        self.rollout_replicas = replicas
        self.server_handles = [replica._server_handle for replica in replicas]
        self.server_addresses = [replica._server_address for replica in replicas]


def use_our_router() -> None:
    """Has verl's reward loop, in this process, make our manager."""
    reward_loop.RewardModelManager = ServedReplicas


def _ask(called: Any) -> Any:
    """What the router says, or raises, without Ray's words."""
    try:
        return ray.get(called)
    except RayTaskError as error:
        raise error.cause from None
