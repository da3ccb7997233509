"""Weights that leave their device and come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from verl_shard.runtime import scoring_weights
from verl_shard.runtime.offload import Offload
from verl_shard.runtime.scoring_weights import Parked


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    model.register_buffer("scale", torch.ones(5))
    return model


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was copied where: a host has no tensor that is on a GPU, so Parked gets handles that say they are."""
    made: list[str] = []
    gpu = torch.device("cuda", 1)

    class Handle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor, self._data = tensor, Data(tensor.detach().clone(), gpu)

        @property
        def device(self) -> torch.device:
            return self._data.device

        @property
        def data(self) -> Data:
            return self._data

        @data.setter
        def data(self, data: Data) -> None:
            self._data = data
            self._tensor.data = data.values

        def untyped_storage(self) -> Any:
            return self._tensor.untyped_storage()

    class Data:
        def __init__(self, values: torch.Tensor, device: torch.device) -> None:
            self.values, self.device = values, device

        def to(self, device: Any) -> Data:
            made.append(str(device))
            return Data(self.values.clone(), torch.device(device))

    handles: dict[int, Handle] = {}

    def tensors(self: Parked) -> Any:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield handles.setdefault(id(tensor), Handle(tensor))

    monkeypatch.setattr(Parked, "_tensors", tensors)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty"))
    return made


def test_weights_go_and_come_back_and_the_host_keeps_its_copy(moves: list[str]) -> None:
    model = _model()
    given = torch.arange(6.0).reshape(2, 3)
    expected = model(given)
    parked = Parked(model)
    # A shared matrix of 9, a layer of 6 and its 2, a buffer of 5; four bytes each.
    assert parked.release() == (9 + 6 + 2 + 5) * 4
    assert parked.is_away is True
    assert moves == ["cpu"] * 4 + ["empty"]
    assert parked.release() == 0
    parked.restore()
    assert moves[5:] == ["cuda:1"] * 4
    torch.testing.assert_close(model(given), expected, rtol=0, atol=0)
    del moves[:]
    assert parked.release() == 88
    assert moves == ["empty"]
    parked.restore()
    parked.restore()
    assert moves == ["empty", *["cuda:1"] * 4]


def test_what_is_on_the_host_stays() -> None:
    model = _model()
    parked = Parked(model)
    before = model[0].weight.data_ptr()
    assert parked.release() == 0
    assert not parked.is_away
    assert model[0].weight.data_ptr() == before


def test_an_offloaded_model_gives_back_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Offload] = []
    told = Offload("stream", "it was asked for")
    monkeypatch.setattr(scoring_weights, "offload_of", lambda model: told)
    monkeypatch.setattr(Offload, "release", lambda self: released.append(self))
    assert Parked(_model()).release() == 0
    assert released == [told]
