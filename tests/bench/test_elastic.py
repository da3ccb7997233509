"""Placements: where they have each role, sets that work at the same time, and what is said where there is no choice."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from shapes import small_qwen2
from typer.testing import CliRunner

from verl_shard.bench import elastic, elastic_roles, frame
from verl_shard.bench.elastic import (
    BY_HAND,
    OURS,
    TOGETHER,
    Layout,
    by_hand,
    left_out,
    measure,
    planned_layouts,
    row_of,
)
from verl_shard.bench.elastic_roles import ROLES, Load, Place, Roles
from verl_shard.bench.machine import Machine
from verl_shard.cli import bench_tables
from verl_shard.common.tables import as_text
from verl_shard.config.cards import find_card
from verl_shard.planning.models import PHASES

LOAD = Load(sequences=2, micro_batch=2, prompt=12, response=4)
ON_CPU = {role: Place({"": "cpu"}) for role in ROLES}


class Meter:
    """Counts what is asked of it, in the GPUs' place."""

    def __init__(self) -> None:
        self.begun = 0

    def wait(self) -> None: ...

    def begin_peak(self) -> None:
        self.begun += 1

    def peaks(self) -> tuple[int, ...]:
        return (self.begun, 7)


def roles_at(**places: int | str) -> Roles:
    return Roles(small_qwen2(), LOAD, {role: Place({"": at}) for role, at in places.items()}, mixed=False)


def test_by_hand_those_that_train_get_what_the_scorers_leave() -> None:
    def devices(gpus: int) -> dict[str, list[int]]:
        return {role: own["devices"] for role, own in by_hand(gpus)}

    assert devices(2) == {"actor": [0], "critic": [1], "ref": [1], "reward": [1]}
    assert devices(3) == {"actor": [0], "critic": [1], "ref": [1], "reward": [2]}
    assert devices(4) == {"actor": [0], "critic": [1], "ref": [2], "reward": [3]}
    assert devices(8) == {"actor": [0, 1, 2, 3, 4], "critic": [5], "ref": [6], "reward": [7]}
    assert dict(by_hand(1)) == {"reward": {"device_type": "cpu", "offload": None}}


def test_placements_on_one_and_on_two_gpus() -> None:
    one = planned_layouts(small_qwen2(), LOAD, find_card("h200"), 1)
    assert {name: made.words for name, made in one.items()} == {
        TOGETHER: "actor, critic, ref, reward on 0",
        BY_HAND: "actor, critic, ref on 0; reward on cpu",
        OURS: "actor, critic, ref, reward on 0",
    }
    machine = Machine(1, 2**37, {})
    assert all(list(made.phases) == list(PHASES) for made in one.values())
    # The reward model works on the CPU while the others prepare on the GPU; elsewhere nothing changes.
    together, apart = one[TOGETHER], one[BY_HAND]
    assert {name for name in PHASES if together.phases[name] != apart.phases[name]} == {"reward"}
    beside = sum(apart.phases[name] for name in ("old_log_prob", "ref_log_prob", "values"))
    others = sum(seconds for name, seconds in together.phases.items() if name != "reward")
    assert apart.step_s == pytest.approx(others - beside + max(beside, apart.phases["reward"]))
    assert set(left_out(machine, one)) == {"components on GPUs of their own", OURS}
    two = planned_layouts(small_qwen2(), LOAD, find_card("h200"), 2)
    assert two[BY_HAND].words == "actor on 0; critic, ref, reward on 1"
    assert all("cpu" not in made.words for made in two.values())
    assert set(two[TOGETHER].places["actor"].devices) == {0, 1}
    # Side by side a step takes as long as the longer half, which is not more than all of it in a row.
    assert (two[OURS].step_s or 9e9) < (two[TOGETHER].step_s or 0.0)
    assert left_out(Machine(2, 2**37, {}), two) == {}


def test_words_say_what_is_streamed() -> None:
    made = Layout(
        {"actor": Place({"a": 0, "b": 1}), "ref": Place({"": 0}, "stream"), "reward": Place({"": 0}, "stream")}
    )
    assert made.words == "actor on 0, 1; ref, reward on 0 (streamed)"


def test_roles_that_share_a_gpu_by_way_of_another_are_one_set() -> None:
    roles = Roles(
        small_qwen2(), LOAD, {
            "actor": Place({"a": 0, "b": 1}), "critic": Place({"": 2}), "ref": Place({"a": 1, "b": 3}),
            "reward": Place({"": 3}),
        }, mixed=False,
    )  # fmt: skip
    assert roles.sets() == [("critic",), ("actor", "ref", "reward")]


def test_sets_work_at_the_same_time_and_stages_in_turn() -> None:
    roles = roles_at(actor=0, critic=1)
    both = threading.Barrier(2)
    lock, seen = threading.Lock(), list[str]()

    def around(name: str, run: Any) -> None:
        if name in ("old_log_prob", "values", "update_actor", "update_critic"):
            both.wait(timeout=20)  # of either set, or nobody goes on
        with lock:
            seen.append(name)

    roles.step(around)
    assert seen[0] == "generate"
    assert set(seen[1:3]) == {"old_log_prob", "values"}
    assert set(seen[3:]) == {"update_actor", "update_critic"}


