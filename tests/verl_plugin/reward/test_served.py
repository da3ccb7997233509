"""verl's reward worker before a served model: what it asks, and what it makes of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from tensordict import TensorDict
from verl import DataProto

from verl_shard.common.errors import RunError
from verl_shard.verl_plugin.reward.served import ServedRewardManager, ask
from verl_shard.verl_plugin.reward.server import RewardServer


class Model:
    """Stands for a ScoringModel."""

    devices = ()

    def score(self, conversations: Any) -> list[float]:
        if any(conversation[-1]["content"] == "" for conversation in conversations):
            raise RunError("response 0 ('') is empty")
        return [float(len(conversation[-1]["content"])) for conversation in conversations]

    def score_texts(self, texts: Any) -> list[float]:
        return [1 / 0 if text == "bad" else float(len(text)) for text in texts]


@asynccontextmanager
async def _served(app: Any) -> AsyncIterator[str]:
    """The address of `app` on this machine, while it is served."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


def _with_server(use: Callable[[str], Any]) -> Any:
    """What `use` makes of the address of a server of Model."""

    async def run() -> Any:
        server = RewardServer("judge", {})
        server._model = Model()
        async with _served(server._app()) as address:
            return await use(address)

    return asyncio.run(run())


def _say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]


def test_a_score_over_http() -> None:
    async def use(address: str) -> list[Any]:
        return list(await asyncio.gather(*[ask(address, _say("x" * n)) for n in (1, 2, 3)]))

    assert _with_server(use) == [1.0, 2.0, 3.0]


def test_what_cannot_be_scored_is_said_as_it_is() -> None:
    async def use(address: str) -> list[Any]:
        return list(await asyncio.gather(ask(address, _say("")), ask(address, _say("yes")), return_exceptions=True))

    error, right = _with_server(use)
    assert isinstance(error, RunError)
    assert str(error) == "response 0 ('') is empty"
    assert right == 3.0


def test_a_text_is_classified_as_by_vllm() -> None:
    import aiohttp

    async def use(address: str) -> list[Any]:
        async with aiohttp.ClientSession() as session:
            answers = []
            for text in ("four", "bad"):
                async with session.post(f"http://{address}/classify", json={"input": text}) as response:
                    answers.append(await response.json())
            return answers

    good, bad = _with_server(use)
    assert good == {"data": [{"probs": [4.0]}]}
    assert bad == {"error": "ZeroDivisionError: division by zero"}


def test_an_address_without_a_server_is_named() -> None:
    with pytest.raises(RunError, match=r"the reward model at http://127.0.0.1:9/score does not answer"):
        asyncio.run(ask("127.0.0.1:9", _say("a")))

    async def without_our_path() -> Any:
        async with _served(FastAPI()) as address:
            return await ask(address, _say("a"))

    with pytest.raises(RunError, match="does not answer: 404"):
        asyncio.run(without_our_path())


def test_a_row_becomes_the_conversation() -> None:
    """As of a colocated model: prompts, responses and raw_prompt are all there is."""
    asked: list[Any] = []

    async def compute_score(address: str, messages: Any) -> float:
        asked.append((address, messages))
        return 0.25

    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(f"w{int(i)}" for i in ids))
    raw = np.empty(1, dtype=object)
    raw[0] = [{"role": "user", "content": "q"}]
    batch = TensorDict(
        {
            "prompts": torch.tensor([[0, 5]]), "responses": torch.tensor([[7, 8, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0, 0]]),
        },
        batch_size=1,
    )  # fmt: skip

    async def run() -> Any:
        manager = ServedRewardManager(None, tokenizer, compute_score, "1.2.3.4:5", None)
        return await manager.run_single(DataProto(batch=batch, non_tensor_batch={"raw_prompt": raw}))

    assert asyncio.run(run()) == {"reward_score": 0.25, "reward_extra_info": {"acc": 0.25}}
    assert asked == [("1.2.3.4:5", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w7 w8"}])]
