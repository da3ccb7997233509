"""A reward model behind an HTTP address, as verl's router wants its replicas, woken and put to sleep by verl."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from verl.workers.rollout.utils import run_uvicorn

from verl_shard.common.errors import ShardError
from verl_shard.runtime.scoring_model import TRAINING, ScoringModel
from verl_shard.verl_plugin.reward.batches import Batches
from verl_shard.verl_plugin.reward.threads import take_cores

Answer = dict[str, Any]


class RewardServer:
    """A Ray actor, one for each replica. Its methods are those verl calls on a reward model's server.

    It answers POST /score {"messages": [...]} with {"score": number}, and POST /classify {"input": text}, to which a chat
    template was applied, with {"data": [{"probs": [number]}]} as vLLM does. What cannot be scored is answered with
    {"error": what is wrong}: verl's router would make of any other status one without a message, and try again for minutes.
    """

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self._path, self._settings = path, {**TRAINING, **settings}
        self._model: Any = None
        self._conversations = Batches(lambda asked: self._ready().score(asked))
        self._texts = Batches(lambda asked: self._ready().score_texts(asked))
        self._serving: asyncio.Task[None] | None = None

    def _ready(self) -> ScoringModel:
        """The model, for this thread to score with."""
        take_cores(self._model)
        model: ScoringModel = self._model
        return model

    async def launch(self) -> str:
        """Loads the model, and serves it from then on; the address. Raises ConfigError as ScoringModel."""
        # On a thread of its own: Ray's are too small for a model.
        self._model = await asyncio.to_thread(ScoringModel, self._path, **self._settings)
        host = ray.util.get_node_ip_address().strip("[]")
        port, self._serving = await run_uvicorn(self._app(), None, host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _app(self) -> Any:
        from fastapi import FastAPI

        app = FastAPI()

        async def score(body: Answer) -> Answer:
            return await self._answer(self._conversations, body["messages"], lambda number: {"score": number})

        async def classify(body: Answer) -> Answer:
            return await self._answer(self._texts, body["input"], lambda number: {"data": [{"probs": [number]}]})

        app.post("/score")(score)
        app.post("/classify")(classify)
        return app

    async def _answer(self, batches: Batches, asked: Any, said: Any) -> Answer:
        try:
            answer: Answer = said((await batches.score([asked]))[0])
        except ShardError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - whoever asked must hear of it, whatever it is
            return {"error": f"{type(error).__name__}: {error}"}
        return answer

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Brings the model to its GPUs. One that was put to sleep for good wakes by itself when it is asked."""
        del tags
        await asyncio.to_thread(self._model.restore)

    async def sleep(self) -> None:
        """Takes the model off its GPUs, when no request is unanswered."""
        await self._conversations.settled()
        await self._texts.settled()
        await asyncio.to_thread(self._model.release)
