"""The rollout of a local run: the actor's own module generates, with the seeds that the `hf` rollout has on Ray."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from verl_shard.common.errors import config_error
from verl_shard.verl_plugin.local.batch import Row, Sample
from verl_shard.verl_plugin.local.group import Processes
from verl_shard.verl_plugin.rollout.adapter import generate_in_worker
from verl_shard.verl_plugin.rollout.generate import RequestSeeds, Response, Sampling, stop_tokens

Request = tuple[tuple[int, ...], int]
"""A prompt and the seed of its response."""


class Rollout:
    """Responses to prompts. A response depends on run, step, prompt and how often the prompt was asked before, not on
    what shares its batch or which process makes it."""

    def __init__(self, config: Any, model: Any, processes: Processes) -> None:
        self.config, self.processes = config.actor_rollout_ref.rollout, processes
        self.tokenizer = model.tokenizer
        self._prompts = create_continuous_token_builder(
            model.tokenizer,
            hf_model_type=getattr(model.hf_config, "model_type", None),
            chat_template_kwargs=config.data.get("apply_chat_template_kwargs", {}),
            processor=model.processor,
        )
        self.eos, self.pad = stop_tokens(model.tokenizer, model.generation_config)
        self._positions = self.config.max_model_len or getattr(model.hf_config, "max_position_embeddings", None)
        self._seeds = RequestSeeds(self.config.seed, 0)

    def set_steps_done(self, steps: int) -> None:
        """The weights are those after so many steps."""
        self._seeds.after(steps)

    def generate(self, rows: Sequence[Row], *, validate: bool = False) -> list[Sample]:
        """n responses to each prompt, those to one prompt next to each other."""
        config = self.config.val_kwargs if validate else self.config
        sampling = Sampling(
            max_new_tokens=self.config.response_length,
            temperature=float(config.temperature),
            top_k=int(config.top_k or -1),
            top_p=float(config.top_p),
            ignore_eos=self.config.ignore_eos,
        )
        asked = [(row, uid, self._request(row)) for row in rows for uid in [str(uuid.uuid4())] for _ in range(config.n)]
        answers = self._answer([request for _, _, request in asked], sampling)
        keep = bool(self.config.calculate_log_probs)
        return [
            Sample(row, uid, request[0], tuple(answer.token_ids), tuple(answer.log_probs) if keep else ())
            for (row, uid, request), answer in zip(asked, answers, strict=True)
        ]

    def _request(self, row: Row) -> Request:
        prompt = tuple(self._prompts.build_initial_tokens(list(row["raw_prompt"])))
        if len(prompt) > self.config.prompt_length:
            raise config_error(
                "prompt-too-long", "prompt", f"{len(prompt)} tokens",
                f"max_prompt_length is {self.config.prompt_length}", "Raise it, or take the prompt out of the data",
            )  # fmt: skip
        if self._positions and len(prompt) + self.config.response_length > self._positions:
            raise config_error(
                "prompt-too-long", "prompt", f"{len(prompt)} tokens",
                f"with a response of {self.config.response_length} that is more than the model's {self._positions} positions",
                "Lower max_new_tokens, take shorter prompts, or a model with more positions",
            )  # fmt: skip
        return prompt, self._seeds.next(prompt)

    def _answer(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        # As HFServer: a fixed order, and similar lengths to each process.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i][0]), *requests[i]))
        mine = self.processes.share(order)

        def work() -> list[Response]:
            if not mine:
                return []
            prompts, seeds = [requests[i][0] for i in mine], [requests[i][1] for i in mine]
            most, rows = [sampling.max_new_tokens] * len(mine), self.config.max_num_seqs
            eager = bool(self.config.enforce_eager)
            return generate_in_worker(None, prompts, seeds, sampling, self.pad, self.eos, most, rows, eager)

        answers = self.processes.gather(work)
        placed = dict(zip(order, answers, strict=True))
        return [placed[i] for i in range(len(requests))]
