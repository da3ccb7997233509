"""verl-shard quickstart"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from verl_shard.cli.options import with_options
from verl_shard.quickstart.options import QuickstartOptions

HELP = """Train a model with verl's own PPO trainer, here and now.

Without options: prompts of reasoning-gym tasks, their verifier as the reward, a small model made for them, GAE with
a critic and a KL reference, on the GPUs there are or on the CPU. What follows "--" goes to verl as overrides.
"""

_THEN = "--"


class _Command(TyperCommand):
    """Keeps apart what stands before "--" and after it, which the parser puts together."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What is no option, then "--", then what goes to verl."""
        at = args.index(_THEN) if _THEN in args else len(args)
        astray = super().parse_args(ctx, args[:at])
        ctx.args = [*astray, _THEN, *args[at + 1 :]]
        return list(ctx.args)


def run(given: dict[str, Any], arguments: list[str]) -> None:
    """Runs the quick start."""
    from verl_shard.quickstart.run import check_given, quickstart

    at = arguments.index(_THEN)
    astray, extra = arguments[:at], arguments[at + 1 :]
    if astray:
        check_given(given, extra, astray)  # raises, with what else is wrong
    quickstart(given, extra)


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    settings = {"allow_extra_args": True}
    command = with_options(QuickstartOptions, run)
    app.command("quickstart", cls=_Command, help=HELP, context_settings=settings)(command)
