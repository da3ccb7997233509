"""The file that accelerate launch reads, as accelerate reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from verl_shard import ConfigError
from verl_shard.cli.main import run
from verl_shard.training.accelerate_config import accelerate_config


@pytest.mark.parametrize(
    ("gpus", "each", "processes", "kind"), [(8, 2, 4, "MULTI_GPU"), (4, 4, 1, "NO"), (3, 1, 3, "MULTI_GPU")]
)
def test_accelerate_reads_what_was_meant(gpus: int, each: int, processes: int, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(accelerate_config(gpus, each))
    config = load_config_from_file(str(file))
    assert (config.num_processes, config.distributed_type.value, config.mixed_precision) == (processes, kind, "bf16")
    # Each process sees all GPUs, and takes its own.
    assert config.gpu_ids == ",".join(map(str, range(gpus)))
    assert config.use_cpu is False


def test_what_cannot_be_shared_out_is_said_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"8 GPUs % 3 = 2, not 0\. Use one of 1, 2, 4, 8\."):
        accelerate_config(8, 3)
    with pytest.raises(ConfigError) as caught:
        accelerate_config(0, -1, "fp16")
    assert [finding.where for finding in caught.value.findings] == ["--gpus", "--gpus-per-process", "--mixed-precision"]


def test_the_command_prints_the_file_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["accelerate-config", "--gpus", "8", "--gpus-per-process", "2"]) == 0
    assert capsys.readouterr().out == accelerate_config(8, 2)
    assert run(["accelerate-config", "--gpus", "8", "--gpus-per-process", "5"]) == 2
