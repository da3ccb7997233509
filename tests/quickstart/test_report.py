"""The report of a run, over records whose means are known."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verl_shard.common.errors import MissingExtraError
from verl_shard.quickstart.report import draw, sentence, summary_table, validations


def _step(step: int, reward: float, **more: float) -> dict[str, Any]:
    return {"step": step, "data": {"critic/score/mean": reward, **more}}


def _val(step: int, *means: float, **more: float) -> dict[str, Any]:
    return {"step": step, "data": {**{f"val-core/task{n}/reward/mean@1": mean for n, mean in enumerate(means)}, **more}}


def _rows(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    text = io.StringIO()
    Console(file=text, width=120).print(summary_table(records))
    cells = [[cell.strip() for cell in line.strip("│┃ \n").split("│")] for line in text.getvalue().splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) == 3}


def test_first_and_last_are_means_over_ten_steps() -> None:
    records = [
        _step(n, n / 100, **{"perf/throughput": 1000.0 * n, "response_length/mean": 2.0 * n}) for n in range(1, 31)
    ]
    rows = _rows(records)
    # Means of 1..10 and of 21..30: 5.5 and 25.5.
    assert rows["reward"] == ["0.055", "0.255"]
    assert rows["response length (tokens)"] == ["11.0", "51.0"]
    assert rows["tokens/s"] == ["5500", "25500"]
    assert set(rows) == {"reward", "response length (tokens)", "tokens/s"}


def test_a_short_run_is_compared_half_with_half() -> None:
    assert _rows([_step(1, 0.25), _step(2, 0.75)])["reward"] == ["0.250", "0.750"]
    assert _rows([_step(1, 0.25)])["reward"] == ["0.250", "0.250"]
    three = [_step(1, 0.25), _step(2, 0.5), _step(3, 0.75)]
    assert _rows(three)["reward"] == ["0.250", "0.750"]


def test_either_kl_is_shown() -> None:
    assert _rows([_step(1, 0.0, **{"actor/reward_kl_penalty": 0.5})])["KL to the reference"] == ["0.5000"] * 2
    assert _rows([_step(1, 0.0, **{"actor/kl_loss": 0.25})])["KL to the reference"] == ["0.2500"] * 2


def test_the_validation_before_the_first_step_is_no_step() -> None:
    records = [
        _val(0, 0.25, 0.75),
        _step(1, 0.1),
        {"step": 2, "data": {**_step(2, 0.2)["data"], **_val(2, 1.0, 0.5)["data"]}},
    ]
    assert validations(records) == [(0, 0.5), (2, 0.75)]
    assert _rows(records)["validation reward"] == ["0.500", "0.750"]
    assert sentence(records) == "2 steps of RL raised the validation reward from 0.500 to 0.750 (+0.250)."


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (0.5, 0.4, "10 steps of RL lowered the validation reward from 0.500 to 0.400 (-0.100)."),
        (0.5, 0.5, "10 steps of RL left the validation reward at 0.500."),
    ],
)
def test_the_sentence_says_which_way_it_went(before: float, after: float, text: str) -> None:
    assert sentence([_val(0, before), _step(5, 0.1), _val(10, after)]) == text


def _scored(step: int, model: float, exact: float) -> dict[str, Any]:
    return _val(step, model, **{"val-aux/task0/exact/mean@1": exact})


def test_a_reward_models_score_and_the_exact_reward_are_both_told() -> None:
    records = [_scored(0, -0.5, 0.25), _step(5, 0.1), _scored(10, 0.75, 0.125)]
    assert sentence(records) == (
        "10 steps of RL raised the reward model's validation score from -0.500 to 0.750 (+1.250), and lowered the exact "
        "reward, which it was not trained on, from 0.250 to 0.125 (-0.125)."
    )
    assert sentence([_scored(0, 0.5, 0.5), _scored(1, 0.5, 0.5)]) == (
        "1 step of RL left the reward model's validation score at 0.500, and left the exact reward, which it was not "
        "trained on, at 0.500."
    )
    rows = _rows(records)
    assert rows["validation, reward model's score"] == ["-0.500", "0.750"]
    assert rows["validation, exact reward"] == ["0.250", "0.125"]
    assert "validation reward" not in rows


def test_without_two_validations_the_sentence_says_so() -> None:
    assert (
        sentence([_val(0, 0.5), _step(1, 0.1)])
        == "1 step ran; the validation reward was measured fewer than two times."
    )
    assert sentence([]).startswith("0 steps ran;")


def test_the_picture_is_a_whole_png(tmp_path: Path) -> None:
    records = [_val(0, 0.5), *(_step(n, n / 10, **{"response_length/mean": 3.0}) for n in range(1, 13)), _val(12, 0.9)]
    draw(records, tmp_path / "progress.png", "PPO")
    data = (tmp_path / "progress.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    # 12 x 3.8 inches at 130 dots an inch.
    assert (width, height) == (1560, 494)
    assert data[-8:] == b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    assert [path.name for path in tmp_path.iterdir()] == ["progress.png"]


def test_a_run_without_steps_is_drawn_too(tmp_path: Path) -> None:
    draw([], tmp_path / "progress.png", "nothing")
    assert (tmp_path / "progress.png").stat().st_size > 1000


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingExtraError, match=r'the picture needs the extra "plots" \(matplotlib is not installed\)'):
        draw([], tmp_path / "progress.png", "")
