"""The examples, as they are, on a tiny model and the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.mark.parametrize(("example", "launcher"), [("ppo_local.py", ()), ("ppo_accelerate.py", TORCHRUN)])
def test_it_runs(example: str, launcher: tuple[str, ...], make_model: Callable[..., Path], tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLES / example), str(make_model()), str(tmp_path / "run")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [line for line in ended.stdout.splitlines() if line.startswith("step 3: reward")]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
