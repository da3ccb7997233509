"""verl-shard quickstart"""

from __future__ import annotations

from typing import Any

import typer

from verl_shard.cli.options import with_options
from verl_shard.quickstart.options import QuickstartOptions

HELP = """Train a model with verl's own PPO trainer, here and now.

Without options: prompts of reasoning-gym tasks, their verifier as the reward, a small model made for them, GAE with
a critic and a KL reference, on the GPUs there are or on the CPU. What follows "--" goes to verl as overrides.
"""


def run(given: dict[str, Any], extra: list[str]) -> None:
    """Runs the quick start."""
    from verl_shard.quickstart.run import quickstart

    quickstart(given, extra)


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    settings = {"allow_extra_args": True}
    app.command("quickstart", help=HELP, context_settings=settings)(with_options(QuickstartOptions, run))
