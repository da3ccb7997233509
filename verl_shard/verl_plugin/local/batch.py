"""The samples of a step as verl's engines take them: nested tensors, one row a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu

Row = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One response. row: the prompt's row of the data; uid: the same for all responses to one prompt.

    log_probs: of the response's tokens, under the distribution that they were drawn from; empty when not asked for.
    """

    row: Row
    uid: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    log_probs: tuple[float, ...]


def nested(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """A nested tensor with these rows, which may have different lengths."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def lengths_of(column: Any) -> torch.Tensor:
    """The length of each row of a nested tensor, int64 of shape (rows,)."""
    lengths: torch.Tensor = column.offsets().diff()
    return lengths


@dataclass
class Batch:
    """The whole batch, the same in every process. columns: nested tensors by verl's names, each with a row a sample."""

    samples: Sequence[Sample]
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """The columns that a forward pass needs."""
        prompts = [torch.tensor(s.prompt) for s in samples]
        responses = [torch.tensor(s.response) for s in samples]
        tokens = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        columns = {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "input_ids": nested(tokens),
            "position_ids": nested(torch.arange(len(ids)) for ids in tokens),
            "response_mask": nested(torch.ones_like(ids) for ids in responses),
            "loss_mask": nested(torch.ones_like(ids) for ids in responses),
        }
        if samples[0].log_probs:
            columns["rollout_log_probs"] = nested(torch.tensor(s.log_probs) for s in samples)
        return cls(samples, columns)

    def __len__(self) -> int:
        return len(self.samples)

    def score(self, scores: Sequence[float]) -> None:
        """Puts each sample's score on the last token of its response, as verl does."""
        rows = [torch.zeros(len(sample.response)) for sample in self.samples]
        for row, score in zip(rows, scores, strict=True):
            row[-1] = score
        self.columns["rm_scores"] = nested(rows)

    def rows(self, indices: Sequence[int], extra: Mapping[str, Any]) -> TensorDict:
        """Some of the samples for a worker. extra: what verl's workers take beside tensors."""
        parts = {name: column.unbind() for name, column in self.columns.items()}
        data = tu.get_tensordict({name: nested(part[i] for i in indices) for name, part in parts.items()})
        tu.assign_non_tensor(data, **extra)
        return data

    def set_responses(self, name: str, rows: Sequence[torch.Tensor]) -> None:
        """Adds a column from what a model said of whole sequences: shifted by one, and of the response's tokens only.

        Output i of a model is of token i + 1, so those of a response begin one before it.
        """
        begins = [len(sample.prompt) - 1 for sample in self.samples]
        ends = [begin + len(sample.response) for begin, sample in zip(begins, self.samples, strict=True)]
        self.columns[name] = nested(row[b:e].clone() for row, b, e in zip(rows, begins, ends, strict=True))

    def set_padded(self, name: str, padded: torch.Tensor) -> None:
        """Adds a column from a tensor of shape (samples, longest response)."""
        self.columns[name] = nested(padded[i, : len(sample.response)].clone() for i, sample in enumerate(self.samples))

    def padded(self, *names: str) -> DataProto:
        """These columns padded on the right with zeros to shape (samples, longest), with the samples' uids."""
        names = tuple(name for name in names if name in self.columns)
        tensors = {name: self.columns[name].to_padded_tensor(0) for name in names}
        uids = np.array([sample.uid for sample in self.samples], dtype=object)
        return DataProto(batch=TensorDict(tensors, batch_size=len(self)), non_tensor_batch={"uid": uids})
