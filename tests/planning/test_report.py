"""What a plan's tables say; and where the remedies in them save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from shapes import small_qwen2

from verl_shard.common.units import GIB
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.memory.constants import CUDA_CONTEXT
from verl_shard.planning.build import build_plan
from verl_shard.planning.plan import Advice, Plan, RemedyRow
from verl_shard.planning.remedies import REMEDIES
from verl_shard.planning.search import Found, Taken


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
