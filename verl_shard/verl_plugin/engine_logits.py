"""The logits that responses are read from: those of the token before each of their tokens, and of no other.

verl's engines make logits (tokens x vocabulary, the largest tensor of a pass) and log-probabilities of prompts too, and cut
responses out of them afterwards: a prompt costs a head's product and memory, and nothing reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

_READ_ALL = ("use_fused_kernels", "distillation_use_topk", "distillation_only")
"""Keys of a batch with which there are no logits to leave out, or all are read."""
_OF_TOKENS = ("input_ids_rmpad_rolled", "temperature_rmpad")
"""What verl compares logits with or divides them by, one for each token."""


@dataclass(frozen=True)
class Kept:
    """Which logits of a micro-batch there are, and what they are of.

    columns: positions along the second axis of the model's inputs, n_columns of them (what transformers calls
        logits_to_keep). Of rows filled up they are a slice, whose backward is cheaper: positions in a tensor are sorted.
    rows: of the logits that there are, rows and columns as one axis, those that are read; None when all are.
    places: of the tokens of all sequences, one behind the other, those that the read ones follow from.
    ends: where each response ends among these, behind a 0. n_tokens: of all sequences.
    """

    columns: torch.Tensor | slice
    n_columns: int
    rows: torch.Tensor | None
    places: torch.Tensor
    ends: torch.Tensor
    n_tokens: int

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Kept:
        """With its tensors where `move` brings them."""
        rows = None if self.rows is None else move(self.rows)
        columns = move(self.columns) if isinstance(self.columns, torch.Tensor) else self.columns
        return replace(self, columns=columns, rows=rows, places=move(self.places), ends=move(self.ends))


def only_responses(data: TensorDict, loss_function: Any) -> bool:
    """Whether all that a batch is worked on for is of responses: verl's scoring, whose results are cut to them, and PPO."""
    of_ppo = loss_function is None or getattr(loss_function, "func", loss_function) is ppo_loss
    return of_ppo and not any(tu.get_non_tensor_data(data=data, key=key, default=False) for key in _READ_ALL)


def kept(pairs: Sequence[tuple[int, int]], *, packed: bool) -> Kept | None:
    """What is read of sequences of so many tokens of prompt and response. packed: all of them are one row; else each has one,
    filled up on the right. None where a response has no token before it, or no logits are read at all."""
    if not _can_leave_out(pairs):
        return None
    begins, n_tokens = [], 0
    for prompt, response in pairs:
        begins.append(n_tokens)
        n_tokens += prompt + response
    ends = torch.tensor([0, *(response for _, response in pairs)]).cumsum(0)
    places = _ranges((begin + prompt - 1, n) for begin, (prompt, n) in zip(begins, pairs, strict=True))
    if packed:
        return Kept(places, len(places), None, places, ends, n_tokens)
    first = min(prompt for prompt, response in pairs if response) - 1
    width = max(sum(pair) for pair in pairs if pair[1]) - 1 - first
    rows = _ranges((row * width + prompt - 1 - first, n) for row, (prompt, n) in enumerate(pairs))
    whole = len(rows) == len(pairs) * width
    return Kept(slice(first, first + width), width, None if whole else rows, places, ends, n_tokens)


def largest_share(pairs: Sequence[tuple[int, int]], *, packed: bool) -> float:
    """Of the tokens of a micro-batch of any of these sequences, the share whose logits are made at most; 1 for all."""
    if not _can_leave_out(pairs):
        return 1.0
    if packed:
        return max(response / (prompt + response) for prompt, response in pairs)
    longest = max(map(sum, pairs))
    return (longest - min(prompt for prompt, _ in pairs)) / longest


def _can_leave_out(pairs: Sequence[tuple[int, int]]) -> bool:
    return all(prompt > 0 for prompt, _ in pairs) and any(response for _, response in pairs)


def _ranges(parts: Any) -> torch.Tensor:
    return torch.cat([torch.arange(begin, begin + n) for begin, n in parts])


def read(output: Any, kept: Kept) -> Any:
    """A forward's result with the logits that are read, as one row (1, tokens, vocabulary)."""
    logits = output.logits
    if logits.shape[1] != kept.n_columns:  # a model that takes the argument and does not mind it
        logits = logits[:, kept.columns]
    flat = logits.flatten(0, 1)
    return SimpleNamespace(logits=(flat if kept.rows is None else flat.index_select(0, kept.rows))[None])


def as_if_all(kept: Kept, output_args: Mapping[str, Any], data: TensorDict) -> tuple[dict[str, Any], TensorDict]:
    """output_args and a micro-batch for verl's prepare_model_outputs: each sequence is its response."""
    args = {**output_args, "pad_size": 0}
    for name in _OF_TOKENS:
        if name in args:
            args[name] = args[name].index_select(0, kept.places)
    made = data.copy()
    made["input_ids"] = torch.nested.nested_tensor_from_jagged(args[_OF_TOKENS[0]], kept.ends)
    return args, made


def spread(kept: Kept, model_output: Mapping[str, Any], ends: torch.Tensor) -> dict[str, Any]:
    """verl's outputs of responses at their places among all tokens, with zeros for the tokens of prompts.

    ends: where each sequence ends, behind a 0, on the outputs' device.
    """
    made = {}
    for name, value in model_output.items():
        values = value.values()
        whole = values.new_zeros(kept.n_tokens, *values.shape[1:]).index_copy(0, kept.places, values)
        made[name] = torch.nested.nested_tensor_from_jagged(whole, ends)
    return made
