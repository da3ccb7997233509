"""One copy of a reward model on each node, in a process of its own, however many reward workers ask for scores.

The process is a Ray actor, known by name: whoever needs it first makes it. It belongs to none of the workers (the end of one
is not its end), and to the run: it ends when the last worker that asked it is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_shard.common.errors import RunError
from verl_shard.common.notices import run_dir
from verl_shard.runtime.scoring_model import ScoringModel
from verl_shard.verl_plugin.reward.batches import Batches
from verl_shard.verl_plugin.reward.threads import take_cores

LOOK_S = 5.0
"""How often the actor looks for the workers that it scores for."""
_CONCURRENCY = 10_000


def actor_name(path: str, settings: Mapping[str, Any], node: str, run: Path | None) -> str:
    """The name of the actor with this model, so loaded, for this run on this node."""
    said = json.dumps([path, settings, str(run)], sort_keys=True, default=str)
    return f"verl_shard_reward_{hashlib.sha256(said.encode()).hexdigest()[:16]}_{node}"


class RewardActor:
    """Loads the model when it is first asked, on the devices that the settings name: Ray gives it none of its own."""

    def __init__(self, path: str, settings: Mapping[str, Any], look_s: float = LOOK_S) -> None:
        self._path, self._settings, self._look_s = path, dict(settings), look_s
        self._model: ScoringModel | None = None
        self._broken: Exception | None = None
        self._batches = Batches(self._score)
        self._users: dict[str, Any] = {}
        self._watch: asyncio.Task[None] | None = None

    def _score(self, conversations: Sequence[Any]) -> list[float]:
        """On a thread of its own: Ray's are too small for a model."""
        if self._broken is not None:
            raise self._broken
        if self._model is None:
            try:
                self._model = ScoringModel(self._path, **self._settings)
            except Exception as error:
                # All workers are told the same; none has it tried again.
                self._broken = error
                raise
        take_cores(self._model)
        return self._model.score(conversations)

    async def score(self, conversations: Sequence[Any]) -> list[float]:
        """The scores of conversations, as ScoringModel.score; a fault of one request is not that of others."""
        return await self._batches.score(conversations)

    async def serve(self, user: str, handle: Any) -> None:
        """Takes note of a worker that will ask. Once there was one, the actor lives as long as any of them."""
        self._users[user] = handle
        if self._watch is None:
            self._watch = asyncio.create_task(self._end_with_users())

    async def _end_with_users(self) -> None:
        while self._users:
            await asyncio.sleep(self._look_s)
            for user, handle in list(self._users.items()):
                try:
                    await asyncio.wait_for(handle.__ray_ready__.remote(), self._look_s)
                except TimeoutError:
                    # It is busy, so it is there.
                    continue
                except RayActorError:
                    del self._users[user]
        ray.kill(ray.get_runtime_context().current_actor)


class NodeModel:
    """The reward model of this node, as those see it that ask for scores. Can be used from several threads."""

    def __init__(self, path: str, settings: Mapping[str, Any], look_s: float = LOOK_S) -> None:
        self._path, self._settings, self._look_s = path, dict(settings), look_s
        self._found: Any = None
        self._lock = threading.Lock()

    def score(self, conversations: Sequence[Any]) -> list[float]:
        """As ScoringModel.score. Raises RunError, too, when the process of the model died."""
        try:
            found: list[float] = ray.get(self.actor.score.remote([list(one) for one in conversations]))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise RunError(
                f"the process that scores with {self._path} ended: {str(error).splitlines()[0]} "
                "Ray's log of it, and of the machine's memory, says why"
            ) from error
        return found

    @property
    def actor(self) -> Any:
        """The actor of this node, made if there is none yet."""
        with self._lock:
            if self._found is None:
                context = ray.get_runtime_context()
                node, user = context.get_node_id(), context.get_actor_id()
                self._found = (
                    ray.remote(RewardActor)
                    .options(
                        name=actor_name(self._path, self._settings, node, run_dir()),
                        get_if_exists=True,
                        # What a worker makes ends with it, unless it is detached.
                        lifetime="detached" if user is not None else None,
                        num_cpus=0,
                        num_gpus=0,
                        max_concurrency=_CONCURRENCY,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                    )
                    .remote(self._path, self._settings, self._look_s)
                )
                if user is not None:
                    ray.get(self._found.serve.remote(user, context.current_actor))
            return self._found