def test_what_one_set_raises_is_raised_when_the_others_are_done() -> None:
    seen: list[str] = []

    def around(name: str, run: Any) -> None:
        if name == "values":
            raise torch.OutOfMemoryError
        seen.append(name)

    with pytest.raises(torch.OutOfMemoryError):
        roles_at(actor=0, critic=1).step(around)
    assert seen == ["generate", "old_log_prob"]


def test_the_first_step_is_not_told_of_and_memory_runs_out_in_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    took = iter([50.0, 2.0, 4.0, 8.0])

    def step(self: Roles, around: Any) -> None:
        seconds = next(took)
        for phase, part in (("reward", 0.75), ("generate", 0.25)):
            around(phase, lambda part=part: now.__setitem__(0, now[0] + part * seconds))

    class Clocked(Meter):
        def begin_peak(self) -> None:
            assert now == [50.0]
            super().begin_peak()

    monkeypatch.setattr(Roles, "step", step)
    monkeypatch.setattr("verl_shard.bench.elastic.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Roles, "make", lambda self: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: now.__setitem__(0, now[0] + 0.5))
    places = {"actor": Place({"a": 0, "b": 1}), "reward": Place({"": "cpu"})}
    made = measure(Roles(small_qwen2(), LOAD, places, mixed=False), Clocked(), 3)
    # Of the last step, 8 s, the phases are told, in the order of PPO; the actor's two GPUs are waited for.
    assert made == (3.0, (1, 7), "stable", {"generate": 3.0, "reward": 6.0})
    assert list(made[3]) == ["generate", "reward"]
    row = row_of(OURS, Layout({}, 2.5, 9, {"generate": 2.0}), LOAD, *made)
    assert (row.phases, row.predicted_phases) == (made[3], {"generate": 2.0})
    assert (row.step_s, row.tokens_per_s, row.peaks, row.predicted_step_s) == (3.0, 32 / 3, (1, 7), 2.5)

    monkeypatch.undo()

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(elastic_roles, "value_loss", out_of_memory)
    roles = Roles(small_qwen2(), LOAD, ON_CPU, mixed=False)
    assert measure(roles, Meter(), 2) == (None, (), "OOM in update_critic", {})
    monkeypatch.setattr(elastic_roles, "made_model", out_of_memory)
    assert measure(roles, Meter(), 2) == (None, (), "OOM while it is loaded", {})
    assert row_of(OURS, Layout({}), LOAD, None, (), "OOM in values", {}).tokens_per_s is None


def test_on_the_cpu_there_is_one_placement_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "look", lambda model: Machine(0, 0, {"gpus": []}))
    app = typer.Typer()
    bench_tables.add_to(app)
    result, picture = tmp_path / "made.json", tmp_path / "made.png"
    called = CliRunner().invoke(app, ["elastic", "--quick", "--out", str(result), "--picture", str(picture)])
    assert called.exit_code == 0, called.output
    record = json.loads(result.read_text())
    assert (record["schema"], record["model"], record["gpus"]) == ("verl_shard/bench-elastic/1", "tiny", 0)
    (row,) = record["rows"]
    assert (row["placement"], row["where"], row["outcome"]) == (TOGETHER, "actor, critic, ref, reward on cpu", "stable")
    assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["step_s"])
    assert list(row["phases"]) == list(PHASES)
    assert all(seconds > 0 for seconds in row["phases"].values())
    assert row["predicted_phases"] == {}
    assert record["left_out"] == {f"{BY_HAND}, {OURS}": "there is no GPU: all components are on the one CPU"}
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_table_has_predictions_in_brackets() -> None:
    record = {
        "model": "small", "load": vars(LOAD), "gpus": 2,
        "rows": [
            {
                "placement": BY_HAND, "where": "here", "step_s": None, "tokens_per_s": None, "peaks": [],
                "outcome": "OOM in values", "predicted_step_s": 2.0, "predicted_peak": 2**30,
            },
            {
                "placement": OURS, "where": "there", "step_s": 1.5, "tokens_per_s": 21.3, "peaks": [2**30, 2**31],
                "outcome": "stable", "predicted_step_s": None, "predicted_peak": None,
            },
        ],
    }  # fmt: skip
    lines = as_text(160, elastic.elastic_table(record)).splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        [BY_HAND, "here", "-", "- (2.00)", "- (1.00 GiB)", "OOM in values"],
        [OURS, "there", "21", "1.50", "2.00 GiB", "stable"],
    ]


def test_phases_are_shown_beside_what_was_expected_and_records_of_before_have_none() -> None:
    rows = [
        {"placement": TOGETHER, "phases": {"reward": 0.5, "generate": 1.0}, "predicted_phases": {"generate": 2.0}},
        {"placement": BY_HAND},
    ]
    lines = as_text(160, elastic.phases_table({"rows": rows})).splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [[TOGETHER, "1.00 (2.00)", "0.50"], [BY_HAND, "-", "-"]]
    assert next(line for line in lines if "generate" in line).replace("┃", "").split() == ["generate", "reward"]
