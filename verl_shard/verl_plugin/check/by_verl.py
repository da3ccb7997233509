"""verl's own check and its dataclasses, as a net under ours: what they refuse and we did not know."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.tree import Composed

_RENAMED = {
    "log_prob_micro_batch_size": "ppo_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}
"""What the worker renames before it reads the ref's section (engine_workers.py)."""


def find(made: Composed) -> Iterator[Finding]:
    """Imports verl, which takes seconds. Models are not looked at: they may be elsewhere."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config: Any = pickle.loads(pickle.dumps(made.config))
    OmegaConf.set_struct(config, False)
    config.critic.model = None
    config.actor_rollout_ref.model.lora_rank = 0  # with adapters it imports vLLM to ask which ranks there are
    config.actor_rollout_ref.model.lora = {}

    def ref() -> None:
        section: Any = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.ref, resolve=True))
        for old, new in _RENAMED.items():
            section[new] = section.pop(old, None)
        omega_conf_to_dataclass(section)

    steps: dict[str, Callable[[], object]] = {
        "validate_config": lambda: validate_config(
            config, use_reference_policy=made.has_kl, use_critic=made.has_critic
        ),
        "actor_rollout_ref.rollout": lambda: omega_conf_to_dataclass(config.actor_rollout_ref.rollout),
        "reward.reward_model": lambda: omega_conf_to_dataclass(config.reward.reward_model),
    }
    if made.has_ref:
        steps["actor_rollout_ref.ref"] = ref
    if not made.on("reward.reward_model.enable"):
        del steps["reward.reward_model"]
    for where, step in steps.items():
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever verl raises, it refuses the configuration
                cause = error.__cause__ or error
                text = " ".join(str(cause).split())
                why = f"verl refuses it ({type(cause).__name__}: {text[:200]})"
                yield Finding("error", "refused-by-verl", where, "", why, "Change what it names")
