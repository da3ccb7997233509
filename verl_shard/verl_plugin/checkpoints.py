"""verl's checkpoints, marked when they are whole and thinned out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from verl_shard.common.manifest import write_manifest
from verl_shard.config.run_folder import WHOLE, whole_checkpoints

KEPT = 2


class CheckpointKeeper(CheckpointCallback):
    """Ends each checkpoint with a manifest of its files and the file WHOLE, and keeps the last two.

    What goes on from it checks the manifest first: verl loads checkpoints as pickles. verl writes several files, then a
    tracker file, none of them atomically: a kill in between leaves a checkpoint that looks like one. verl's own
    thinning deletes actor and critic but leaves their folder.
    """

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any) -> None:
        del trainer, global_step
        if async_save:
            return
        folder = Path(checkpoint_dir)
        write_manifest(folder)
        (folder / WHOLE).touch()
        for old in list(whole_checkpoints(folder.parent).values())[:-KEPT]:
            (old / WHOLE).unlink()
            shutil.rmtree(old)
