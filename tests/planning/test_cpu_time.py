"""A role that scores on the CPU: its seconds by hand, beside and after what GPUs do, and where they are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shapes import small_qwen2

from verl_shard.bench.elastic import BY_HAND, TOGETHER, by_hand, layout
from verl_shard.bench.elastic_roles import Load
from verl_shard.bench.machine import named_config
from verl_shard.config.cards import CARDS, find_card
from verl_shard.config.inventory import Inventory
from verl_shard.config.workload import Workload
from verl_shard.planning.build import build_plan
from verl_shard.planning.models import Models
from verl_shard.planning.ours import OurEngine
from verl_shard.planning.placed_apart import placement_of
from verl_shard.planning.plan import Plan
from verl_shard.planning.rates import CPU_FLOPS, Rates
from verl_shard.planning.settings import fill, read_roles

SEQUENCES, PROMPT, RESPONSE, MICRO = 12, 48, 80, 4
WORK: dict[str, Any] = {
    "train_batch_size": SEQUENCES, "prompt_length": PROMPT, "response_length": RESPONSE, "algorithm": "rloo", "kl": "none",
}  # fmt: skip
RATES = replace(Rates.of(CARDS["h200-141g"]), cpu_flops=1e9, source="measured")


def flops(sequences: int, length: int) -> int:
    """Of small_qwen2 with a head of one score: 4 blocks of width 64, 4 heads of 16, 2 of them keys', and 160 inside."""
    projections = 64 * (64 + 2 * 32) + 64 * 64
    block = 2 * sequences * length * (projections + 3 * 64 * 160) + 4 * sequences * length**2 * 64
    angles = 2 * length * 8  # of positions and frequencies, for all sequences at once
    return 4 * block + 2 * sequences * length * 64 + angles


def plan(n: int = 1, *, work: dict[str, Any] | None = None, side_by_side: bool = False, **reward: Any) -> Plan:
    given = {"model": small_qwen2(num_labels=1), "micro_batch_size": MICRO, **reward}
    return build_plan(
        {"actor": small_qwen2(), "reward": given}, gpus=Inventory.declared(n, card="h200"), workload=WORK | (work or {}),
        rates=RATES, side_by_side=side_by_side,
    )  # fmt: skip


def seconds(made: Plan) -> dict[str, float]:
    return {row.phase: row.seconds for row in made.phases}


def test_seconds_by_hand() -> None:
    found = seconds(plan(device_type="cpu"))
    assert found["reward"] == pytest.approx(3 * flops(MICRO, PROMPT + RESPONSE) / 1e9, rel=1e-12)
    # Nothing of the GPU's: not even the host's launches.
    slow = replace(RATES, forward_s=1.0, bf16_flops=1.0, memory_bandwidth=1.0, kernel_s=1.0)
    assert RATES.cpu_flops == slow.cpu_flops
    other = build_plan(
        {"actor": small_qwen2(), "reward": {"model": small_qwen2(num_labels=1), "micro_batch_size": MICRO, "device_type": "cpu"}},
        gpus=Inventory.declared(1, card="h200"), workload=WORK, rates=slow,
    )  # fmt: skip
    assert seconds(other)["reward"] == found["reward"]
    assert seconds(other)["old_log_prob"] > 1000 * found["old_log_prob"]


def test_shorter_responses_take_their_share() -> None:
    short = seconds(plan(work={"mean_response_length": 16}, device_type="cpu"))["reward"]
    assert short == pytest.approx(
        3 * flops(MICRO, PROMPT + RESPONSE) / 1e9 * (PROMPT + 16) / (PROMPT + RESPONSE), rel=1e-12
    )


def test_one_phase_follows_the_other_but_for_roles_side_by_side() -> None:
    """The trainer waits for the scores before it goes on; sets of roles with devices of their own work at the same time."""
    on_gpu, on_cpu, beside = plan(), plan(device_type="cpu"), plan(side_by_side=True, device_type="cpu")
    assert on_cpu.step_seconds == pytest.approx(sum(seconds(on_cpu).values()))
    price = seconds(on_cpu)["reward"] - seconds(on_gpu)["reward"]
    assert price > 0
    assert on_cpu.step_seconds - on_gpu.step_seconds == pytest.approx(price)
    assert list(seconds(beside)) == ["generate", "reward", "old_log_prob", "update_actor"]
    assert 0 < seconds(beside)["old_log_prob"] < seconds(beside)["reward"]
    assert beside.step_seconds == pytest.approx(on_cpu.step_seconds - seconds(beside)["old_log_prob"])


