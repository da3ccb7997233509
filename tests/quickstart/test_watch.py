"""Watching a run: which records are steps, what is said of them, and the time that is left."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from verl_shard.quickstart import watch
from verl_shard.quickstart.watch import exact_validation, is_step, validation_reward, value, watching


def _step(step: int, **data: float) -> dict[str, Any]:
    return {"step": step, "data": {"critic/score/mean": 0.5, **data}}


def test_the_first_metric_that_is_there_counts() -> None:
    record = _step(1, **{"actor/kl_loss": 2})
    assert value(record, "actor/reward_kl_penalty", "actor/kl_loss") == 2.0
    assert value(record, "actor/reward_kl_penalty") is None
    assert is_step(record)
    assert not is_step({"step": 0, "data": {"val-core/a/reward/mean@1": 1.0}})


def test_the_validation_reward_is_the_mean_over_data_sources() -> None:
    data = {
        "val-core/chain_sum/reward/mean@1": 0.25, "val-core/gcd/reward/mean@1": 0.75, "val-aux/num_turns/mean": 2.0,
        "val-core/gcd/acc/mean@1": 9.0, "val-core/gcd/reward/best@4/mean": 9.0, "critic/score/mean": 9.0,
    }  # fmt: skip
    assert validation_reward({"step": 1, "data": data}) == 0.5
    assert validation_reward(_step(1)) is None


def test_the_exact_reward_beside_a_models_is_a_mean_too() -> None:
    data = {
        "val-core/a/reward/mean@1": 9.0, "val-aux/a/exact/mean@1": 0.25, "val-aux/b/exact/mean@1": 0.5,
        "val-aux/a/model/mean@1": 9.0, "val-aux/a/exact/std@4": 9.0,
    }  # fmt: skip
    assert exact_validation({"step": 1, "data": data}) == 0.375
    assert exact_validation({"step": 1, "data": {"val-core/a/reward/mean@1": 9.0}}) is None


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    monkeypatch.setattr(watch, "err", Console(file=text, width=200, highlight=False))
    return text


def test_a_pipe_gets_a_line_every_ten_steps_and_one_at_the_end(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(1000, 10_000, 3))
    monkeypatch.setattr("time.monotonic", lambda: next(now) * 1.0)
    with watching(24, 0) as shown:
        monkeypatch.setattr(shown, "progress", _Silent(shown.progress))
        shown.on_record({"step": 0, "data": {"val-core/a/reward/mean@1": 0.125}})
        for step in range(1, 25):
            shown.on_record(_step(step, **{"actor/kl_loss": 0.01, "perf/throughput": 1234.4}))
    assert screen.getvalue().splitlines() == [
        "step 10/24  reward 0.500  KL 0.0100  1234 tokens/s  validation 0.125  42 s left",
        "step 20/24  reward 0.500  KL 0.0100  1234 tokens/s  validation 0.125  12 s left",
        "step 24/24  reward 0.500  KL 0.0100  1234 tokens/s  validation 0.125  0 s left",
    ]


def test_both_validations_are_shown_with_a_reward_model(screen: io.StringIO) -> None:
    with watching(1, 0) as shown:
        shown.on_record({"step": 0, "data": {"val-core/a/reward/mean@1": -0.5, "val-aux/a/exact/mean@1": 0.25}})
        shown.on_record(_step(1))
    assert screen.getvalue().splitlines() == ["step 1/1  reward 0.500  validation -0.500  exact 0.250"]


class _Silent:
    """A progress bar that does not look at the clock."""

    def __init__(self, progress: Any) -> None:
        self.console = progress.console

    def update(self, *_: Any, **__: Any) -> None: ...


def test_the_time_left_is_that_of_the_last_twenty_steps(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with watching(130, 0) as shown:
        monkeypatch.setattr(shown, "progress", _Silent(shown.progress))
        for step in range(1, 101):
            now[0] += 100.0 if step <= 80 else 2.0
            shown.on_record(_step(step))
    # Step 100: the last 20 stamps are 2 s apart, and 30 steps are left.
    assert screen.getvalue().splitlines()[-1].endswith("1 min 00 s left")


def test_a_metric_that_is_absent_is_left_out(screen: io.StringIO) -> None:
    with watching(1, 0) as shown:
        shown.on_record(_step(1))
    assert screen.getvalue() == "step 1/1  reward 0.500\n"


def test_the_bar_goes_with_the_steps() -> None:
    with watching(30, 10) as shown:
        task = shown.progress.tasks[0]
        assert (task.completed, task.total, task.description) == (10, 30, "starting verl")
        shown.on_record({"step": 10, "data": {"val-core/a/reward/mean@1": 0.125}})
        assert task.description == "starting verl"
        shown.on_record(_step(11))
        assert (task.completed, task.description) == (11, "training")
