"""HybridTrainer: the PPOTrainer for a resource config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from verl_shard.config.resource_config import as_resource_config
from verl_shard.config.roles import ResourceConfig
from verl_shard.training.ppo_trainer import PPOTrainer


class HybridTrainer(PPOTrainer):
    """PPOTrainer with its components where a resource config says, and a table of who owns which GPU when it starts.

    actor_model, reward_model: as PPOTrainer's. config: resource_config.yaml, its content as a dict, or a ResourceConfig;
        docs/resource_config.md. train_data and other arguments are PPOTrainer's, but for model_config, which this is.

    Raises ConfigError with the faults of the config and of everything else, before anything is loaded.
    """

    def __init__(
        self,
        actor_model: Any,
        reward_model: Any = None,
        *,
        config: ResourceConfig | Mapping[str, Any] | str | os.PathLike[str],
        train_data: Any = None,
        **more: Any,
    ) -> None:
        if "model_config" in more:
            raise TypeError("HybridTrainer takes config, which says what PPOTrainer's model_config says")
        super().__init__(
            actor_model, reward_model=reward_model, model_config=_Given(config), train_data=train_data, **more
        )
        self._shows_owners = True


class _Given:
    """A config that is read where PPOTrainer gathers faults, with those of its other arguments."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def model_config(self) -> dict[str, dict[str, Any]]:
        """By role, what PPOTrainer's model_config takes."""
        return as_resource_config(self._config).model_config
