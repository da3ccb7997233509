"""A model that scores responses: whole ones by a sequence classifier, or their steps by a token classifier."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from verl_shard.common.errors import ConfigError, RunError, config_error
from verl_shard.common.notices import notice
from verl_shard.models.meta import positions_of
from verl_shard.models.source import read_config
from verl_shard.runtime.any_shape import of_any_shape
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.load import load_sharded
from verl_shard.runtime.offload import offload_of, several_calls
from verl_shard.runtime.scoring_inputs import (
    AGGREGATES,
    Conversation,
    Encoded,
    Encoder,
    Limits,
    Steps,
    load_tokenizer,
    shown,
    without_task_head,
)
from verl_shard.runtime.scoring_outputs import choose_outputs
from verl_shard.runtime.scoring_pieces import ScoringPieces
from verl_shard.runtime.scoring_weights import Parked

TRAINING: Mapping[str, Any] = {"empty_response": "score"}
"""What is otherwise in training: a policy may end at once, and is to learn from it."""


@dataclass(frozen=True)
class _Copy:
    """One copy of the model. device: where its inputs go. pieces: how many rows it takes at once."""

    model: Any
    device: torch.device
    weights: Parked
    pieces: ScoringPieces


class ScoringModel:
    """Scores conversations, each by its last message, in batches; one scoring call at a time, a second waits.

    path: a hub id or folder. task: "reward" or "process-reward"; by default what the architecture says.
    device_map, devices: where one copy is, as for load_sharded. copies_on: a whole copy on each of these devices instead;
        batches are split over them and scores come in the order of the conversations.
    dtype, attn_implementation: as for load_sharded; by default sdpa where the architecture has it.
    offload: how the weights wait outside of the GPU while nothing is scored; embeddings_on_host and pin_limit: more of
        that; as for offload_model.
    tokenizer: a hub id or folder, by default the model's own. chat_template: a Jinja text or a file, instead of the
        tokenizer's. Without any template a conversation is the messages' contents, a line each.
    label: the index or name of the class whose output is the score; needed only where there is no telling: a sequence
        classifier's one logit is its score, of more the logit of `label` is; a process model's one logit is a step's, of
        two or more the probability of `label` is, by default of the second of two.
    aggregate: of a process model's steps: "min" (default), "last", "mean" or "product". separator: what is between steps;
        step_mark: what the model reads after each, by default the separator.
    too_long: "stop", or "truncate" from the left. empty_response: "stop", or "score" it as it is.
    batch_size: conversations in one forward pass.

    Raises ConfigError for what cannot be meant or loaded, and for a checkpoint without a score head.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        task: str | None = None,
        device_map: Mapping[str, Any] | str | int = "cpu",
        devices: Sequence[Any] | None = None,
        copies_on: Sequence[Any] | None = None,
        dtype: str = "bfloat16",
        attn_implementation: str | None = None,
        offload: str = "none",
        embeddings_on_host: bool = False,
        pin_limit: int | str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        label: int | str | None = None,
        aggregate: str | None = None,
        separator: str | None = None,
        step_mark: str | None = None,
        too_long: str = "stop",
        empty_response: str = "stop",
        batch_size: int = 16,
    ) -> None:
        self.path = os.fspath(path)
        config = _without_impossible_padding(read_config(self.path), self.path)
        outputs = choose_outputs(
            self.path, config, task=task, label=label, aggregate=aggregate, separator=separator, step_mark=step_mark
        )
        self.task, self.aggregate, self._label = outputs.task, outputs.aggregate, outputs.label
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise config_error("no-batch", "batch_size", batch_size, "not a number of conversations", "Give 1 or more")
        self._batch_size, self._lock = batch_size, threading.Lock()
        cut = "\n\n" if separator is None else separator
        steps = Steps(cut, cut if step_mark is None else step_mark) if self.task == "process-reward" else None
        self.tokenizer = load_tokenizer(os.fspath(tokenizer or path), self.path, chat_template)
        loading = {
            "config": config, "dtype": dtype, "attn_implementation": attn_implementation, "offload": offload,
            "embeddings_on_host": embeddings_on_host, "pin_limit": pin_limit,
        }  # fmt: skip
        if copies_on is None:
            self._copies = [self._load(device_map, devices, loading)]
        else:
            self._check_copies(copies_on, device_map, devices)
            self._copies = [self._load(device, None, loading) for device in copies_on]
        first = self._copies[0].model
        self._pad: int | None = first.config.get_text_config().pad_token_id
        vocabulary = first.get_input_embeddings().num_embeddings
        limits = Limits(self.path, _positions_taken(first), vocabulary)
        self._encoder = Encoder(self.tokenizer, limits, steps, too_long, empty_response)

    @property
    def model(self) -> Any:
        """The model, or the first of its copies."""
        return self._copies[0].model

    @property
    def devices(self) -> list[torch.device]:
        """Where the inputs of each copy go."""
        return [copy.device for copy in self._copies]

    def score(self, conversations: Sequence[Conversation]) -> list[float]:
        """A score for the last message of each conversation, in their order.

        conversations: each a list of messages, {"role": ..., "content": ...}.
        Raises RunError that names the first response that is empty, too long, or of tokens that the model does not have,
        and one whose score is no finite number; DoesNotFitError for a response that the GPU has no memory for alone. After
        memory ran out batches are smaller.
        """
        responses = [str(conversation[-1]["content"]) for conversation in conversations]
        rows = self._scores(lambda: self._encoder.encode(conversations), responses)
        if self.task == "reward":
            return [row[0] for row in rows]
        combine = AGGREGATES[self.aggregate]
        return [float(combine(row)) for row in rows]

    def step_scores(self, conversations: Sequence[Conversation]) -> list[list[float]]:
        """The scores of the steps of each response, a list for each conversation. Raises as `score`, and RunError for a model
        that scores whole responses."""
        if self.task != "process-reward":
            raise RunError(f"{self.path} scores whole responses; only a token classifier scores steps")
        responses = [str(conversation[-1]["content"]) for conversation in conversations]
        return self._scores(lambda: self._encoder.encode(conversations), responses)

    def score_texts(self, texts: Sequence[str]) -> list[float]:
        """A score for each text to which a chat template was applied already. Raises as `score`."""
        return [row[0] for row in self._scores(lambda: self._encoder.encode_texts(texts), texts)]

    def release(self) -> int:
        """Takes the weights off the GPUs, after the scoring under way; the bytes freed. Scoring brings them back."""
        with self._lock:
            return sum(copy.weights.release() for copy in self._copies)

    def restore(self) -> None:
        """Brings back what `release` took, before anybody asks for a score."""
        with self._lock:
            self._restore()

    def _restore(self) -> None:
        for copy in self._copies:
            copy.weights.restore()

    def _scores(self, encode: Callable[[], Sequence[Encoded]], named: Sequence[str]) -> list[list[float]]:
        """The outputs at the wanted places of each row, in order."""
        # The lock is outermost: what one call gives back at its end may be what another computes with.
        with self._lock:
            self._restore()
            with several_calls(*(copy.model for copy in self._copies)):
                return self._outputs(encode(), named)

    def _outputs(self, encoded: Sequence[Encoded], named: Sequence[str]) -> list[list[float]]:
        """All copies work at once, each on its share."""
        # Similar lengths pad each other little; the longest first, so that what does not fit fails at once.
        order = sorted(range(len(encoded)), key=lambda row: (-len(encoded[row].ids), encoded[row].ids))
        width = max(1, min(self._batch_size, math.ceil(len(order) / len(self._copies))))
        batches = [order[at : at + width] for at in range(0, len(order), width)]
        scores: dict[int, list[float]] = {}

        def work(number: int) -> dict[int, list[float]]:
            copy = self._copies[number]
            mine: dict[int, list[float]] = {}
            own = batches[number :: len(self._copies)]
            if (offloaded := offload_of(copy.model)) is not None:
                offloaded.expect(len(own) if self._pad is not None else None)
            with torch.no_grad(), _on(copy.device), of_any_shape():
                for batch in own:
                    found = copy.pieces.run(
                        lambda part, copy=copy: self._forward(copy, [encoded[row] for row in part]),  # type: ignore[misc]
                        batch,
                        lengths=[len(encoded[row].ids) for row in batch],
                        most=self._batch_size,
                        named=lambda row: f"response {row} ({shown(named[row])}, {len(encoded[row].ids)} tokens)",
                    )
                    mine.update(zip(batch, found, strict=True))
            return mine

        if len(self._copies) == 1:
            scores = work(0)
        else:
            with ThreadPoolExecutor(len(self._copies), thread_name_prefix="verl_shard_score") as pool:
                for part in pool.map(work, range(len(self._copies))):
                    scores.update(part)
        for row, found in sorted(scores.items()):
            if wrong := [score for score in found if not math.isfinite(score)]:
                raise RunError(
                    f"response {row} ({shown(named[row])}): {self.path} gives {wrong[0]}, which is no finite score. "
                    "Its weights or its precision are broken: try dtype float32, and check the checkpoint for NaN"
                )
        return [scores[row] for row in range(len(encoded))]

    def _forward(self, copy: _Copy, rows: Sequence[Encoded]) -> list[list[float]]:
        """One batch, padded on the right to shape (rows, longest)."""
        longest = max(len(row.ids) for row in rows)
        pad = self._pad
        if pad is None:
            used = set().union(*(row.ids for row in rows))
            pad = next((token for token in range(self._encoder.limits.vocabulary) if token not in used), None)
            if pad is None and len(rows) > 1:
                return [found for row in rows for found in self._forward(copy, [row])]
        filled = [[*row.ids, *[pad or 0] * (longest - len(row.ids))] for row in rows]
        mask = [[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows]
        takes = inspect.signature(type(copy.model).forward).parameters
        more = {"use_cache": False} if "use_cache" in takes else {}
        with _padding(copy.model, pad):
            logits = copy.model(
                input_ids=torch.tensor(filled, device=copy.device),
                attention_mask=torch.tensor(mask, device=copy.device),
                **more,
            ).logits.float()
        if self.task == "reward":
            return [[score] for score in logits[:, self._label].tolist()]
        found = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., self._label]
        return [[column[end] for end in row.ends] for row, column in zip(rows, found.tolist(), strict=True)]

    def _load(self, device_map: Any, devices: Any, loading: Mapping[str, Any]) -> _Copy:
        """One copy, and where its inputs go: to the device that its embedding computes on, wherever its weights wait."""
        try:
            model = load_sharded(self.path, device_map, devices=devices, task=self.task, strict=True, **loading)
        except ConfigError as error:
            raise without_task_head(error, self.path) from error
        device = input_device(model)
        pieces = ScoringPieces(model, self.task, self.path, device)
        return _Copy(model, device, Parked(model), pieces)

    def _check_copies(self, copies_on: Sequence[Any], device_map: Any, devices: Any) -> None:
        given = "devices" if devices is not None else "device_map" if device_map != "cpu" else None
        if given is not None:
            why = f"{given} says where one copy is, and copies_on where several are"
            raise config_error("copies-and-map", "copies_on", list(copies_on), why, "Give one of both")
        if isinstance(copies_on, str) or not copies_on:
            fix = 'Write a list of devices, such as ["cuda:0", "cuda:1"]'
            raise config_error("no-copies", "copies_on", copies_on, "not a list of devices", fix)


