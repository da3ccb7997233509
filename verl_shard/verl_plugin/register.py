"""verl's entry point into this package. verl imports this module (and never calls anything in it), in each of its processes.

verl hides what goes wrong here, so it is caught and printed.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from verl_shard.common.errors import RunError


def _load_replica() -> type:
    from verl_shard.verl_plugin.rollout.replica import HFReplica

    return HFReplica


def _load_engines() -> None:
    from verl_shard.verl_plugin import engine

    del engine


def _prepare_trainer(config: Any) -> None:
    from verl_shard.verl_plugin.reward.settings import prepare_reward_config
    from verl_shard.verl_plugin.trainer_config import prepare_trainer_config

    prepare_trainer_config(config)
    prepare_reward_config(config)


def register() -> bool:
    """Registers platform, rollout, engines and Hydra groups. Returns False, and prints why, when that cannot be done."""
    from verl_shard.verl_plugin import hooks

    hooks.silence_absent_engines()
    try:
        if gone := hooks.missing():
            raise RunError("this verl lacks what the plugin needs: " + "; ".join(gone))
        from verl_shard.verl_plugin import platform_cpu, search_path

        del platform_cpu
        search_path.register()
        hooks.register_rollout("hf", "verl_shard.verl_plugin.rollout.adapter.HFServerAdapter", _load_replica)
        hooks.before_training_workers(_load_engines)
        hooks.before_trainer(_prepare_trainer)
    except Exception as error:
        print(f"verl_shard: the verl plugin is off: {error}", file=sys.stderr, flush=True)
        logging.getLogger(__name__).debug("plugin off", exc_info=True)
        return False
    return True


REGISTERED = register()
