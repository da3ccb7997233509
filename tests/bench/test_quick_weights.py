"""Weights that are copied instead of drawn: finite, spread as they were to be, and the same each time."""

from __future__ import annotations

import pytest
import torch
import transformers
from shapes import small_qwen2
from torch import nn

from verl_shard.bench import quick_weights as module
from verl_shard.bench.quick_weights import quick_weights


def test_a_model_is_made_as_otherwise_but_for_what_is_drawn() -> None:
    def made() -> dict[str, torch.Tensor]:
        with quick_weights(3):
            model = transformers.AutoModelForCausalLM.from_config(small_qwen2(initializer_range=0.02))
        return dict(model.state_dict())

    first, second = made(), made()
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = {name: tensor for name, tensor in first.items() if tensor.ndim > 1}
    assert all(tensor.std().item() == pytest.approx(0.02, rel=0.1) for tensor in drawn.values())
    assert all(abs(tensor.mean().item()) < 0.002 for tensor in drawn.values())
    assert {tensor.unique().tolist()[0] for name, tensor in first.items() if "norm" in name} == {1.0}
    assert {tensor.abs().max().item() for name, tensor in first.items() if name.endswith("bias")} == {0.0}
    queries = [tensor for name, tensor in first.items() if name.endswith("q_proj.weight")]
    assert not torch.equal(queries[0], queries[1])


def test_numbers_go_on_where_they_end_and_rows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAWN", 7)
    monkeypatch.setattr(module, "_STEP", 2)
    with quick_weights(0):
        first, second = torch.empty(2, 10).uniform_(-1, 1), torch.empty(5, dtype=torch.bfloat16).uniform_(-1, 1)
        turned = torch.empty(4, 3).T.uniform_(-1, 1)
        assert torch.empty(3, device="meta").normal_().shape == (3,)
    numbers = first.flatten()[:7]
    assert numbers.unique().numel() == 7
    assert torch.equal(first.flatten(), numbers.repeat(3)[:20])
    assert torch.equal(second, numbers[2:7].bfloat16())
    assert torch.equal(turned.flatten(), torch.cat([numbers[4:], numbers, numbers])[:12])
    assert (numbers.min() >= -1, numbers.max() <= 1) == (True, True)


def test_torch_draws_again_afterwards_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), quick_weights(0):
        raise ZeroDivisionError
    assert "normal_" not in vars(torch.Tensor)
    torch.manual_seed(0)
    one = nn.Linear(2, 2).weight.tolist()
    torch.manual_seed(1)
    assert nn.Linear(2, 2).weight.tolist() != one
