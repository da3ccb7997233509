"""The table of keys: it is what verl knows, every key is documented, and every key has an effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from verl.trainer.ppo import core_algos

from verl_shard.common.errors import ConfigError
from verl_shard.config.data_files import DataFiles
from verl_shard.training.article_keys import (
    ESTIMATORS,
    KEYS,
    KL_PENALTIES,
    NOT_ESTIMATED,
    POLICY_LOSSES,
    REFUSED,
    SAME,
    as_markdown,
    read_section,
)
from verl_shard.training.settings import Settings

DOCS = Path(__file__).parents[2] / "docs" / "local_ppo.md"


def test_the_docs_have_the_table_as_it_is() -> None:
    text = DOCS.read_text(encoding="utf-8")
    found = re.search(r"<!-- keys: begin -->\n(.*)<!-- keys: end -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == as_markdown(), "run python -m verl_shard.training.article_keys docs/local_ppo.md"


def test_estimators_penalties_and_losses_are_verls() -> None:
    assert {*ESTIMATORS, *NOT_ESTIMATED} == {estimator.value for estimator in core_algos.AdvantageEstimator}
    assert set(POLICY_LOSSES) == set(core_algos.POLICY_LOSS_REGISTRY) - {"bypass_mode"}
    import torch

    for name in KL_PENALTIES:
        assert core_algos.kl_penalty(torch.zeros(2), torch.ones(2), name).shape == (2,)


def test_generation_keys_are_transformers_own() -> None:
    generation, verls = GenerationConfig(), ("batch_size", "enforce_eager")
    names = [key.name for key in KEYS if key.section == "generation_config" and key.name not in verls]
    names += [name for section, name in REFUSED if section == "generation_config"]
    assert [name for name in names if not hasattr(generation, name)] == []


OTHER: dict[str, Any] = {
    "max_new_tokens": 7, "temperature": 0.5, "top_p": 0.5, "top_k": 9, "batch_size": 3, "num_return_sequences": 6,
    "enforce_eager": True,
    "kl_coef": 0.7, "max_epochs": 3, "adv_estimator": "rloo", "kl_in": "loss", "kl_penalty": "abs", "steps": 9,
    "mini_batch_size": 2, "micro_batch_size": 2, "n": 2, "lr": 0.5, "critic_lr": 0.25, "gamma": 0.5, "lam": 0.5,
    "clip_ratio": 0.4, "entropy_coeff": 0.3, "policy_loss": "gspo", "lora_rank": 8, "test_freq": 4, "save_freq": 5, "seed": 11,
    "ppo_epochs": 3, "learning_rate": 0.5, "lora_alpha": 3,
}  # fmt: skip


def overrides(generation: Any, ppo: Any) -> list[str]:
    settings = Settings.read(
        generation, ppo, use_gradient_checkpointing=False, gradient_checkpointing_kwargs=None, processes=1
    )
    return settings.overrides(
        models=dict.fromkeys(("actor", "critic", "ref"), "m"), files=DataFiles(Path("t"), Path("v")), longest_prompt=8,
        reward=None, plan=Path("p"), checkpoints=Path("c"), attention={"actor": "sdpa", "critic": "sdpa", "ref": "sdpa"},
        cpu=True, resume_from=None, loggers=(), names=("p", "e"), tokenizer=None, extra=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("section", "name"),
    [(key.section, key.name) for key in KEYS if key.section in ("generation_config", "ppo_config")
     if key.name not in ("do_sample", "max_prompt_length")],
)  # fmt: skip
def test_every_key_changes_verls_configuration(section: str, name: str) -> None:
    with_rank = {"lora_rank": 4} if name == "lora_alpha" else {}
    plain = overrides({}, {"batch_size": 8, **with_rank})
    value = 16 if (section, name) == ("ppo_config", "batch_size") else OTHER[name]
    given = {"batch_size": 8, **with_rank} if section == "ppo_config" else {}
    found = overrides(given | {name: value} if section == "generation_config" else {},
                      given | {name: value} if section == "ppo_config" else {"batch_size": 8})  # fmt: skip
    changed = set(found) - set(plain)
    assert changed
    shown = {line.split("=", 1)[1] for line in changed}
    assert (str(value).lower() if isinstance(value, bool) else str(value)) in shown or name in (
        "kl_in",
        "adv_estimator",
    )


def test_a_key_by_its_other_name_is_the_same_key() -> None:
    for other, first in SAME.items():
        section = next(key.section for key in KEYS if key.name == other)
        value = "float32" if first == "dtype" else OTHER[first]
        assert read_section(section, {other: value}) == {first: value}


@pytest.mark.parametrize(("section", "name"), list(REFUSED))
def test_what_is_refused_says_what_to_do(section: str, name: str) -> None:
    with pytest.raises(ConfigError, match="PPOTrainer does not take it"):
        read_section(section, {name: 1})
