"""Where the roles go: on GPUs by the peak of what each does there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_shard.planning.plan_file import read_role
from verl_shard.quickstart.prepare import Device, lay_out


def _settings(model: Path, **changed: Any) -> Any:
    fields = {
        "algorithm": "ppo",
        "model": model,
        "micro_batch_size": 4,
        "max_prompt_length": 16,
        "max_response_length": 8,
        "gradient_checkpointing": False,
        "attn_implementation": "sdpa",
        **changed,
    }
    return SimpleNamespace(**fields)


@pytest.fixture
def model(tmp_path: Path, small_config: Any) -> Path:
    small_config("llama", vocab_size=4096).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_on_gpus_roles_that_train_are_even_in_their_peak(model: Path, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(path=tmp_path)
    maps = lay_out(run, _settings(model), Device((0, 1)))
    assert {role: made.purpose for role, made in maps.items()} == {
        "actor": "training",
        "critic": "training",
        "ref": "inference",
    }
    assert maps["actor"].counts == "peak of training (4 x 24 tokens, bf16-mixed, adamw)"
    # The actor's second GPU pays for the logits, which a critic does not have.
    assert maps["actor"].stages[1].n_blocks < maps["critic"].stages[1].n_blocks
    for role, made in maps.items():
        assert read_role(tmp_path / "plan.yaml", role)["device_map"] == dict(made)


def test_on_the_cpu_nothing_is_traced(model: Path, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(path=tmp_path)
    maps = lay_out(run, _settings(model, algorithm="grpo"), Device(()))
    assert {role: dict(made) for role, made in maps.items()} == {"actor": {"": "cpu"}, "ref": {"": "cpu"}}
    assert maps["actor"].dtype == "float32"
