"""Checkpoints are marked when they are whole, and the last two are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.manifest import check_manifest
from verl_shard.config.run_folder import WHOLE, RunFolder, whole_checkpoints
from verl_shard.verl_plugin.checkpoints import CheckpointKeeper


def _save(folder: Path, step: int) -> Path:
    made = folder / f"global_step_{step}"
    (made / "actor").mkdir(parents=True)
    (made / "actor" / "model.pt").write_text("weights")
    return made


def _keeper() -> CheckpointKeeper:
    return object.__new__(CheckpointKeeper)


def test_a_checkpoint_is_whole_once_verl_has_written_all_of_it(tmp_path: Path) -> None:
    folder = _save(tmp_path, 5)
    assert whole_checkpoints(tmp_path) == {}
    _keeper().on_save(None, 5, str(folder))
    assert whole_checkpoints(tmp_path) == {5: folder}


def test_the_last_two_are_kept_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        _keeper().on_save(None, step, str(_save(tmp_path, step)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_11"]
    assert (tmp_path / "global_step_11" / "actor" / "model.pt").read_text() == "weights"


def test_one_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    _keeper().on_save(None, 2, str(_save(tmp_path, 2)))
    _save(tmp_path, 4)
    _keeper().on_save(None, 6, str(_save(tmp_path, 6)))
    assert list(whole_checkpoints(tmp_path)) == [2, 6]


def test_one_that_is_still_being_written_is_not_marked(tmp_path: Path) -> None:
    folder = _save(tmp_path, 5)
    _keeper().on_save(None, 5, str(folder), async_save=True)
    assert not (folder / WHOLE).exists()


def test_a_run_goes_on_from_files_that_are_as_they_were_saved(tmp_path: Path) -> None:
    run = RunFolder.start(tmp_path / "run", {}, {})
    folder = _save(run.path / "checkpoints", 5)
    _keeper().on_save(None, 5, str(folder))
    check_manifest(folder)
    assert run.new_launch().checkpoint == str(folder)
    (folder / "actor" / "model.pt").write_text("w3ights")
    with pytest.raises(ConfigError, match=r"actor/model\.pt is not as saved"):
        run.new_launch()
    assert [launch.number for launch in run.launches()] == [1]


def test_verl_makes_it_by_its_name() -> None:
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.utils.import_utils import load_class_from_fqn

    assert load_class_from_fqn("verl_shard.verl_plugin.checkpoints.CheckpointKeeper") is CheckpointKeeper
    assert issubclass(CheckpointKeeper, CheckpointCallback)
