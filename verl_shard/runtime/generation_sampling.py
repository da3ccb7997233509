"""How the tokens of responses are chosen: each request with its own random numbers, whatever requests are its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_shard.common.errors import config_error


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen.

    temperature: 0 takes the likeliest token. top_k: at most so many candidates, -1 or 0 for all. top_p: the smallest set of
    candidates with this probability. repetition_penalty: as in transformers. min_new_tokens: before so many, no token that
    would end the response is a candidate. stop_token_ids: end a response as the model's own do, with ignore_eos too.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    _KNOWN = frozenset(
        {
            "temperature", "top_k", "top_p", "repetition_penalty", "logprobs", "max_tokens", "max_new_tokens",
            "min_tokens", "min_new_tokens", "stop_token_ids",
        }
    )  # fmt: skip

    @classmethod
    def from_request(cls, params: dict[str, Any], *, limit: int, ignore_eos: bool) -> Sampling:
        """Reads verl's sampling parameters; a parameter that this rollout does not know is refused by name."""
        if unknown := sorted(set(params) - cls._KNOWN):
            raise config_error(
                "unknown-sampling-parameter", "sampling_params", ", ".join(unknown), "the hf rollout does not have it",
                f"Use some of {', '.join(sorted(cls._KNOWN))}, or another rollout",
            )  # fmt: skip
        most = min(int(params.get("max_tokens") or params.get("max_new_tokens") or limit), limit)
        return cls(
            max_new_tokens=most,
            temperature=float(params.get("temperature", 1.0)),
            top_k=int(params.get("top_k") or -1),
            top_p=float(params.get("top_p", 1.0)),
            repetition_penalty=float(params.get("repetition_penalty", 1.0)),
            ignore_eos=ignore_eos,
            min_new_tokens=min(int(params.get("min_tokens") or params.get("min_new_tokens") or 0), most),
            stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        )

    def stops(self, eos_token_ids: Sequence[int]) -> list[int]:
        """The tokens that end a response."""
        return [*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids]


@dataclass(frozen=True)
class Response:
    """Token ids up to and with the end-of-sequence token, and the log-probability of each under the sampling distribution."""

    token_ids: list[int]
    log_probs: list[float]


def uniforms_of(seeds: Sequence[int], width: int) -> torch.Tensor:
    """(seeds, width): the random numbers of each request, one for each of its tokens."""
    return torch.stack([torch.rand(width, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def warpers(sampling: Sampling) -> list[Any]:
    """transformers' own processors for temperature, top_k and top_p. They look at no row's history."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    made: list[Any] = []
    if sampling.temperature not in (0.0, 1.0):
        made.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        made.append(TopPLogitsWarper(sampling.top_p))
    return made


def penalize(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """transformers' penalty on tokens that have been. scores, seen: (rows, vocabulary).

    transformers' own counts the padding token as seen in rows that are padded, which depend on their neighbours.
    """
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def choose(scores: torch.Tensor, uniform: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's token by the inverse of its cumulative distribution at its own number; without numbers the likeliest.

    scores: fp32 (rows, vocabulary), processed. uniform: (rows,) in [0, 1). Returns tokens and their log-probabilities, (rows,).
    transformers would draw one multinomial for the whole batch from the global generator; the token of a row would then
    depend on its neighbours.
    """
    if uniform is None:
        chosen = scores.argmax(dim=-1, keepdim=True)
        found = scores.gather(-1, chosen) - scores.logsumexp(dim=-1, keepdim=True)
        return chosen.squeeze(-1), found.squeeze(-1)
    log_probs = torch.log_softmax(scores, dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    target = uniform.to(scores.device)[:, None].double() * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).clamp_(max=scores.shape[-1] - 1)
    return chosen.squeeze(-1), log_probs.gather(-1, chosen).squeeze(-1)
