"""The half of the `hf` rollout that answers requests: it gathers them into batches and has the training worker generate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from verl_shard.common.errors import config_error
from verl_shard.verl_plugin.rollout.adapter import generate_in_worker
from verl_shard.verl_plugin.rollout.generate import RequestSeeds, Sampling, stop_tokens

GATHER_S = 0.02
"""A batch starts once no request has come for so long: a step's requests come a few milliseconds apart."""


@dataclass(frozen=True)
class _Request:
    prompt: tuple[int, ...]
    seed: int
    sampling: Sampling
    answer: asyncio.Future[Any]


def _apart_from_length(sampling: Sampling) -> Sampling:
    """Requests that are alike in this share a batch: each row of it ends where its own response does."""
    return replace(sampling, max_new_tokens=0)


class HFServer:
    """A Ray actor, one for each training process. Its methods are those verl calls on a rollout server."""

    def __init__(self, config: Any, model_config: Any, worker: Any) -> None:
        self.config = omega_conf_to_dataclass(config)
        model = omega_conf_to_dataclass(model_config)
        self.worker = worker
        self.eos, self.pad = stop_tokens(model.tokenizer, model.generation_config)
        self.max_model_len = self.config.max_model_len or getattr(model.hf_config, "max_position_embeddings", None)
        self.global_steps: int | None = None
        self.waiting: list[_Request] = []
        self.seeds = RequestSeeds(self.config.seed, self.global_steps)
        self.last_arrival = 0.0
        self.pump: asyncio.Task[None] | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **other: Any,
    ) -> TokenOutput:
        """Continues one prompt; the answer comes with the batch that the request falls into."""
        del request_id
        media = {"image_data": image_data, "video_data": video_data, "audio_data": other.get("audio_data")}
        if given := [name for name, value in media.items() if value]:
            raise config_error(
                "media-prompt", "prompt", ", ".join(given), "the hf rollout takes text only", "Use rollout.name=vllm"
            )
        limit = self.config.response_length
        if self.max_model_len is not None:
            limit = min(limit, self.max_model_len - len(prompt_ids))
        if limit < 1:
            raise config_error(
                "prompt-too-long", "prompt", f"{len(prompt_ids)} tokens",
                f"the model's {self.max_model_len} positions leave no room for a response",
                "Lower data.max_prompt_length, or take a model with more positions",
            )  # fmt: skip
        sampling = Sampling.from_request(sampling_params, limit=limit, ignore_eos=self.config.ignore_eos)
        prompt = tuple(prompt_ids)
        seed = self.seeds.next(prompt)
        loop = asyncio.get_running_loop()
        request = _Request(prompt, seed, sampling, loop.create_future())
        self.waiting.append(request)
        self.last_arrival = loop.time()
        if self.pump is None or self.pump.done():
            self.pump = asyncio.create_task(self._answer_all())
        response = await request.answer
        return TokenOutput(
            token_ids=response.token_ids,
            log_probs=response.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": self.global_steps},
        )

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            await self.open.wait()
            while (quiet := loop.time() - self.last_arrival) < GATHER_S:
                await asyncio.sleep(GATHER_S - quiet)
            # A fixed order, so that the same requests make the same batches.
            self.waiting.sort(key=lambda request: (len(request.prompt), request.prompt, request.seed))
            sampling = _apart_from_length(self.waiting[0].sampling)
            batch = [request for request in self.waiting if _apart_from_length(request.sampling) == sampling]
            taken = set(map(id, batch))
            self.waiting = [request for request in self.waiting if id(request) not in taken]
            await self._answer(batch)

    async def _answer(self, batch: list[_Request]) -> None:
        prompts, seeds = [request.prompt for request in batch], [request.seed for request in batch]
        most = [request.sampling.max_new_tokens for request in batch]
        sampling = replace(batch[0].sampling, max_new_tokens=max(most))
        try:
            responses = await self.worker.__ray_call__.remote(
                generate_in_worker, prompts, seeds, sampling, self.pad, self.eos, most, self.config.max_num_seqs,
                bool(self.config.enforce_eager),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - whatever it is, each request that waits must hear of it
            for request in batch:
                # One whose caller has given up is done already.
                if not request.answer.done():
                    request.answer.set_exception(error)
            return
        for request, response in zip(batch, responses, strict=True):
            if not request.answer.done():
                request.answer.set_result(response)

    async def set_global_steps(self, global_steps: int) -> None:
        """From now on requests are answered with the weights after this many steps."""
        self.global_steps = global_steps
        self.seeds.after(global_steps)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        del tags
        self.open.set()

    async def sleep(self) -> None:
        """Returns when no request is unanswered: the caller is about to train on the module that they are answered with."""
        if self.pump is not None:
            await self.pump

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Nothing is aborted: a batch under way ends within one response length, and waiting ones are answered after it."""
        del reject_request
        return {"aborted_count": 0, "request_ids": []}

    async def resume_generation(self) -> None:
        self.open.set()

    async def clear_kv_cache(self) -> None:
        """Nothing to do: the cache lives no longer than a batch."""

    async def release_kv_cache(self) -> None:
        """Nothing to do: the cache lives no longer than a batch."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do: the cache lives no longer than a batch."""

    async def start_profile(self, **_: Any) -> None:
        """Nothing to do: generation runs in the training worker and is in its trace."""

    async def stop_profile(self) -> None:
        """Nothing to do: generation runs in the training worker and is in its trace."""
