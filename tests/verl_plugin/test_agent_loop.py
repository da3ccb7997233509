"""verl's agent loop workers, with failures reported."""

from __future__ import annotations

import inspect

from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from verl_shard.verl_plugin import hooks
from verl_shard.verl_plugin.agent_loop import ShardAgentLoopWorker
from verl_shard.verl_plugin.failures import FailureReporting


def test_the_worker_is_verls_with_reporting_in_front() -> None:
    verls = hooks.class_behind(AgentLoopWorkerTQ)
    assert inspect.isclass(verls)
    order = ShardAgentLoopWorker.__mro__
    assert order.index(FailureReporting) < order.index(verls)


def test_what_is_wrapped_has_the_arguments_that_verl_passes() -> None:
    verls = hooks.class_behind(AgentLoopWorkerTQ)
    assert list(inspect.signature(verls._compute_score).parameters)[:3] == ["self", "outputs", "kwargs"]
    first, second, *_ = inspect.signature(verls._run_agent_loop).parameters
    assert (first, second) == ("self", "sampling_params")
    # What a failure is reported under: these two are among the arguments of every rollout.
    assert 'kwargs["uid"], kwargs["session_id"]' in inspect.getsource(verls._agent_loop_postprocess)
    assert "session_id=i" in inspect.getsource(verls._run_prompt)
