"""A Trace is made once, and never taken for that of another model or pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shapes import small_qwen2
from torch import nn

from verl_shard.memory import cached
from verl_shard.memory.cached import cached_trace, forget_traces
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import trace
from verl_shard.models.read import read_model, spec_of_config

_PASS = PassSpec(batch_size=1, seq_len=16, optimizer="sgd")


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    forget_traces()
    yield
    forget_traces()


def _model(**fields: Any) -> tuple[Any, Any]:
    return spec_of_config(small_qwen2(**fields), name="model", task="causal-lm", dtype=torch.float32)


def test_made_once() -> None:
    made = cached_trace(*_model(), _PASS)
    assert cached_trace(*_model(), _PASS) is made, "an equal module is as good"
    assert (made.peaks == trace(*_model(), _PASS).peaks).all()


def test_another_pass_or_model_is_another() -> None:
    spec, module = _model()
    made = [cached_trace(spec, module, PassSpec(batch_size=n, seq_len=16, optimizer="sgd")) for n in (1, 2)]
    other_spec, other = _model(attention_dropout=0.5)
    assert other_spec == spec, "nothing of a dropout is in the spec"
    made.append(cached_trace(other_spec, other, _PASS))
    module.model.norm.variance_epsilon = 0.5
    made.append(cached_trace(spec, module, _PASS))
    module.model.embed_tokens.weight.requires_grad_(False)
    made.append(cached_trace(spec, module, _PASS))
    assert len({id(one) for one in made}) == 5


def test_a_module_that_nothing_describes_is_traced_each_time() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.fold = [1]

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(torch.cat([x] * self.fold[0]))  # type: ignore[no-any-return]

    own = Own()
    spec, module = read_model(own)
    first = cached_trace(spec, module, _PASS)
    own.fold[0] = 9
    assert cached_trace(spec, module, _PASS).peaks.max() > first.peaks.max()


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "SIZE", 2)
    spec, module = _model()
    passes = [PassSpec(batch_size=1, seq_len=n, optimizer="sgd") for n in (8, 9, 10)]
    a, _ = (cached_trace(spec, module, wanted) for wanted in passes[:2])
    assert cached_trace(spec, module, passes[0]) is a, "used again: the other is the oldest now"
    c = cached_trace(spec, module, passes[2])
    assert len(cached._traces) == 2
    assert cached_trace(spec, module, passes[0]) is a
    assert cached_trace(spec, module, passes[2]) is c