def test_the_search_for_a_placement_knows_what_is_on_the_cpu() -> None:
    given = {"model": small_qwen2(num_labels=1), "micro_batch_size": MICRO, "device_type": "cpu"}
    work = Workload(**WORK)
    settings = fill(read_roles({"actor": small_qwen2(), "reward": given}), work)
    engine = OurEngine(work, Inventory.declared(1, card="h200"), Models(), RATES, side_by_side=True)
    best = placement_of(engine, settings).best
    assert best.stage_s["preparation"] == pytest.approx(3 * flops(MICRO, PROMPT + RESPONSE) / 1e9, rel=1e-12)
    assert best.bound_by["preparation"] == ("reward",)
    assert best.step_s == pytest.approx(engine.evaluate(settings).seconds)


def test_two_scorers_share_the_one_cpu() -> None:
    given: dict[str, Any] = {"model": small_qwen2(), "micro_batch_size": MICRO, "device_type": "cpu"}
    both = build_plan(
        {"actor": small_qwen2(), "ref": given, "reward": {**given, "model": small_qwen2(num_labels=1)}},
        gpus=Inventory.declared(1, card="h200"), workload=WORK | {"kl": "loss"}, rates=RATES, side_by_side=True,
    )  # fmt: skip
    took = seconds(both)
    on_gpu = took["generate"] + took["update_actor"]
    assert both.step_seconds == pytest.approx(took["reward"] + took["ref_log_prob"] + on_gpu)


def test_an_adapters_reference_is_on_the_actors_gpus_whatever_its_own_device() -> None:
    given = {"actor": {"model": small_qwen2(), "lora_rank": 8}, "ref": {"device_type": "cpu"}}
    asked: dict[str, Any] = {
        "gpus": Inventory.declared(1, card="h200"),
        "workload": WORK | {"kl": "loss"},
        "rates": RATES,
    }
    made, other = build_plan(given, **asked), build_plan({"actor": given["actor"]}, **asked)
    assert "ref_log_prob" in seconds(made)
    assert seconds(made) == seconds(other)
    assert [check for check in made.checks if check.what == "time on the CPU"] == []


def test_the_report_says_where_the_time_is_from() -> None:
    made = plan(device_type="cpu")
    (check,) = [check for check in made.checks if check.what == "time on the CPU"]
    took = seconds(made)["reward"]
    assert check.says == f"reward {took:.2f} s at 0.001 TFLOP/s (measured)"
    assert " ".join(check.says.split()) in " ".join(made.report(200).split())
    assert [check for check in plan().checks if check.what == "time on the CPU"] == []


def test_the_two_placements_of_an_h200_are_in_the_measured_order() -> None:
    """The rates of a rollout by graphs and of the CPU are from another run of this bench; the slower host of this one makes
    every phase longer, by up to 60 % where the GPU waits for launches."""
    record = json.loads((Path(__file__).parents[2] / "docs" / "results" / "h200_elastic.json").read_text())
    measured = {row["placement"]: row for row in record["rows"]}
    load = Load(**record["load"])
    config, card = named_config(record["model"]), find_card("h200")
    found = {
        TOGETHER: layout(config, load, card, 1, {}, side_by_side=False),
        BY_HAND: layout(config, load, card, 1, dict(by_hand(1)), side_by_side=True),
    }
    predicted = {name: made.step_s or 0.0 for name, made in found.items()}
    assert predicted[TOGETHER] < predicted[BY_HAND]
    for name, row in measured.items():
        assert 0.75 < predicted[name] / row["step_s"] < 1
        assert found[name].phases["generate"] == pytest.approx(row["phases"]["generate"], rel=0.15)
        assert found[name].peak == pytest.approx(row["peaks"][0], rel=0.01)
    # What whole steps leave for it: phases are of one more step, in which the CPU took longer.
    apart = measured[BY_HAND]
    others = sum(seconds for phase, seconds in apart["phases"].items() if phase != "reward")
    assert found[BY_HAND].phases["reward"] == pytest.approx(apart["step_s"] - others, rel=0.05)
    # Qwen2 0.5B: 24 blocks of width 896, keys and values of 128, 4,864 inside; products of attention counted whole.
    tokens, block = 16 * 512, 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    n_flops = 24 * (2 * tokens * block + 4 * tokens * 512 * 896)
    assert found[BY_HAND].phases["reward"] == pytest.approx(n_flops / CPU_FLOPS, rel=1e-4)
    other = json.loads((Path(__file__).parents[2] / "docs" / "results" / "h200_elastic_rates.json").read_text())
    phases = {row["placement"]: row["phases"] for row in other["rows"]}
    assert pytest.approx(n_flops / phases[BY_HAND]["reward"], rel=0.01) == CPU_FLOPS
    for name, made in found.items():
        assert made.phases["generate"] == pytest.approx(phases[name]["generate"], rel=0.02)  # GRAPH_KERNEL_S is from it
