"""The bench of offloaded phases: what it measures is what verl's worker and the reward loop do, here on the CPU."""

from __future__ import annotations

import pytest
import torch
import transformers
from shapes import small_qwen2

from verl_shard.bench.offload_phases import (
    Folders,
    PhaseRow,
    bench_offload_phases,
    make_folders,
    phase_rows,
    reference,
    reward,
)
from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.stock_engine import one_process


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    config = small_qwen2(hidden_size=32, intermediate_size=64)
    config.architectures = ["Qwen2ForCausalLM"]
    return make_folders(config, tmp_path_factory.mktemp("folders"))


def test_both_models_are_the_same_weights(made: Folders) -> None:
    policy = transformers.AutoModelForCausalLM.from_pretrained(made.policy)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(made.judge)
    for name, value in judge.model.state_dict().items():
        assert torch.equal(value, policy.model.state_dict()[name]), name
    assert judge.score.weight.shape == (1, 32)
    assert made.block_bytes == 2 * sum(p.numel() for p in policy.model.layers.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_phase_runs_as_many_micro_batches_as_it_says(made: Folders) -> None:
    with one_process("cpu"):
        rows = phase_rows(reference(made, 6, 2, 16), 6, 2, 16, copy_s=100.0, calls=1)
    rows += phase_rows(reward(made, 6, 2, 16), 6, 2, 16, copy_s=0.0, calls=1)
    assert [(row.phase, row.offload) for row in rows] == [
        ("ref_log_prob", "none"), ("ref_log_prob", "stream"), ("reward", "none"), ("reward", "stream"),
    ]  # fmt: skip
    assert {row.limit_s for row in rows[:2]} == {300.0}  # three micro-batches, each a copy of 100 s
    assert {row.limit_s for row in rows[2:]} == {rows[2].seconds}


def test_the_ratio_is_to_the_limit() -> None:
    row = PhaseRow("reward", "stream", 32, 8, 512, seconds=1.05, peak=0, idle=0, limit_s=1.0)
    assert row.ratio == pytest.approx(1.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(ConfigError, match="it measures on a GPU"):
        bench_offload_phases(result=None)