def _without_impossible_padding(config: Any, path: str) -> Any:
    """The configuration, with no padding token if it names one that the embedding does not have: torch refuses to load it."""
    inner = config.get_text_config()
    pad, vocabulary = inner.pad_token_id, getattr(inner, "vocab_size", None)
    if pad is not None and vocabulary is not None and not 0 <= pad < vocabulary:
        why = f"{path} has {vocabulary} tokens, 0 to {vocabulary - 1}"
        notice("padding-outside-vocabulary", "pad_token_id", pad, why, "a token that no response of the batch has")
        inner.pad_token_id = None
    return config


def _positions_taken(model: Any) -> int | None:
    """How many tokens the model has positions for. RoBERTa's count from after their padding index: 514 take 512."""
    positions: int | None = positions_of(model)
    for name, part in model.named_modules():
        padding = getattr(part, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None and positions is not None:
            return min(positions, int(part.num_embeddings - padding - 1))
    return positions


@contextlib.contextmanager
def _padding(model: Any, pad: int | None) -> Iterator[None]:
    """Has a sequence classifier know what its rows are padded with: it scores the last token that is something else."""
    config = model.config.get_text_config()
    before, config.pad_token_id = config.pad_token_id, pad
    try:
        yield
    finally:
        config.pad_token_id = before


def _on(device: torch.device) -> Any:
    """Some kernels start on the thread's own GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
