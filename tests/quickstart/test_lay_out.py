"""Where the roles go: on GPUs by the peak of what each does there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_shard.mapping.build import build_device_map
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
    actors = lay_out(run, _settings(model), Device((0, 1)))
    several = "several micro-batches a step, 2 micro-batches in flight"
    assert actors.counts == f"peak of training (4 x 24 tokens, bf16-mixed, adamw, {several})"
    plan = {role: read_role(tmp_path / "plan.yaml", role) for role in ("actor", "critic", "ref")}
    assert {role: entry["precision"] for role, entry in plan.items()} == {
        "actor": "bf16-mixed", "critic": "bf16-mixed", "ref": "bf16",
    }  # fmt: skip
    assert plan["actor"]["device_map"] == dict(actors)
    assert plan["ref"]["device_map"] == dict(build_device_map(str(model), 2))

    def on_second(role: str) -> list[str]:
        return [name for name, device in plan[role]["device_map"].items() if device == 1 and "layers" in name]

    # The actor's second GPU pays for the logits, which a critic does not have.
    assert len(on_second("actor")) < len(on_second("critic"))


def test_on_the_cpu_nothing_is_traced(model: Path, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(path=tmp_path)
    actors = lay_out(run, _settings(model, algorithm="grpo"), Device(()))
    for role in ("actor", "ref"):
        entry = read_role(tmp_path / "plan.yaml", role)
        assert (entry["device_map"], entry["precision"]) == ({"": "cpu"}, "fp32")
    assert (dict(actors), actors.dtype) == ({"": "cpu"}, "float32")
