"""The run folder: new, resumed, another's; and which steps count after kills."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.common.errors import ConfigError
from verl_shard.config.run_folder import WHOLE, Launch, RunFolder, can_start, whole_checkpoints

IDENTITY = {"model": None, "algorithm": "ppo", "seed": 0, "task": ["a", "b"]}


def _log(launch: Launch, steps: Sequence[int], mark: str = "", torn: bool = False) -> None:
    lines = [json.dumps({"step": step, "data": {"from": f"{launch.number}{mark}"}}) + "\n" for step in steps]
    text = "".join(lines)
    launch.metrics_file.write_text(text[:-5] if torn else text)


def _save(run: RunFolder, step: int, whole: bool = True) -> Path:
    folder = run.path / "checkpoints" / f"global_step_{step}"
    folder.mkdir()
    if whole:
        (folder / WHOLE).touch()
    return folder


def _counted(run: RunFolder) -> list[tuple[int, str]]:
    return [(record["step"], record["data"]["from"]) for record in run.metrics()]


def test_a_new_run_has_its_folders_and_says_what_it_is(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "runs" / "one", IDENTITY, {"steps": 10, "out": Path("x")})
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "launches", "run.json"]
    info = json.loads((run.path / "run.json").read_text())
    assert info["schema"] == "verl_shard/run/1"
    assert info["identity"] == IDENTITY
    assert info["settings"] == {"steps": 10, "out": "x"}
    assert info["ready"] is False
    run.update(ready=True)
    assert run.info == {**info, "ready": True}


def test_the_same_run_is_resumed(tmp_path: Path) -> None:
    RunFolder.start(tmp_path / "one", IDENTITY, {})
    assert RunFolder.resume(tmp_path / "one", IDENTITY).path == tmp_path / "one"


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    RunFolder.start(tmp_path / "one", IDENTITY, {})
    with pytest.raises(ConfigError) as caught:
        RunFolder.resume(tmp_path / "one", {**IDENTITY, "seed": 1, "algorithm": "grpo"})
    assert [(finding.where, finding.given) for finding in caught.value.findings] == [
        ("--algorithm", "grpo"),
        ("--seed", "1"),
    ]
    assert f"the run in {tmp_path}/one has ppo" in str(caught.value)


def test_what_is_not_said_on_a_resume_is_not_compared(tmp_path: Path) -> None:
    RunFolder.start(tmp_path / "one", IDENTITY, {})
    RunFolder.resume(tmp_path / "one", {})
    RunFolder.resume(tmp_path / "one", {"seed": 0})
    with pytest.raises(ConfigError, match=r"^--seed = 4: the run in"):
        RunFolder.resume(tmp_path / "one", {"seed": 4})


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run.json in it. Leave out --resume"):
        RunFolder.resume(tmp_path, IDENTITY)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "verl_shard/run/2"}', '"verl_shard/run/1"'])
def test_a_run_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: (not JSON|its schema is not)"):
        RunFolder.resume(tmp_path, IDENTITY)


def test_a_run_starts_in_an_empty_folder_only(tmp_path: Path) -> None:
    can_start(tmp_path)
    can_start(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="it is not empty and no run's folder"):
        RunFolder.start(tmp_path, IDENTITY, {})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_folder_of_another_run_is_kept(tmp_path: Path) -> None:
    RunFolder.start(tmp_path / "one", IDENTITY, {})
    before = (tmp_path / "one" / "run.json").read_text()
    with pytest.raises(ConfigError, match=r"it is the folder of another run. Add --resume"):
        RunFolder.start(tmp_path / "one", {"seed": 3}, {})
    assert (tmp_path / "one" / "run.json").read_text() == before


def test_an_unwritable_place_is_refused_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="is a file, not a folder"):
            RunFolder.start(place, IDENTITY, {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written by this user"):
        RunFolder.start(tmp_path / "run", IDENTITY, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_has_become_unwritable_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder.start(tmp_path / "one", IDENTITY, {})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written by this user"):
        RunFolder.resume(tmp_path / "one", IDENTITY)


def test_only_whole_checkpoints_count_and_by_number(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "one", IDENTITY, {})
    folders = {step: _save(run, step) for step in (10, 9, 100)}
    _save(run, 200, whole=False)
    (run.path / "checkpoints" / "global_step_x").mkdir()
    (run.path / "checkpoints" / "global_step_x" / WHOLE).touch()
    found = whole_checkpoints(run.path / "checkpoints")
    assert list(found.items()) == [(9, folders[9]), (10, folders[10]), (100, folders[100])]
    assert whole_checkpoints(tmp_path / "absent") == {}


def test_a_launch_begins_after_the_last_whole_checkpoint(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "one", IDENTITY, {})
    first = run.new_launch()
    assert (first.number, first.after_step, first.checkpoint) == (1, 0, None)
    _save(run, 5)
    folder = _save(run, 10)
    _save(run, 15, whole=False)
    second = run.new_launch()
    assert (second.number, second.after_step, second.checkpoint) == (2, 10, str(folder))
    assert run.launches() == [first, second]
    assert first.after_step == 0


def test_what_was_logged_beyond_the_checkpoint_is_undone(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "one", IDENTITY, {})
    # The validation before the first step, then seven steps; the checkpoint is of the fifth.
    _log(run.new_launch(), [0, 1, 2, 3, 4, 5, 6, 7])
    _save(run, 5)
    assert _counted(run) == [(step, "1") for step in range(8)]
    second = run.new_launch()
    assert _counted(run) == [(step, "1") for step in range(6)]
    # verl may log the step it resumes after once more.
    _log(second, [5, 6, 7, 8])
    assert _counted(run) == [(step, "1") for step in range(6)] + [(step, "2") for step in (6, 7, 8)]


def test_a_launch_that_was_killed_before_any_checkpoint_is_undone_wholly(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "one", IDENTITY, {})
    _log(run.new_launch(), [0, 1, 2])
    second = run.new_launch()
    _log(second, [0, 1])
    # The validation before the first step is the same in both, and is kept.
    assert _counted(run) == [(0, "1"), (1, "2")]


def test_half_a_last_line_is_no_step(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "one", IDENTITY, {})
    launch = run.new_launch()
    _log(launch, [1, 2, 3], torn=True)
    assert [record["step"] for record in launch.records()] == [1, 2]
    assert [step for step, _ in _counted(run)] == [1, 2]


def test_metrics_are_written_anew_and_added_to(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "one", IDENTITY, {})
    run.metrics_file.write_text("from a launch that was killed in the middle of a li")
    _log(run.new_launch(), [1, 2, 3])
    _save(run, 2)
    run.new_launch()
    run.write_metrics()
    run.append_metrics({"step": 3, "data": {"from": "2"}})
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [(line["step"], line["data"]["from"]) for line in lines] == [(1, "1"), (2, "1"), (3, "2")]


@given(
    kills=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=5),
    last=st.integers(1, 12),
    data=st.data(),
)
def test_whatever_was_killed_each_step_counts_once(
    kills: list[tuple[int, int]], last: int, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against a model: the steps that are left are those of the launches that the last one builds on."""
    run = RunFolder.start(tmp_path_factory.mktemp("runs") / "run", IDENTITY, {})
    saved, history = 0, [0]
    owner: dict[int, str] = {}
    for ran, freq in [*kills, (last, 1)]:
        launch = run.new_launch()
        assert launch.after_step == saved
        begin = [0] if saved == 0 else data.draw(st.sampled_from([[], [saved]]))
        steps = [*begin, *range(saved + 1, saved + ran + 1)]
        _log(launch, steps)
        owner = {step: of for step, of in owner.items() if step <= saved}
        owner |= {step: str(launch.number) for step in steps if step > saved or (step == 0 and 0 not in owner)}
        for step in range(saved + 1, saved + ran + 1):
            if step % freq == 0:
                _save(run, step)
                history.append(step)
        saved = max(history)
    assert _counted(run) == sorted(owner.items())
