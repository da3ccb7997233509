"""The half of the `hf` rollout that lives in the training worker, beside the engine whose weights it generates with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from verl_shard.common.errors import RunError, config_error
from verl_shard.verl_plugin.rollout.generate import Response, Sampling, generation_of


def server_name(replica_rank: int) -> str:
    """The name under which Ray knows the server of a replica."""
    return f"verl_shard_hf_server_{replica_rank}"


class HFServerAdapter(BaseRollout):
    """Tells the server which weights are current. It moves none: server and engine share one module."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        if device_mesh is None:
            raise config_error(
                "hf-rollout-apart", "actor_rollout_ref.rollout.name", "hf",
                "it generates on the training engine's own module, so it cannot have a pool of its own",
                "Use trainer.v1.trainer_mode=sync or colocate_async, or rollout.name=vllm",
            )  # fmt: skip
        import torch.distributed

        self._rank = replica_rank if replica_rank >= 0 else torch.distributed.get_rank()
        self._server: Any = None

    @property
    def server(self) -> Any:
        # The server starts after this object; it is looked up when first needed.
        if self._server is None:
            self._server = ray.get_actor(server_name(self._rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(
        self, weights: Iterable[Any], wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        """The optimizer changed the shared module in place: only the step is news."""
        del weights
        if wire_format != "named_tensors":
            raise RunError(f"the hf rollout has no copy of the weights to patch, so no wire format {wire_format!r}")
        if global_steps is not None:
            from verl_shard.verl_plugin.engine import ENGINES

            ENGINES["actor"].step = global_steps + 1
            await self.server.set_global_steps.remote(global_steps)


def generate_in_worker(
    _worker: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    pad: int,
    eos: Sequence[int],
    max_new_tokens: Sequence[int] | None = None,
    max_rows: int | None = None,
    enforce_eager: bool = False,
) -> list[Response]:
    """Generates inside the training worker. The server calls it through Ray's `__ray_call__`.

    max_new_tokens: of each prompt, where they are not all the sampling's. max_rows: at most so many at once.
    enforce_eager: without CUDA graphs.

    Such a call runs on a small fiber stack of Ray's asynchronous actor. On CUDA `generate` overflows it, and the process
    dies later with SIGSEGV in boost::fibers: so the work is done on an ordinary thread.
    """
    from verl_shard.runtime.dispatch import input_device
    from verl_shard.runtime.memory_record import record_memory
    from verl_shard.verl_plugin.engine import ENGINES

    if "actor" not in ENGINES:
        raise config_error(
            "hf-rollout-without-engine", "actor_rollout_ref.rollout.name", "hf",
            "this worker has no device_map actor whose module it could generate on",
            "Use model_engine=device_map, or another rollout",
        )  # fmt: skip
    engine = ENGINES["actor"]

    def work() -> list[Response]:
        generation = generation_of(engine)
        with record_memory("rollout", "generate", engine.step) as record, engine.autocast():
            made = generation.run(
                prompts, seeds, sampling,
                pad_token_id=pad, eos_token_ids=eos, device=input_device(engine.module),
                max_new_tokens=max_new_tokens, max_rows=max_rows, enforce_eager=enforce_eager,
            )  # fmt: skip
            if generation.ladder.taken:
                record["remedies"] = generation.ladder.taken
            return made

    with ThreadPoolExecutor(1, thread_name_prefix="verl_shard_generate") as pool:
        return pool.submit(work).result()
