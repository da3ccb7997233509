"""CUDA graphs of decoding steps: the tokens of steps without, in every precision, and nothing that stays behind."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from shapes import small_qwen2

from verl_shard.common.notices import ShardNotice
from verl_shard.runtime.generation import generate
from verl_shard.runtime.generation_graph import FixedStep
from verl_shard.runtime.generation_sampling import Response, Sampling
from verl_shard.runtime.packed import use_packed_sdpa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_drawn = random.Random(2)
PROMPTS = [[_drawn.randrange(3, 100) for _ in range(n)] for n in (1, 5, 9, 20, 3, 3, 12, 30, 7, 64)]
MOST = [90, 3, 9, 14, 25, 1, 7, 20, 11, 80]


def _model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_qwen2(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # distributions that are not flat: what is nearly alike would be chosen by rounding
    return model.to("cuda:0", dtype)


def _made(model: Any, *, eager: bool, autocast: bool = False, sampling: Sampling | None = None) -> list[Response]:
    around = torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext()
    with around:
        return generate(
            model, PROMPTS, range(len(PROMPTS)), sampling or Sampling(90, temperature=0.0), pad_token_id=0,
            eos_token_ids=[2], device=torch.device("cuda:0"), max_new_tokens=MOST, max_rows=4, enforce_eager=eager,
        )  # fmt: skip


def _same(found: list[Response], expected: list[Response], first: int = 99) -> float:
    """first: tokens of each response that are looked at: after one that rounding chose all others differ."""
    pairs = [
        (a, b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one.token_ids[:first], other.token_ids[:first], strict=False)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def _apart(found: list[Response], expected: list[Response]) -> float:
    """How far log-probabilities are apart at most, up to the first token that is another."""
    most = 0.0
    for one, other in zip(found, expected, strict=True):
        for a, b, x, y in zip(one.token_ids, other.token_ids, one.log_probs, other.log_probs, strict=False):
            if a != b:
                break
            most = max(most, abs(x - y))
    return most


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step by a graph had."""
    seen: list[int] = []
    run = FixedStep.run

    def counted(self: FixedStep, tokens: torch.Tensor, start: torch.Tensor, column: int) -> torch.Tensor:
        seen.append(len(tokens))
        return run(self, tokens, start, column)

    monkeypatch.setattr(FixedStep, "run", counted)
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast", "autocast of frozen weights"])
def test_the_tokens_of_steps_without(precision: str, attention: str, graphs: list[int]) -> None:
    model = _model(torch.bfloat16 if precision == "bf16" else torch.float32)
    if attention == "packed":
        assert use_packed_sdpa(model)
    if "frozen" in precision:
        model.requires_grad_(False)
    given: Any = {"autocast": "autocast" in precision}
    expected = _made(model, eager=True, **given)
    assert not graphs
    _made(model, eager=False, **given)  # cuBLAS keeps a workspace for the stream on which a step is captured
    graphs.clear()
    before = torch.cuda.memory_allocated()
    found = _made(model, eager=False, **given)
    # 90 tokens: at most two layouts of 64 steps for it, and steps without a graph where few are left.
    assert len(graphs) > 60
    assert _same(found, expected) == 1 if precision == "fp32" else _same(found, expected, first=4) > 0.8
    assert _apart(found, expected) < (1e-3 if precision == "fp32" else 0.2)
    assert torch.cuda.memory_allocated() == before
    again = _made(model, eager=False, **given)
    assert [response.token_ids for response in again] == [response.token_ids for response in found]


def test_sampling_and_weights_that_changed_meanwhile(graphs: list[int]) -> None:
    """As after an optimizer's step: neither a graph nor a cast of the weights before may live on."""
    model, sampling = _model(torch.float32), Sampling(90, temperature=0.8, top_k=20)
    first = _made(model, eager=False, autocast=True, sampling=sampling)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    second = _made(model, eager=False, autocast=True, sampling=sampling)
    assert len(graphs) > 120
    assert _apart(second, first) > 0.5 or _same(second, first, first=4) < 0.5
    expected = _made(model, eager=True, autocast=True, sampling=sampling)
    assert _same(second, expected, first=4) > 0.8
    assert _apart(second, expected) < 0.2


def test_a_step_that_asks_the_gpu_is_not_captured_and_leaves_nothing_behind(graphs: list[int]) -> None:
    model = _model(torch.float32)
    expected = _made(model, eager=True)
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: args[0].sum().item() and None)
    torch.cuda.manual_seed(5)
    drawn = torch.rand(2**20, device="cuda:0")
    torch.cuda.manual_seed(5)
    stream = torch.cuda.current_stream()
    with pytest.warns(ShardNotice, match="could not be captured"):
        found = _made(model, eager=False)
    assert [response.token_ids for response in found] == [response.token_ids for response in expected]
    assert torch.cuda.current_stream() == stream
    assert len(graphs) == 1
    assert torch.equal(torch.rand(2**20, device="cuda:0"), drawn)  # the generator is in no capture, and where it was
    del drawn
    held = torch.cuda.memory_allocated()
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    freed = torch.empty(2**24, device="cuda:0")
    freed.record_stream(side)
    del freed
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == held  # nothing waits for a capture to end
    handle.remove()
    graphs.clear()
    _made(model, eager=False)
    assert graphs == []  # that model is not tried again
    other = _model(torch.float32)
    assert [response.token_ids for response in _made(other, eager=False)] == [r.token_ids for r in expected]
    assert len(graphs) > 60
