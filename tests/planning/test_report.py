"""What a plan's tables say; and where the remedies in them save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from shapes import small_qwen2
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_shard.common.units import GIB
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.config.workload import group_of_one
from verl_shard.memory.constants import CUDA_CONTEXT
from verl_shard.planning.build import build_plan
from verl_shard.planning.offload import _why
from verl_shard.planning.plan import Advice, Plan, RemedyRow
from verl_shard.planning.remedies import REMEDIES
from verl_shard.planning.search import Evaluation, Found, Taken


def plan() -> Plan:
    """GRPO on a card that has room for it."""
    card = Card("large", 2**32 + CUDA_CONTEXT.n_bytes, 1e14, 1e13, 1e12, 5e10, 1e11, (9, 0), "made up")
    work = {"train_batch_size": 4, "prompt_length": 16, "response_length": 48, "algorithm": "grpo", "kl": "loss"}
    return build_plan({"actor": small_qwen2()}, gpus=Inventory.declared(1, card=card), workload=work)


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan()


def test_a_remedy_says_in_which_phase_it_saves(small: Plan) -> None:
    def told(saved: int, elsewhere: str | None, there: int) -> list[str]:
        row = RemedyRow("r", "ref", "ref.x=1", "update_actor", saved, 0.5, "none", True, False, elsewhere, there)
        (line,) = [line for line in replace(small, remedies=(row,)).report(200).splitlines() if line.startswith("│ r ")]
        return [cell.strip() for cell in line.split("│")[4:6]]

    assert told(3 * GIB, None, 0) == ["3.00 GiB", "update_actor"]
    assert told(0, "ref_log_prob", 2 * GIB) == ["2.00 GiB", "ref_log_prob; nothing in update_actor"]
    assert told(-GIB, "values", 2 * GIB) == ["2.00 GiB", "values; 1.00 GiB more in update_actor"]
    assert told(0, None, 0) == ["0 B", "no phase"]


def test_advice_says_in_which_phase_it_saves(small: Plan) -> None:
    def told(saved: int) -> list[str]:
        one = Advice("ref", "its weights", True, "because", "update_actor", saved, 0.5)
        (line,) = [line for line in replace(small, advice=(one,)).report(200).splitlines() if "its weights" in line]
        return [cell.strip() for cell in line.split("│")[5:7]]

    assert told(3 * GIB) == ["3.00 GiB", "update_actor"]
    assert told(-1) == ["0 B", "no phase"]


@pytest.mark.parametrize(
    ("seconds", "remedy", "advice"),
    [(-0.2, "about 0", "about 0"), (0.2, "about 0", "about 0"), (0.3, "+0.30", "0.30"), (-0.3, "-0.30", "-0.30")],
)
def test_what_is_no_time_to_the_search_is_none_in_the_tables(
    seconds: float, remedy: str, advice: str, small: Plan
) -> None:
    """Of a step of 100 s that is 0.2 s."""
    row = RemedyRow("r", "ref", "ref.x=1", "update_actor", 1, seconds, "none", True, True)
    one = Advice("ref", "its weights", False, "because", "update_critic", 2, seconds)
    text = replace(small, step_seconds=100.0, remedies=(row,), advice=(one,)).report(200)
    (of_remedy,) = [line for line in text.splitlines() if line.startswith("│ r ")]
    (of_advice,) = [line for line in text.splitlines() if "its weights" in line]
    assert of_remedy.split("│")[6].strip() == remedy
    assert of_advice.split("│")[7].strip() == advice
    # Why the two differ for one setting.
    said = "Offload: this plan with it beside this plan without it, in the phase that it relieves most"
    why = "; a remedy is counted after those above it, and in the phase that was most over"
    assert said + why in " ".join(text.split())
    alone = replace(small, advice=(one,)).report(200)
    assert said in " ".join(alone.split())
    assert why not in " ".join(alone.split())


def test_advice_against_what_would_be_faster_says_so(small: Plan) -> None:
    (without, with_it) = (
        Evaluation({("update_actor", 0): GIB}, {0: 3 * GIB}, seconds, {}, {}) for seconds in (100.0, 99.0)
    )
    said = "it fits without: update_actor leaves 2.00 GiB"
    assert _why(without, with_it, "update_actor", 1) == f"{said}; with it other cuts of the roles would save 1.00 s"
    assert _why(without, replace(with_it, seconds=99.9), "update_actor", 1) == said
    assert _why(without, replace(with_it, seconds=101.0), "update_actor", 1) == said


def test_a_group_of_one_is_warned_of(small: Plan) -> None:
    """verl 0.9.1 itself, asked for the advantages of two groups of one response each, of rewards 3 and -2."""
    advantages, _ = compute_grpo_outcome_advantage(
        torch.tensor([[0.0, 3.0], [0.0, -2.0]]), torch.ones(2, 2), np.array(["a", "b"])
    )
    assert advantages.tolist() == [[pytest.approx(3.0)] * 2, [pytest.approx(-2.0)] * 2]
    assert small.workload.n == 1
    (warned,) = [check for check in small.checks if check.level == "warning"]
    assert warned.what == "grpo with n=1"
    assert warned.says == (
        "each group is one response, for which verl takes 0 as the mean and 1 as the deviation: its advantage is its reward "
        "itself, and nothing is compared with the rest of a group. Use 2 or more, such as 4 or 8, or an algorithm without "
        "groups, such as reinforce_plus_plus"
    )
    assert "warning: grpo with n=1: each group is one response" in small.report(200)
    assert group_of_one("grpo", 2) is None
    assert group_of_one("ppo", 1) is None


def test_what_a_plan_says_of_a_remedy_comes_from_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(elsewhere: tuple[str, int] | None) -> RemedyRow:
        def found(start: Any, workload: Any, evaluate: Any, *more: Any) -> Found:
            step = Taken(REMEDIES[0], "ref", {"micro_batch_size": 1}, "update_actor", 0, 0.5, elsewhere)
            return Found(start, evaluate(start), (step,))

        monkeypatch.setattr("verl_shard.planning.build.cheapest", found)
        made = plan()
        assert Plan.from_dict(made.to_dict()) == made
        return made.remedies[0]

    row = told(("ref_log_prob", 7))
    assert (row.phase, row.saved, row.elsewhere, row.saved_elsewhere) == ("update_actor", 0, "ref_log_prob", 7)
    assert (told(None).elsewhere, told(None).saved_elsewhere) == (None, 0)
