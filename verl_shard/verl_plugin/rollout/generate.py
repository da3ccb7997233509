"""Generation on the training engine's own module: transformers' `generate`, and sampling that does not depend on batching.

Each request has its own stream of random numbers, so a response is the same whatever other requests share its batch and in
whatever order they came: a run that is killed and resumed samples what an unkilled one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_shard.common.errors import config_error
from verl_shard.common.seeds import derive_seed

# What a folder's generation_config.json may hold that changes the choice of tokens: each turned off, by generate's own names.
_NOT_THE_FOLDERS: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    **dict.fromkeys(
        (
            "temperature", "top_k", "top_p", "min_new_tokens", "max_time", "stop_strings", "guidance_scale", "sequence_bias",
            "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
            "exponential_decay_length_penalty", "watermarking_config", "prompt_lookup_num_tokens",
        )
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen.

    temperature: 0 takes the likeliest token. top_k: at most so many candidates, -1 or 0 for all. top_p: the smallest set of
    candidates with this probability. repetition_penalty: as in transformers.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False

    _KNOWN = frozenset(
        {"temperature", "top_k", "top_p", "repetition_penalty", "logprobs", "max_tokens", "max_new_tokens"}
    )

    @classmethod
    def from_request(cls, params: dict[str, Any], *, limit: int, ignore_eos: bool) -> Sampling:
        """Reads verl's sampling parameters; a parameter that this rollout does not know is refused by name."""
        if unknown := sorted(set(params) - cls._KNOWN):
            raise config_error(
                "unknown-sampling-parameter", "sampling_params", ", ".join(unknown), "the hf rollout does not have it",
                f"Use some of {', '.join(sorted(cls._KNOWN))}, or another rollout",
            )  # fmt: skip
        wanted = params.get("max_tokens") or params.get("max_new_tokens") or limit
        return cls(
            max_new_tokens=min(int(wanted), limit),
            temperature=float(params.get("temperature", 1.0)),
            top_k=int(params.get("top_k") or -1),
            top_p=float(params.get("top_p", 1.0)),
            repetition_penalty=float(params.get("repetition_penalty", 1.0)),
            ignore_eos=ignore_eos,
        )


@dataclass(frozen=True)
class Response:
    """Token ids up to and with the end-of-sequence token, and the log-probability of each under the sampling distribution."""

    token_ids: list[int]
    log_probs: list[float]


def stop_tokens(tokenizer: Any, generation_config: Any) -> tuple[list[int], int]:
    """(ids that end a response, the id that pads), from a model's generation_config.json, else from its tokenizer."""
    eos = getattr(generation_config, "eos_token_id", None)
    eos = tokenizer.eos_token_id if eos is None else eos
    ends = list(eos) if isinstance(eos, list | tuple) else [eos]
    return ends, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]


class RequestSeeds:
    """The seed of each request: of the run's seed, the steps that the weights have behind them, the prompt, and how often
    it was asked for since. The n responses to one prompt differ by that, and not by arrival among others.
    """

    def __init__(self, seed: int, steps_done: int | None) -> None:
        self._seed, self._steps_done = seed, steps_done
        self._asked: Counter[tuple[int, ...]] = Counter()

    def after(self, steps_done: int) -> None:
        """From now on requests are answered with the weights after so many steps."""
        self._steps_done = steps_done
        self._asked.clear()

    def next(self, prompt: tuple[int, ...]) -> int:
        """Of one more request."""
        made = derive_seed(self._seed, self._steps_done, self._asked[prompt], *prompt)
        self._asked[prompt] += 1
        return made


class _RepetitionPenalty:
    """transformers' penalty on tokens that have been, except that padding has not been.

    transformers' own counts the padding token as seen in the rows that are padded, which depend on their neighbours.
    """

    def __init__(self, penalty: float, prompt_mask: torch.Tensor) -> None:
        self.penalty, self.prompt_mask = penalty, prompt_mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counted = torch.ones_like(input_ids)
        counted[:, : self.prompt_mask.shape[1]] = self.prompt_mask
        seen = torch.zeros_like(scores, dtype=counted.dtype).scatter_add_(1, input_ids, counted) > 0
        return torch.where(seen, torch.where(scores < 0, scores * self.penalty, scores / self.penalty), scores)


class _InverseCdfSampler:
    """A logits processor that chooses each row's token with that row's own uniform number.

    transformers would draw one multinomial for the whole batch from the global generator; the token of a row would then
    depend on its neighbours. The processor leaves the chosen token alone in the running, and keeps its log-probability.
    """

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        uniforms = [
            torch.rand(sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        self.uniforms = torch.stack(uniforms)
        self.greedy = sampling.temperature == 0
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        log_probs = torch.log_softmax(scores.float(), dim=-1)
        if self.greedy:
            chosen = log_probs.argmax(dim=-1, keepdim=True)
        else:
            cumulative = log_probs.double().exp().cumsum(dim=-1)
            uniform = self.uniforms[:, len(self.log_probs), None].to(scores.device).double() * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, uniform, right=True).clamp_(max=scores.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
) -> list[Response]:
    """Continues each prompt. `seeds` has one seed for each prompt; results are in the order of the prompts.

    prompts: token ids, of any lengths; they are padded on the left to shape (batch, longest).
    """
    from transformers import LogitsProcessorList
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1

    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(_RepetitionPenalty(sampling.repetition_penalty, attention_mask.to(device)))
    if sampling.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    sampler = _InverseCdfSampler(seeds, sampling)
    processors.append(sampler)

    stops = [] if sampling.ignore_eos else list(eos_token_ids)
    was_training = model.training
    model.eval()
    try:
        sequences = model.generate(  # type: ignore[operator]
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            logits_processor=processors,
            # The processors above have done the choosing.
            **_NOT_THE_FOLDERS,
            max_new_tokens=sampling.max_new_tokens,
            pad_token_id=pad_token_id,
            eos_token_id=stops or None,
            use_cache=True,
        )
    finally:
        model.train(was_training)

    tokens = sequences[:, width:].tolist()
    log_probs = torch.stack(sampler.log_probs, dim=1).tolist()
    responses = []
    for row, scores in zip(tokens, log_probs, strict=True):
        length = next((at + 1 for at, token in enumerate(row) if token in stops), len(row))
        responses.append(Response(row[:length], scores[:length]))
    return responses
