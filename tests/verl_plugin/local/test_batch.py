"""A step's samples as nested tensors, against what is written out by hand."""

from __future__ import annotations

import numpy as np
import torch
from verl.workers.utils.padding import response_from_nested, response_to_nested

from verl_shard.verl_plugin.local.batch import Batch, Sample, lengths_of

SAMPLES = [
    Sample({}, "a", (5, 6, 7), (8, 9), (-0.5, -0.25)),
    Sample({}, "a", (5, 6, 7), (4,), (-0.125,)),
    Sample({}, "b", (3,), (1, 2, 3), (-1.0, -2.0, -3.0)),
]


def rows(batch: Batch, name: str) -> list[list[float]]:
    return [row.tolist() for row in batch.columns[name].unbind()]


def test_the_columns_of_a_forward_pass() -> None:
    batch = Batch.of(SAMPLES)
    assert rows(batch, "input_ids") == [[5, 6, 7, 8, 9], [5, 6, 7, 4], [3, 1, 2, 3]]
    assert rows(batch, "position_ids") == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert rows(batch, "response_mask") == [[1, 1], [1], [1, 1, 1]]
    assert rows(batch, "rollout_log_probs") == [[-0.5, -0.25], [-0.125], [-1.0, -2.0, -3.0]]
    batch.score([1.0, 2.0, 3.0])
    assert rows(batch, "rm_scores") == [[0, 1], [2], [0, 0, 3]]


def test_rows_of_equal_lengths_are_nested_too() -> None:
    batch = Batch.of([SAMPLES[0], SAMPLES[0]])
    assert lengths_of(batch.rows([1], {})["input_ids"]).tolist() == [5]


def test_a_workers_rows_are_in_the_order_asked_for() -> None:
    data = Batch.of(SAMPLES).rows([2, 0], {"temperature": 0.5, "compute_loss": False})
    assert [row.tolist() for row in data["input_ids"].unbind()] == [[3, 1, 2, 3], [5, 6, 7, 8, 9]]
    assert data["temperature"] == 0.5
    assert data["compute_loss"] is False


def test_what_a_model_says_of_a_response_as_verl_cuts_it() -> None:
    batch = Batch.of(SAMPLES)
    outputs = [torch.rand(len(s.prompt) + len(s.response)) for s in SAMPLES]
    batch.set_responses("values", outputs)
    nested = torch.nested.as_nested_tensor(outputs, layout=torch.jagged)
    theirs = response_from_nested(nested, batch.columns["response_mask"])
    assert torch.equal(batch.columns["values"].values(), theirs.values())


def test_padded_and_back_as_verl_does_it() -> None:
    batch = Batch.of(SAMPLES)
    padded = batch.padded("rollout_log_probs", "not there")
    assert padded.batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0], [-0.125, 0, 0], [-1.0, -2.0, -3.0]]
    assert np.array_equal(padded.non_tensor_batch["uid"], np.array(["a", "a", "b"], dtype=object))
    batch.set_padded("again", padded.batch["rollout_log_probs"])
    theirs = response_to_nested(padded.batch["rollout_log_probs"], batch.columns["response_mask"])
    assert torch.equal(batch.columns["again"].values(), theirs.values())
