"""Keywords that PPOTrainer does not have."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from verl_shard import ConfigError, HybridTrainer, PPOTrainer

MORE: dict[str, Any] = {"lr": 3, "train_dat": "x", "cliprange": 0.2, "dtype": "bf16", "zzz": None}


def test_each_is_said_with_where_it_belongs() -> None:
    with pytest.raises(ConfigError) as caught:
        PPOTrainer("no model", **MORE)
    assert {finding.code for finding in caught.value.findings} == {"unknown-keyword"}
    said = [str(finding) for finding in caught.value.findings]
    assert said[:4] == [
        'lr = 3: there is no such setting. It is a key of ppo_config: write ppo_config={"lr": 3}.',
        "train_dat = 'x': there is no such setting. Did you mean train_data?",
        "cliprange = 0.2: there is no such setting. Write clip_ratio.",
        "dtype = 'bf16': there is no such setting. It is a key of model_config: "
        'write model_config={"actor": {"dtype": \'bf16\'}}.',
    ]
    assert said[4].startswith("zzz = None: there is no such setting. Use some of actor_model, critic_model, ")
    with pytest.raises(ConfigError, match="It is a key of ppo_config and of generation_config and of model_config"):
        HybridTrainer("no model", config={}, batch_size=3)


def test_the_signature_is_what_it_was() -> None:
    parameters = inspect.signature(PPOTrainer).parameters.values()
    assert [p.name for p in parameters][:4] == ["actor_model", "critic_model", "reward_model", "ref_model"]
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    with pytest.raises(TypeError, match="actor_model"):
        PPOTrainer()  # type: ignore[call-arg]
