"""A reward model or a reference with a copy on each of its GPUs: bytes and seconds by hand from those of one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shapes import small_qwen2

from verl_shard.common.errors import ConfigError
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.config.resource_config import load_resource_config
from verl_shard.config.workload import Workload
from verl_shard.memory.constants import CUDA_CONTEXT
from verl_shard.planning.build import build_plan
from verl_shard.planning.copies import copied_roles
from verl_shard.planning.plan import Plan
from verl_shard.planning.plan_file import read_role
from verl_shard.planning.rates import Rates
from verl_shard.planning.settings import fill, read_roles

N, MICRO = 24, 4
WORK: dict[str, Any] = {
    "train_batch_size": N,
    "prompt_length": 48,
    "response_length": 80,
    "algorithm": "rloo",
    "kl": "none",
}
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


def ref_of(
    n: int, *, side_by_side: bool = False, micro_batch_size: int = 4, **ref: Any
) -> tuple[Plan, dict[int, int], float]:
    """A plan with a reference, and of its phase the peaks and the seconds."""
    actor = {"model": small_qwen2(), **({} if side_by_side else {"devices": [0]})}
    made = build_plan(
        {"actor": actor, "ref": {"micro_batch_size": micro_batch_size, **ref}},
        gpus=Inventory.declared(n, card=CARD),
        workload={**WORK, "kl": "loss"},
        rates=BUSY,
        side_by_side=side_by_side,
    )
    (row,) = [row for row in made.phases if row.phase == "ref_log_prob"]
    return made, dict(row.peaks), row.seconds


def test_a_reference_has_copies_as_a_reward_model_has(tmp_path: Any) -> None:
    one, of_one, alone = ref_of(3, devices=[1])
    two, of_two, shared = ref_of(3, devices=[1, 2], strategy="data_parallel")
    assert of_two == {0: of_one[0], 1: of_one[1], 2: of_one[1]}
    assert shared == pytest.approx(alone * 3 / 6, rel=1e-6)
    for row, same in zip(two.phases, one.phases, strict=True):
        assert sum(row.parts.values()) == row.peaks[row.fullest]
        if row.phase != "ref_log_prob":
            assert row.peaks == {0: same.peaks[0], 1: same.peaks[1], 2: same.peaks[1]}
    assert (two.roles["ref"].devices, two.roles["ref"].device_map) == ((1, 2), None)
    assert any("ref has one on each of 2 GPUs" in check.says for check in two.checks)
    assert "a copy on each" in two.report(140)
    assert "a copy on each" not in one.report(140)
    # Twelve copies of 24 sequences work in micro-batches of two.
    _, of_many, many_s = ref_of(13, devices=list(range(1, 13)), strategy="data_parallel")
    _, small, small_s = ref_of(13, devices=[1], micro_batch_size=2)
    assert of_many[12] == small[1]
    assert many_s == pytest.approx(small_s / 12, rel=1e-6)
    # What the engine reads of it.
    two.save(tmp_path / "plan.yaml")
    entry = read_role(tmp_path / "plan.yaml", "ref")
    assert (entry["devices"], entry["settings"]["strategy"], entry["device_map"]) == ([1, 2], "data_parallel", None)


def test_streamed_copies_of_a_reference() -> None:
    one, of_one, _ = ref_of(3, devices=[1], offload="stream")
    two, of_two, _ = ref_of(3, devices=[1, 2], offload="stream", strategy="data_parallel")
    assert two.host_parts["ref weights"] == 2 * one.host_parts["ref weights"] > 0
    assert of_two[2] == of_one[1]


def test_a_reference_side_by_side_has_several() -> None:
    made, peaks, _ = ref_of(3, side_by_side=True, strategy="data_parallel")
    assert len(made.roles["ref"].devices) >= 2
    assert len({peaks[gpu] for gpu in made.roles["ref"].devices}) == 1


def test_adapters_that_a_remedy_brings_leave_no_copies() -> None:
    """The reference is then the actor without them, on the actor's GPUs."""
    settings = fill(
        read_roles({"actor": small_qwen2(), "ref": {"strategy": "data_parallel", "micro_batch_size": 4}}),
        Workload(**{**WORK, "kl": "loss"}),
    )
    assert set(copied_roles(settings)) == {"ref"}
    assert copied_roles(settings.changed("actor", lora_rank=8)) == {}


def test_ppo_trainer_takes_the_model_config_of_a_plan_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_shard.training.placement import read_places

    given = plan(3, devices=[1, 2], strategy="data_parallel").model_config
    made, *_ = ref_of(3, devices=[2, 0], strategy="data_parallel")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert given["reward"] == {"copies_on": [1, 2], "dtype": "bfloat16", "attn_implementation": "sdpa"}
    place = read_places(given, ("actor", "reward"), lora=False).roles["reward"]
    assert (place.devices, place.copies, place.device_map) == ((1, 2), True, None)
    place = read_places(made, ("actor", "ref"), lora=False).roles["ref"]
    assert (place.devices, place.copies, place.precision) == ((2, 0), True, "bf16")


def test_one_gpu_has_one_copy() -> None:
    with pytest.raises(ConfigError, match=r"reward.strategy = data_parallel: there is one GPU, and so one copy"):
        plan(1, strategy="data_parallel")
    with pytest.raises(ConfigError, match=r"ref.strategy = data_parallel: there is one GPU, and so one copy"):
        ref_of(1, strategy="data_parallel")


def test_a_resource_config_with_copies_is_planned(tmp_path: Any) -> None:
    small_qwen2().save_pretrained(tmp_path / "m")
    (tmp_path / "r.yaml").write_text(
        f"actor: {{device_ids: [0], strategy: device_map, model: {tmp_path / 'm'}}}\n"
        f"reward: {{device_ids: [1, 2], strategy: data_parallel, model: {tmp_path / 'm'}, micro_batch_size: 4}}\n"
    )
    config = load_resource_config(tmp_path / "r.yaml")
    made = build_plan(config, gpus=Inventory.declared(3, card=CARD), workload=WORK, backend="device_map")
    assert reward_of(made)[0] == reward_of(plan(3, devices=[1, 2], strategy="data_parallel"))[0]
