"""verl's configuration in this process: composed and checked as its own main program does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.verl_plugin import search_path


def compose_config(overrides: Sequence[str]) -> Any:
    """The resolved configuration that `python -m verl.trainer.main_ppo` would run with these overrides.

    Raises ConfigError for what Hydra cannot compose and for what verl or this plugin refuses.
    """
    import hydra
    import verl
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from verl_shard.verl_plugin.trainer_config import find_faults

    search_path.register()
    where = "overrides"
    try:
        with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
            config = hydra.compose("ppo_trainer", overrides=list(overrides))
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        fix = "Write a key of verl's configuration and a value for it, key=value"
        raise config_error("not-composed", where, None, str(error), fix) from error
    if faults := list(find_faults(config)):
        raise ConfigError(faults)
    try:
        validate_config(
            config, use_reference_policy=need_reference_policy(config), use_critic=bool(need_critic(config))
        )
    except ConfigError:
        raise
    except (ValueError, AssertionError, TypeError, HydraException, OmegaConfBaseException) as error:
        why = f"verl refuses it: {error}"
        raise config_error("refused-by-verl", where, None, why, "Change what it names") from error
    return config
