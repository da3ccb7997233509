"""transformers asks whether rows are packed only where they may be: bits are the same, and packed sequences kept apart."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_links import FakeLinks
from shapes import small_qwen2
from torch import nn
from transformers import masking_utils

from verl_shard.runtime.micro_batches import run_micro_batches
from verl_shard.runtime.pipeline import dispatch_model
from verl_shard.runtime.whole_rows import GivesPositions, whole_rows

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
PACKED = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]])
TWO = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
TWO |= {f"model.layers.{i}": int(i >= 2) for i in range(4)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The first row of positions that transformers asked about, each time."""
    calls: list[list[int]] = []
    plain = masking_utils.find_packed_sequence_indices

    def find(position_ids: torch.Tensor) -> Any:
        calls.append(position_ids[0].tolist())
        return plain(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)
    return calls


def causal() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_qwen2(), attn_implementation="sdpa").eval()


def logits(model: Any, *args: Any, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **inputs, use_cache=False).logits


def apart(model: Any) -> torch.Tensor:
    """Logits of the sequences that PACKED says, each computed alone."""
    cuts = ([2, 3], [4, 1])
    rows = [
        torch.cat([logits(model, part[None])[0] for part in row.split(cut)]) for row, cut in zip(IDS, cuts, strict=True)
    ]
    return torch.stack(rows)


def test_of_whole_rows_nothing_is_asked_and_bits_are_the_same(asked: list[list[int]]) -> None:
    model = causal()
    expected = logits(model, IDS)
    assert asked == [[0, 1, 2, 3, 4]]
    with whole_rows():
        assert torch.equal(logits(model, IDS), expected)
        assert torch.equal(logits(model, inputs_embeds=model.model.embed_tokens(IDS)), expected)
    assert len(asked) == 1
    with pytest.raises(KeyError), whole_rows():
        raise KeyError
    logits(model, IDS)
    assert len(asked) == 2, "after it transformers asks again, after an error too"


def test_positions_of_rows_that_differ_are_asked_about_and_an_inner_call_may_be_packed(asked: list[list[int]]) -> None:
    model = causal()
    expected = apart(model)
    asked.clear()
    with whole_rows():
        torch.testing.assert_close(logits(model, IDS, position_ids=PACKED), expected, atol=1e-5, rtol=1e-4)
        with whole_rows(False):
            logits(model, IDS[:1], position_ids=PACKED[:1])
        logits(model, IDS)
    assert asked == [[0, 1, 0, 1, 2], [0, 1, 0, 1, 2]]


def test_other_threads_are_asked_as_ever(asked: list[list[int]]) -> None:
    model = causal()
    with whole_rows():
        other = threading.Thread(target=logits, args=(model, IDS))
        other.start()
        other.join()
        assert len(asked) == 1
        logits(model, IDS)
    assert len(asked) == 1


def test_without_such_a_question_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    with whole_rows():
        assert not hasattr(masking_utils, "find_packed_sequence_indices")
    monkeypatch.delitem(sys.modules, "transformers.masking_utils")
    with whole_rows():
        assert "transformers.masking_utils" not in sys.modules


@pytest.mark.parametrize("checkpointing", [False, True])
def test_over_several_devices_each_call_says_it(asked: list[list[int]], checkpointing: bool) -> None:
    model, one, links = causal(), causal(), FakeLinks()
    expected, packed = logits(one, IDS), apart(one)
    dispatch_model(model, TWO, links=links)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    asked.clear()
    with links:
        found = logits(model, IDS), logits(model, IDS, None, None)
        inner = model.model(IDS, use_cache=False)
        trained = model(IDS, labels=IDS, use_cache=False)
        torch.autograd.backward(trained.loss)
    assert asked == []
    assert links.waits == []
    assert all(torch.equal(each, expected) for each in (*found, trained.logits.detach()))
    assert torch.equal(one.lm_head(inner.last_hidden_state), one(IDS).logits)
    for number, (args, named) in enumerate((((), {"position_ids": PACKED}), ((None, PACKED), {}))):
        asked.clear()
        with links:
            torch.testing.assert_close(logits(model, IDS, *args, **named), packed, atol=1e-5, rtol=1e-4)
        assert asked == [[0, 1, 0, 1, 2]], number


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("positions", [None, PACKED], ids=["whole", "packed"])
def test_micro_batches_of_whole_rows_ask_nothing(asked: list[list[int]], positions: Any, devices: int) -> None:
    model, one, links = causal(), causal(), FakeLinks()
    if devices == 2:
        dispatch_model(model, TWO, links=links)
    batch = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    batches = [batch, batch | {"position_ids": positions}]
    expected = [one(**each).loss for each in batches]
    torch.stack(expected).sum().backward()
    asked.clear()
    with links:
        ran = run_micro_batches(model, batches)
    assert asked == ([] if positions is None else [[0, 1, 0, 1, 2]])
    assert torch.equal(torch.stack(ran.losses), torch.stack(expected).detach())
    for a, b in zip(model.parameters(), one.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < 1e-6


def test_who_gives_positions_is_known_by_name_and_by_place() -> None:
    def forward(ids: Any, mask: Any = None, position_ids: Any = None, **_: Any) -> None: ...

    def named(ids: Any, *, position_ids: Any = None) -> None: ...

    def without(ids: Any, mask: Any = None) -> None: ...

    def unnamed(ids: Any, *rest: Any, **named: Any) -> None: ...

    for given in (forward, named, without, unnamed):
        gives = GivesPositions(given)
        assert not gives((IDS,), {})
        assert not gives((IDS,), {"position_ids": None})
        assert gives((IDS,), {"position_ids": PACKED})
    assert GivesPositions(forward)((IDS, None, PACKED), {})
    assert not GivesPositions(forward)((IDS, IDS, None), {})
    assert not GivesPositions(without)((IDS, IDS), {})
    assert GivesPositions(unnamed)((IDS, PACKED), {}), "one that may be positions"
    assert not GivesPositions(causal().forward)((IDS, None, None), {})
    assert GivesPositions(causal().forward)((IDS, None, PACKED), {})
    assert GivesPositions(getattr)((IDS, PACKED), {}), "no signature"
    assert not GivesPositions(nn.Linear(2, 2).forward)((IDS,), {})
