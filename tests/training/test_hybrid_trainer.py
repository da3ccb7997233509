"""HybridTrainer: PPOTrainer from a resource config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import PROMPTS, count_w4
from verl_shard import ConfigError, PPOTrainer
from verl_shard.config.resource_config import load_resource_config
from verl_shard.training.hybrid_trainer import HybridTrainer

SMALL: dict[str, Any] = {
    "train_data": PROMPTS, "progress": False, "generation_config": {"max_new_tokens": 4},
    "ppo_config": {"steps": 1, "batch_size": 4},
}  # fmt: skip
ARTICLE = """
actor:   {device_type: cuda, device_ids: [0, 1], strategy: fsdp}
reward:  {device_type: cuda, device_ids: [2], strategy: none}
rollout: {device_type: cuda, device_ids: [3], strategy: vllm,
          vllm_args: {tensor_parallel_size: 1, gpu_memory_utilization: 0.85, enforce_eager: false}}
comm_backend: nccl
timeout_seconds: 180
"""


@pytest.mark.usefixtures("_no_group")
def test_a_config_of_its_own_and_a_table_at_the_start(
    make_model: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    judge = make_model("judge", task="SequenceClassification", num_labels=1, seed=2)
    (tmp_path / "resource_config.yaml").write_text(
        "actor: {precision: fp32}\nreward: {device_type: cpu, device_ids: [], strategy: none, precision: fp32}\n"
    )
    config = load_resource_config(tmp_path / "resource_config.yaml")
    made = HybridTrainer(
        actor_model=make_model(), reward_model=judge, config=config, output_dir=tmp_path / "run", **SMALL
    )
    assert len(made.train()) == 1
    said = capfd.readouterr().err
    assert "Who owns which GPU" in said
    assert "CPU │ actor, rollout, critic, ref, reward" in said
    with pytest.raises(TypeError, match="takes config"):
        HybridTrainer("x", count_w4, config={}, model_config={})


def test_all_faults_of_both_at_once(make_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "resource_config.yaml").write_text(
        "actor: {device_ids: [0, 1], stratgey: fsdp}\nreward: {strategy: x}\n"
    )
    given: dict[str, Any] = {**SMALL, "ppo_config": {"steps": 0}, "train_data": [{"text": "x"}], "runner": "rya"}
    path = tmp_path / "resource_config.yaml"
    with pytest.raises(ConfigError) as hybrid:
        HybridTrainer(make_model(), count_w4, config=path, **given)
    with pytest.raises(ConfigError) as plain:
        PPOTrainer(make_model(), reward_model=count_w4, model_config=path, **given)
    for said in (str(hybrid.value), str(plain.value)):
        assert "resource_config.yaml line 1: actor.stratgey" in said
        assert 'Did you mean "strategy"?' in said
        assert "resource_config.yaml line 2: reward.strategy" in said
        assert "ppo_config['steps'] = 0" in said
        assert "runner = rya" in said
        assert "train_data[0]: its prompt is neither" in said


@pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")
def test_the_articles_file_names_gpus(make_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "resource_config.yaml").write_text(ARTICLE)
    judge = make_model("judge", task="SequenceClassification", num_labels=1)
    with pytest.raises(ConfigError, match=r"model_config\['actor'\] = GPU 0-1: torch sees no GPU on this machine"):
        HybridTrainer(make_model(), judge, config=str(tmp_path / "resource_config.yaml"), **SMALL)
