"""Responses to prompts of any lengths from one module: rows that come and go where its cache lets them, else `generate`.

Each request has its own stream of random numbers, so a response is the same whatever other requests share its batch and in
whatever order they came: a run that is killed and resumed samples what an unkilled one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_shard.common.notices import notice
from verl_shard.runtime.any_shape import of_any_shape
from verl_shard.runtime.generation_graph import capture_on
from verl_shard.runtime.generation_rows import Progress, RowDecoder, base_of, why_not_rows
from verl_shard.runtime.generation_sampling import Response, Sampling, choose, penalize, uniforms_of, warpers

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
    max_new_tokens: Sequence[int] | None = None,
    max_rows: int | None = None,
    enforce_eager: bool = False,
    progress: Progress | None = None,
) -> list[Response]:
    """Continues each prompt; results are in the order of the prompts.

    prompts: token ids, of any lengths. seeds: one for each prompt. device: where token ids go in. max_new_tokens: of each
    prompt, where they are not all the sampling's. max_rows: at most so many are computed at once, by default all.
    enforce_eager: without CUDA graphs, which are used on a GPU where the model's steps can have a fixed shape.
    progress: told how far it is, for when it fails.
    """
    progress = progress or Progress()
    most = [sampling.max_new_tokens] * len(prompts) if max_new_tokens is None else list(max_new_tokens)
    stops, rows = sampling.stops(eos_token_ids), max_rows or len(prompts)
    was_training = model.training
    model.eval()
    try:
        with of_any_shape():
            if (why := why_not_rows(model)) is None:
                capture = None if enforce_eager else capture_on(device)
                given = (model, prompts, seeds, sampling, most, stops, device, rows, capture)
                return RowDecoder(*given, progress=progress).run()
            used = "transformers' generate, in which a batch lasts until its longest response ends"
            notice("plain-generate", "rollout", type(base_of(model)).__name__, why, used)
            for at in range(0, len(prompts), rows):
                part = slice(at, at + rows)
                progress.at = list(range(len(prompts))[part])
                found = _plainly(model, prompts[part], seeds[part], sampling, most[part], stops, pad_token_id, device)
                progress.done.update(zip(progress.at, found, strict=True))
            return [progress.done[i] for i in range(len(prompts))]
    finally:
        model.train(was_training)


def _plainly(
    model: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, most: Sequence[int],
    stops: Sequence[int], pad: int, device: torch.device,
) -> list[Response]:  # fmt: skip
    """By transformers' generate, in one batch that is padded on the left to (batch, longest)."""
    from transformers import LogitsProcessorList

    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1

    before: list[Any] = []
    if sampling.repetition_penalty != 1.0:
        before.append(_RepetitionPenalty(sampling.repetition_penalty, attention_mask.to(device)))
    if sampling.min_new_tokens and stops:
        before.append(_NoStopBefore(width + sampling.min_new_tokens, stops))
    chooser = _Chooser(None if sampling.temperature == 0 else uniforms_of(seeds, max(most)))
    sequences = model.generate(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        logits_processor=LogitsProcessorList([*before, *warpers(sampling), chooser]),
        # The processors above have done the choosing.
        **_NOT_THE_FOLDERS,
        max_new_tokens=max(most),
        pad_token_id=pad,
        eos_token_id=list(stops) or None,
        use_cache=True,
    )
    tokens = sequences[:, width:].tolist()
    log_probs = torch.stack(chooser.log_probs, dim=1).tolist()
    responses = []
    for row, scores, limit in zip(tokens, log_probs, most, strict=True):
        length = next((at + 1 for at, token in enumerate(row[:limit]) if token in stops), min(limit, len(row)))
        responses.append(Response(row[:length], scores[:length]))
    return responses


class _RepetitionPenalty:
    """`penalize` for `generate`, in which padding has not been."""

    def __init__(self, penalty: float, prompt_mask: torch.Tensor) -> None:
        self.penalty, self.prompt_mask = penalty, prompt_mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counted = torch.ones_like(input_ids)
        counted[:, : self.prompt_mask.shape[1]] = self.prompt_mask
        seen = torch.zeros_like(scores, dtype=counted.dtype).scatter_add_(1, input_ids, counted) > 0
        return penalize(scores, seen, self.penalty)


class _NoStopBefore:
    """No token that ends a response is a candidate before so many columns."""

    def __init__(self, columns: int, stops: Sequence[int]) -> None:
        self.columns, self.stops = columns, list(stops)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.columns:
            scores = scores.clone()
            scores[:, self.stops] = float("-inf")
        return scores


class _Chooser:
    """Leaves the token that `choose` chose alone in the running, and keeps its log-probability."""

    def __init__(self, uniforms: torch.Tensor | None) -> None:
        self.uniforms = uniforms
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        uniform = None if self.uniforms is None else self.uniforms[:, len(self.log_probs)]
        chosen, log_probs = choose(scores.float(), uniform)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen[:, None], 0.0)
