"""verl's agent loop workers, reporting what fails in them."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_shard.verl_plugin import hooks
from verl_shard.verl_plugin.failures import FailureReporting


class ShardAgentLoopWorker(FailureReporting, hooks.class_behind(AgentLoopWorkerTQ)):  # type: ignore[misc]
    """An agent loop worker whose failures are counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hooks.make_agent_loops_directly()


class ShardAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with such workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(ShardAgentLoopWorker)
