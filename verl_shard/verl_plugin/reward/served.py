"""Scores of the served reward model: what verl's reward workers do when `reward.reward_model.rollout.name` is hf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_shard.common.errors import RunError


async def ask(address: str, messages: Sequence[dict[str, Any]]) -> float:
    """The score of a conversation, from the router at `address`. Raises RunError with what the server says of it."""
    url = f"http://{address}/score"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(url, json={"messages": list(messages)}) as response,
        ):
            # The router says so what it could not have answered; others say their errors otherwise.
            is_json = response.content_type == "application/json"
            answer = await response.json() if is_json else {}
            if "error" not in answer:
                response.raise_for_status()
    except aiohttp.ClientError as error:
        raise RunError(f"the reward model at {url} does not answer: {error}") from error
    if "error" in answer:
        raise RunError(answer["error"])
    return float(answer["score"])


class ServedRewardManager(RewardManagerBase):
    """Asks the served model. It needs the prompt's messages and the response only: a colocated model is given no more.

    compute_score: of (the router's address, messages); by default `ask`.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        # The model's own tokenizer is the server's business.
        del reward_model_tokenizer
        self.address = reward_router_address

    async def run_single(self, data: Any) -> dict[str, Any]:
        """{"reward_score": the score, "reward_extra_info": {"acc": the score}} of the last of the rows."""
        item = data[-1:][0]
        response = item.batch["responses"]
        length = int(item.batch["attention_mask"][-response.shape[-1] :].sum())
        text = self.tokenizer.decode(response[:length], skip_special_tokens=True)
        messages = [dict(message) for message in item.non_tensor_batch["raw_prompt"]]
        score = await self.compute_score(self.address, [*messages, {"role": "assistant", "content": text}])
        return {"reward_score": score, "reward_extra_info": {"acc": score}}
