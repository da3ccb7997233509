"""Responses cut out by lengths that the host knows are verl's own, without a question to the GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from verl.utils import tensordict_utils as tu
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from verl_shard.verl_plugin import hooks
from verl_shard.verl_plugin.engine_inputs import response_lengths


def batch(pairs: list[tuple[int, int]]) -> TensorDict:
    def nested(lengths: list[int]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)

    return tu.get_tensordict({"prompts": nested([p for p, _ in pairs]), "responses": nested([r for _, r in pairs])})


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.booleans(),
)
def test_as_verl_cuts_them(pairs: list[tuple[int, int]], more: int, wide: bool) -> None:
    data = batch(pairs)
    longest = max(response for _, response in pairs) + more if more else -1
    tu.assign_non_tensor(data, max_response_len=longest)
    tokens = sum(map(sum, pairs))
    values = torch.randn(tokens, 2) if wide else torch.randn(tokens)
    lengths = response_lengths(data)
    assert lengths == hooks.Lengths(tuple(pairs))
    assert torch.equal(hooks.responses_of(values, pairs, longest), no_padding_2_padding(values, data))


class Questions(TorchDispatchMode):
    """Counts what would wait for a GPU."""

    asked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.asked += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_losses_take_them_from_the_batch() -> None:
    hooks.responses_by_lengths()
    hooks.responses_by_lengths()  # once is enough
    pairs = [(2, 3), (1, 4)]
    data = batch(pairs)
    values = torch.arange(10.0)
    with Questions() as verls:
        expected = losses.no_padding_2_padding(values, data)
    told = tu.assign_non_tensor(data.copy(), **{hooks.RESPONSE_LENGTHS: response_lengths(data)})
    with Questions() as ours:
        found = losses.no_padding_2_padding(values, told)
    assert torch.equal(found, expected)
    assert verls.asked > 5
    assert ours.asked == 0
    assert found.tolist() == [[1, 2, 3, 0], [5, 6, 7, 8]]


def test_a_batch_that_does_not_tell_prompts_from_responses() -> None:
    assert response_lengths(TensorDict({"input_ids": torch.zeros(2, 3)}, batch_size=[2])) is None
    with pytest.raises(AssertionError, match="these sequences"):
        hooks.responses_of(torch.zeros(3), [(1, 1)])
