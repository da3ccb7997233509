"""A reward model with a copy on each of its GPUs: bytes and seconds by hand from those of one copy."""

from __future__ import annotations

from typing import Any

import pytest
from shapes import small_qwen2

from verl_shard.common.errors import ConfigError
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.config.resource_config import load_resource_config
from verl_shard.memory.constants import CUDA_CONTEXT
from verl_shard.planning.build import build_plan
from verl_shard.planning.plan import Plan
from verl_shard.planning.rates import Rates

N, MICRO = 24, 4
WORK = {"train_batch_size": N, "prompt_length": 48, "response_length": 80, "algorithm": "rloo", "kl": "none"}
# Operations take the GPU all the time and the host next to none, or the other way round.
BUSY = Rates.of(Card("slow", 2**40, 1e9, 1e9, 1e8, 1e9, 1e9, (9, 0), "made up"))
CARD = Card("small", 4096 * 2**20 + CUDA_CONTEXT.n_bytes, 1e14, 1e13, 1e12, 5e10, 1e11, (9, 0), "made up")


def plan(n: int, *, side_by_side: bool = False, rates: Rates | None = None, **reward: Any) -> Plan:
    roles = {
        "actor": {"model": small_qwen2(), **({} if side_by_side else {"devices": [0]})},
        "reward": {"model": small_qwen2(), "micro_batch_size": MICRO, **reward},
    }
    return build_plan(
        roles, gpus=Inventory.declared(n, card=CARD), workload=WORK, rates=rates, side_by_side=side_by_side
    )


def reward_of(made: Plan) -> tuple[dict[int, int], float]:
    (row,) = [row for row in made.phases if row.phase == "reward"]
    return dict(row.peaks), row.seconds


def test_each_gpu_has_all_of_it_in_every_phase() -> None:
    one, two = plan(3, devices=[1]), plan(3, devices=[1, 2], strategy="data_parallel")
    of_one, of_two = reward_of(one)[0], reward_of(two)[0]
    assert of_two == {0: of_one[0], 1: of_one[1], 2: of_one[1]}
    for row in two.phases:
        if row.phase != "reward":
            assert row.peaks[1] == row.peaks[2] > 0
    for row in (row for row in two.phases if row.phase == "reward"):
        assert sum(row.parts.values()) == row.peaks[row.fullest]
    assert two.roles["reward"].devices == (1, 2)
    assert two.roles["reward"].device_map is None
    assert any("reward has one on each of 2 GPUs" in check.says for check in two.checks)
    assert any(check.says.startswith("none: ") for check in one.checks)


@pytest.mark.parametrize(("copies", "share"), [(2, 3 / 6), (4, 2 / 6)])
def test_batches_are_shared_out(copies: int, share: float) -> None:
    """Six batches of four: three each of two copies, and of four at most two."""
    _, alone = reward_of(plan(5, devices=[1], rates=BUSY))
    _, shared = reward_of(plan(5, devices=list(range(1, copies + 1)), strategy="data_parallel", rates=BUSY))
    assert shared == pytest.approx(alone * share, rel=1e-6)


def test_one_process_launches_for_all() -> None:
    """On a fast card a model so small waits for the host, which is no faster for several."""
    _, alone = reward_of(plan(3, devices=[1]))
    _, shared = reward_of(plan(3, devices=[1, 2], strategy="data_parallel"))
    assert shared == pytest.approx(alone, rel=0.02)


def test_no_copy_is_without_work() -> None:
    """Twelve copies of 24 sequences work in batches of two, whatever larger ones are allowed."""
    many = plan(13, devices=list(range(1, 13)), strategy="data_parallel", rates=BUSY)
    one = plan(13, devices=[1], micro_batch_size=2, rates=BUSY)
    (peaks, seconds), (alone, all_s) = reward_of(many), reward_of(one)
    assert peaks[12] == alone[1]
    assert seconds == pytest.approx(all_s / 12, rel=1e-6)


def test_streamed_copies_each_have_their_weights_in_host_memory() -> None:
    one = plan(3, devices=[1], offload="stream")
    two = plan(3, devices=[1, 2], offload="stream", strategy="data_parallel")
    assert two.host_parts["reward weights"] == 2 * one.host_parts["reward weights"] > 0
    assert reward_of(two)[0][2] == reward_of(one)[0][1]


def test_side_by_side_there_are_several() -> None:
    made = plan(3, side_by_side=True, strategy="data_parallel")
    assert len(made.roles["reward"].devices) >= 2
    peaks, _ = reward_of(made)
    assert len({peaks[gpu] for gpu in made.roles["reward"].devices}) == 1


def test_one_gpu_has_one_copy() -> None:
    with pytest.raises(ConfigError, match=r"reward.strategy = data_parallel: there is one GPU, and so one copy"):
        plan(1, strategy="data_parallel")


def test_a_resource_config_with_copies_is_planned(tmp_path: Any) -> None:
    small_qwen2().save_pretrained(tmp_path / "m")
    (tmp_path / "r.yaml").write_text(
        f"actor: {{device_ids: [0], strategy: device_map, model: {tmp_path / 'm'}}}\n"
        f"reward: {{device_ids: [1, 2], strategy: data_parallel, model: {tmp_path / 'm'}, micro_batch_size: 4}}\n"
    )
    config = load_resource_config(tmp_path / "r.yaml")
    made = build_plan(config, gpus=Inventory.declared(3, card=CARD), workload=WORK, backend="device_map")
    assert reward_of(made)[0] == reward_of(plan(3, devices=[1, 2], strategy="data_parallel"))[0]
