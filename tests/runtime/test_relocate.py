"""A model that moves between steps trains on as if it had been there from the start."""

import copy
import gc
from typing import Any

import pytest
import torch
from runtime.fake_links import FakeLinks
from shapes import small_qwen2
from transformers import AutoModelForCausalLM

from verl_shard.common.errors import ConfigError, DoesNotFitError
from verl_shard.runtime import relocate
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.runtime.relocate import move_model

N_GPUS = torch.cuda.device_count()
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])


def causal() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_qwen2(), attn_implementation="sdpa")


def over(cut: int, *devices: int) -> dict[str, int]:
    first, last = devices[0], devices[-1]
    ends = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last}
    return ends | {f"model.layers.{i}": last if i >= cut else first for i in range(4)}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    # One after the other: the rig sees an operation on a list of tensors of several devices as one.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


@pytest.mark.parametrize("after", [over(1, 1, 2), over(4, 3, 3), over(2, 1, 0)])
def test_it_trains_on_as_if_it_had_been_there(after: dict[str, int]) -> None:
    here, moved, links = causal(), causal(), FakeLinks()
    there = optimizer_of(here)
    train(here, there, 4)

    move_model(moved, over(2, 0, 1), links=links)
    optimizer = optimizer_of(moved)
    weights = list(moved.parameters())
    with links:
        train(moved, optimizer, 2)
    move_model(moved, after, optimizer=optimizer, links=links)
    assert all(now is before for now, before in zip(moved.parameters(), weights, strict=True))
    used = {f"gpu{device}" for device in after.values()}
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert len(states) == 2 * len(weights)
    assert {links.of(tensor) for tensor in [*weights, *states, *moved.buffers()]} == used
    assert (pipeline_of(moved) is None) == (len(used) == 1)
    with links:  # fails where an operation reads tensors of two devices
        train(moved, optimizer, 2)
    for one, other in zip(moved.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_counts_of_steps_go_along_where_kernels_read_them() -> None:
    model = causal()
    weight = model.lm_head.weight
    placed = dict.fromkeys(over(2, 0, 1), 0)
    for flags, moves in (({}, 2), ({"capturable": True}, 3)):
        optimizer = torch.optim.AdamW([weight], foreach=False)
        optimizer.param_groups[0] |= flags
        optimizer.state[weight] = {
            key: torch.zeros(()) if key == "step" else weight.clone() for key in ("step", "a", "b")
        }
        assert len(dict(relocate._states(model, optimizer, placed))) == moves


def test_what_cannot_be_meant_moves_nothing() -> None:
    model = causal()
    before = copy.deepcopy(model.state_dict())
    incomplete = over(2, 0, 1)
    del incomplete["model.layers.3"]
    with pytest.raises(ConfigError, match=r"model\.layers\.3"):
        move_model(model, incomplete, links=FakeLinks())
    with pytest.raises(ConfigError, match="torch sees"):
        move_model(model, over(2, N_GPUS, N_GPUS + 1))
    assert pipeline_of(model) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_too_little_room_is_said_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal()
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    sizes = sum(p.numel() for p in model.parameters()) * 4, sum(b.numel() * b.element_size() for b in model.buffers())
    monkeypatch.setattr(relocate, "check_map", lambda *_, **__: dict.fromkeys(over(2, 0, 1), 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * sizes[0] + sizes[1] - 1, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    # Weights, gradients and two moments each; a byte is missing.
    with pytest.raises(DoesNotFitError, match=r"cannot move: GPU 1 has .* free for .* that would come"):
        move_model(model, {}, optimizer=optimizer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * sizes[0] + sizes[1], 10**12))
    with pytest.raises(ConfigError, match="device_map"):
        move_model(model, {}, optimizer=optimizer)  # there is room, and dispatch_model looks at the map


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
def test_from_one_gpu_to_two_and_back() -> None:
    def held() -> int:
        """Bytes of tensors on GPU 1: what cuBLAS keeps for its products is not a tensor's, and stays."""
        gc.collect()
        torch.cuda.synchronize(1)
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(1)

    before = held()
    here, moved = causal().to("cuda:0"), causal()
    ids = IDS.to("cuda:0")
    there = torch.optim.AdamW(here.parameters(), lr=1e-2)
    move_model(moved, dict.fromkeys(over(2, 0, 1), 0))
    optimizer = torch.optim.AdamW(moved.parameters(), lr=1e-2)
    for where in (over(2, 0, 1), dict.fromkeys(over(2, 0, 1), 1), dict.fromkeys(over(2, 0, 1), 0)):
        move_model(moved, where, optimizer=optimizer)
        for model, used in ((here, there), (moved, optimizer)):
            used.zero_grad()
            model(input_ids=ids.to(model.model.embed_tokens.weight.device), labels=ids, use_cache=False).loss.backward()
            used.step()
    assert held() <= before
    for one, other in zip(moved.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
