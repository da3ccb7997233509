"""Micro-batches of a batch on the host are verl's own, key by key, whatever the batch has."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import prepare_micro_batches

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin import engine_split
from verl_shard.verl_plugin.engine_split import micro_batches, split


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _batch(rows: int, seed: int, *, mrope: bool = False) -> TensorDict:
    """Prompts, responses, features of each token, numbers of each row, and what is no tensor."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    prompts, responses = ([pick.randint(1, 9) for _ in range(rows)] for _ in range(2))
    whole = [a + b for a, b in zip(prompts, responses, strict=True)]
    data = tu.get_tensordict(
        {
            "input_ids": _nested([torch.randint(0, 99, (n,)) for n in whole]),
            "prompts": _nested([torch.randint(0, 99, (n,)) for n in prompts]),
            "old_log_probs": _nested([torch.randn(n) for n in responses]),
            "features": _nested([torch.randn(n, 3) for n in whole]),
            "rewards": torch.randn(rows, 2),
            "uid": [f"{pick.random()}" for _ in range(rows)],
            "scores": [[pick.random()] * pick.randint(0, 2) for _ in range(rows)],
            "inputs": [{"image": pick.random()} for _ in range(rows)],
        },
        non_tensor_dict={"temperature": 0.7, "meta_info": {"step": seed}},
    )
    positions = [torch.arange(n) for n in whole]
    data["position_ids"] = (
        tu.nested_tensor_from_tensor_list([torch.stack([one] * 4) + i for i, one in enumerate(positions)])
        if mrope
        else _nested(positions)
    )
    data["inner"] = TensorDict({"mass": torch.randn(rows)}, [rows])
    return data


def _same(ours: Any, verls: Any) -> None:
    assert ours.batch_size == verls.batch_size
    assert ours.device == verls.device
    assert set(ours.keys()) == set(verls.keys())
    for name, expected in verls.items():
        found = ours.get(name)
        assert type(found) is type(expected), name
        if isinstance(expected, TensorDict):
            assert (found == expected).all()
        elif isinstance(expected, NonTensorData | NonTensorStack):
            assert found.tolist() == expected.tolist(), name
            assert found.batch_size == expected.batch_size
        elif expected.is_nested:
            assert found._ragged_idx == expected._ragged_idx, name
            assert found.dtype == expected.dtype
            assert torch.equal(found.offsets(), expected.offsets())
            assert torch.equal(found.values(), expected.values())
            if found._ragged_idx == 1:
                lengths = expected.offsets().diff()
                assert found._metadata_cache.keys() >= {"min_seqlen", "max_seqlen"}, "nobody has to ask"
                assert (found._min_seqlen, found._max_seqlen) == (int(lengths.min()), int(lengths.max()))
        else:
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(6, 1), (6, 2), (6, 3), (6, 6), (1, 1), (8, 2)])
def test_rows_in_order_are_cut_as_verl_cuts_them(rows: int, size: int, mrope: bool) -> None:
    for seed in range(3):
        data = _batch(rows, seed, mrope=mrope)
        expected = tu.chunk_tensordict(data, rows // size)
        parts = split(data, size)
        assert len(parts) == len(expected) == rows // size
        assert parts.indices is None
        assert [row for part in parts.rows for row in part] == list(range(rows))
        for number, (ours, verls) in enumerate(zip(parts, expected, strict=True)):
            _same(ours, verls)
            assert parts.tokens[number] == verls["input_ids"].offsets().diff().tolist()
            assert set(ours.keys()) == set(data.keys())


@pytest.mark.parametrize("mrope", [False, True])
@pytest.mark.parametrize("together", [1, 2])
def test_rows_packed_by_tokens_are_those_of_verl(together: int, mrope: bool) -> None:
    reordered = 0
    for seed in range(6):
        data = _batch(8, seed, mrope=mrope)
        tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=40, sp_size=1, force_group_size=together)
        expected, indices = prepare_micro_batches(data)
        parts = micro_batches(data, None)
        assert parts.indices == parts.rows == indices
        assert len(parts) == len(expected) > 1
        for number, (ours, verls) in enumerate(zip(parts, expected, strict=True)):
            _same(ours, verls)
            assert parts.tokens[number] == verls["input_ids"].offsets().diff().tolist()
        reordered += indices != sorted(indices)
    assert reordered


def test_groups_stay_together_and_a_size_that_does_not_divide_is_said() -> None:
    data = _batch(8, 0)
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, force_group_size=2)
    expected, indices = prepare_micro_batches(data)
    assert indices is None
    for ours, verls in zip(micro_batches(data, None), expected, strict=True):
        _same(ours, verls)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=3)
    with pytest.raises(AssertionError) as verls_own:
        prepare_micro_batches(data)
    with pytest.raises(ConfigError, match=r"micro_batch_size_per_gpu = 3: .*8 % \(2 \* 3\) is 2") as found:
        micro_batches(data, None)
    assert str(verls_own.value) in str(found.value)
    with pytest.raises(ConfigError, match="8 % "):
        split(data, 5)


def test_a_micro_batch_is_its_own() -> None:
    data = _batch(4, 0)
    parts, before = split(data, 2), data["input_ids"].values().clone()
    parts[0]["input_ids"].values().zero_()
    tu.assign_non_tensor(parts[0], new=1)
    assert torch.equal(data["input_ids"].values(), before)
    assert "new" not in parts[0].keys() | data.keys()
    assert parts[0]["input_ids"].values().any()


def test_nested_tensors_with_gaps_go_verls_way() -> None:
    data = TensorDict({"input_ids": _nested([torch.arange(n) for n in (3, 2)])}, [2])
    padded, starts, lengths = torch.arange(10.0).view(2, 5), torch.tensor([1, 0]), torch.tensor([2, 4])
    data["gaps"] = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    first, second = split(data, 1)
    assert first["gaps"].unbind()[0].tolist() == [1, 2]
    assert second["gaps"].unbind()[0].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("public", [False, True])
def test_nested_tensors_are_made_as_torch_makes_them(public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_split._kind() is not None, "of this torch"
    if public:
        monkeypatch.setattr(engine_split, "_kind", lambda: None)
    values, offsets = torch.randn(5, 3), torch.tensor([0, 1, 5])
    found: Any = engine_split.jagged(values, offsets, shortest=1, longest=4)
    expected: Any = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=1, max_seqlen=4)
    assert torch.equal(found.to_padded_tensor(0.0), expected.to_padded_tensor(0.0))
    assert (found._min_seqlen, found._max_seqlen, found.is_contiguous()) == (1, 4, True)
    assert torch.equal((found * 2 + found).values(), values * 3)
    wanted = values.clone().requires_grad_()
    engine_split.jagged(wanted, offsets, shortest=1, longest=4).values().sum().backward()
    assert wanted.grad is not None
    across: Any = engine_split.jagged(values.T, offsets, shortest=1, longest=4, ragged=2)
    assert [tuple(row.shape) for row in across.unbind()] == [(3, 1), (3, 4)]
    copied = copy.deepcopy(pickle.loads(pickle.dumps(found)))
    assert torch.equal(copied.values(), values)
