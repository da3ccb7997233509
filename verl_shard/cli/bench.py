"""verl-shard bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def start(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps to time.", min=3)] = 12,
    algorithm: Annotated[str, typer.Option(help="ppo or grpo.")] = "ppo",
) -> None:
    """How long verl takes from launch to its first training step, and for a step of the quick start."""
    from verl_shard.bench.start import bench_start

    bench_start(out=out, steps=steps, algorithm=algorithm)


def add_to(app: typer.Typer) -> None:
    """Adds the verb and its measurements."""
    bench = typer.Typer(no_args_is_help=True, help="Measure, on this machine.")
    bench.command("start")(start)
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")
