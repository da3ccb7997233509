"""What each GPU of a pipeline holds at its peak: the estimate against devices that the host plays, whose bytes are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_links import FakeLinks
from runtime.test_pipeline_order import placed
from shapes import small_qwen2

from verl_shard.memory.in_flight import Stage
from verl_shard.memory.losses import ppo_loss
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import LOSS, PRODUCT, Recording
from verl_shard.memory.run_pass import record
from verl_shard.memory.trace import Trace
from verl_shard.models.read import read_model
from verl_shard.runtime.micro_batches import run_micro_batches
from verl_shard.runtime.pipeline import dispatch_model

ROWS, LENGTH, WORDS = 2, 64, 2048
LOGITS = 4 * ROWS * LENGTH * WORDS
"""Bytes in fp32."""


class Counting(FakeLinks):
    """Knows the most bytes that each device had."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[str] = Counter()

    def give(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        given = super().give(tensor, device)
        self.most[device] = max(self.most[device], self.bytes[device])
        return given


def config() -> Any:
    return small_qwen2(vocab_size=WORDS, tie_word_embeddings=False)


def loss_of(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return ppo_loss(output.logits, batch["input_ids"])


def measured(layers: Sequence[int], in_flight: int, n: int, loss: str) -> list[int]:
    links, model = Counting(), transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa")
    dispatch_model(model, placed(layers), links=links)
    batches = [{"input_ids": torch.randint(1, 500, (ROWS, LENGTH)), "use_cache": False} for _ in range(n)]
    own = loss == "causal-lm"
    given = [{**batch, "labels": batch["input_ids"]} for batch in batches] if own else batches
    with links:
        run_micro_batches(model, given, None if own else loss_of, in_flight=in_flight)
    return [links.most[f"gpu{gpu}"] for gpu in range(max(layers) + 1)]


def wanted(loss: Any, **fields: Any) -> PassSpec:
    return PassSpec(batch_size=ROWS, seq_len=LENGTH, precision="fp32", optimizer="sgd", loss=loss, **fields)


@cache
def recorded(loss: str) -> Recording:
    spec, module = read_model(config(), task="causal-lm", dtype=torch.float32)
    return record(spec, module, wanted(loss))


def estimated(traced: Trace, layers: Sequence[int]) -> tuple[list[int], list[int]]:
    """By GPU the peak before the optimizer's step, of its events one after the other, and of the Trace's rows."""
    spec, _ = read_model(config(), task="causal-lm", dtype=torch.float32)
    stages = spec.devices_of(placed(layers))
    by_event, by_row = [], []
    for gpu in range(max(layers) + 1):
        blocks = [i for i, at in enumerate(stages) if at == gpu]
        static, _, events = traced.events_of(blocks, stages)
        held: dict[int, int] = {}
        live = most = sum(static)
        for phase, storage, size in events:
            if phase == "optimizer":
                break
            held |= {storage: size} if size > 0 else {}
            live += size if size > 0 else -held.pop(storage, 0)
            most = max(most, live)
        by_event.append(most)
        by_row.append(traced.peak(blocks[0], blocks[-1] + 1, Stage(gpu, max(layers) + 1)))
    return by_event, by_row


TWO, THREE, FOUR = (0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("layers", "in_flight", "n"),
    [(TWO, 2, 2), (TWO, 2, 3), (TWO, 4, 4), (THREE, 3, 4), (THREE, 5, 5), (FOUR, 2, 2), (FOUR, 4, 5), (FOUR, 6, 7)],
)
def test_the_peak_of_each_gpu(layers: Sequence[int], in_flight: int, n: int) -> None:
    traced = Trace.of(recorded("causal-lm"), wanted("causal-lm", in_flight=in_flight, accumulating=n > in_flight))
    found = measured(layers, in_flight, n, "causal-lm")
    # A plain loop's output, as it is recorded, outlives its backward; the pipeline's is gone with its loss.
    found[-1] += LOGITS
    for estimate in estimated(traced, layers):
        for gpu, (ours, theirs) in enumerate(zip(estimate, found, strict=True)):
            # Hidden states that wait for their turn may not have been sent when the GPU is fullest.
            assert 0.995 < ours / theirs < 1.04, gpu


def test_all_forwards_first_would_be_far_too_much() -> None:
    """Of a GPU that keeps one of four micro-batches, and what it was estimated to take if all were there."""
    traced = Trace.of(recorded("causal-lm"), wanted("causal-lm", in_flight=4))
    last = traced.n_blocks - 3  # the last layer, norm and head
    assert traced.peak(last, traced.n_blocks) > 2 * traced.peak(last, traced.n_blocks, Stage(3, 4))
    kept = traced.kept(range(last, traced.n_blocks))
    more = [traced.peak(last, traced.n_blocks, Stage(3 - s, 4 - s)) for s in range(4)]
    assert [b - a for a, b in pairwise(more[:3])] == [kept, kept]


def test_a_loss_is_made_when_its_backward_is_next() -> None:
    """Those in flight behind it have their logits alone, where the loss is none of the model's own."""
    recording = recorded("ppo")
    start, end = (at for _, at in recording.marks[:2])
    made = [at for at in range(start, end) if recording.events[at] > 0]
    head = [at for at in made if recording.of_product[recording.events[at] - 1] == PRODUCT][-1]
    (forward, *rest) = [mark for mark in recording.marks if mark[0] != LOSS]
    marked = replace(recording, marks=(forward, (LOSS, head + 1), *rest))
    pass_of_four = wanted("ppo", in_flight=4)
    with_mark = Trace.of(marked, pass_of_four)
    found = measured(TWO, 4, 4, "ppo")
    found[-1] += LOGITS
    for estimate in estimated(with_mark, TWO):
        assert [ours / theirs for ours, theirs in zip(estimate, found, strict=True)] == pytest.approx([1, 1], abs=0.025)
    blocks = range(with_mark.n_blocks)
    assert with_mark.kept(blocks, with_loss=True) - with_mark.kept(blocks) == pytest.approx(LOGITS, rel=0.05)
    assert "loss" not in with_mark.phases
