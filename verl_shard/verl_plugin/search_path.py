"""Makes our Hydra config groups findable from verl's main program, so that `model_engine=device_map` composes."""

from __future__ import annotations

import sys

CONFIG = "pkg://verl_shard.verl_plugin.conf"


def register() -> None:
    """Registers a search path plugin with Hydra; in a process without Hydra there is nothing to do."""
    if "hydra" not in sys.modules and not _is_main_program():
        return
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class ShardSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append(provider="verl_shard", path=CONFIG)

    Plugins.instance().register(ShardSearchPath)


def _is_main_program() -> bool:
    # Ray's workers never compose a config; a program that does may import Hydra after verl.
    return "ray._private.workers.default_worker" not in sys.modules and "default_worker" not in sys.argv[0]
