"""Starts the server of an `hf` rollout beside its training worker."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.single_controller.ray.base import RayClassWithInitArgs
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_shard.common.errors import config_error
from verl_shard.verl_plugin.rollout.adapter import server_name
from verl_shard.verl_plugin.rollout.server import HFServer


def _node_of(_worker: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


class HFReplica(RolloutReplica):
    """One training process and its server; or a reward model, which is a server of its own."""

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """verl's workers of a pool of its own take weights from a trainer; a reward model's have none to take."""
        if not self.is_reward_model:
            return super().get_ray_class_with_init_args()
        from verl_shard.verl_plugin.reward.replica import RewardSeat

        return RayClassWithInitArgs(cls=ray.remote(RewardSeat))

    async def launch_servers(self) -> None:
        if self.is_reward_model:
            from verl_shard.verl_plugin.reward.replica import launch_reward_server

            await launch_reward_server(self)
            return
        if self.is_teacher_model or self.rollout_mode is not RolloutMode.HYBRID:
            raise config_error(
                "hf-rollout-apart", "rollout.name", "hf",
                "this rollout generates on the actor's own module; beside it it serves reward models only",
                "Use rollout.name=vllm for teacher models and for a rollout with a pool of its own",
            )  # fmt: skip
        worker = self.workers[0]
        server = (
            ray.remote(HFServer)
            .options(
                name=server_name(self.replica_rank),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    node_id=await worker.__ray_call__.remote(_node_of), soft=False
                ),
            )
            .remote(self.config, self.model_config, worker)
        )
        self.servers.append(server)
        self._server_handle = server
        self._server_address = f"hf://{self.replica_rank}"
