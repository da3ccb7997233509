"""verl-shard bench"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def start(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps to time; by default a whole quick start's.", min=3)
    ] = None,
    algorithm: Annotated[str, typer.Option(help="ppo or grpo.")] = "ppo",
) -> None:
    """How long verl takes from launch to its first training step, and for a step of the quick start."""
    from verl_shard.bench.start import bench_start

    given = {"algorithm": algorithm} | ({} if steps is None else {"steps": steps})
    bench_start(given, out)


def maps(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    other_transformers: Annotated[
        str | None, typer.Option(help='A second transformers whose "auto" to ask, such as 5.24.0; it is downloaded.')
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Six models only, and fewer turns.")] = False,
) -> None:
    """How even device maps are and how long they take, ours beside accelerate's and transformers' own."""
    from verl_shard.bench.maps import bench_maps

    bench_maps(quick=quick, other_transformers=other_transformers, result=out)


def memory(
    out: Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Other shapes are drawn for another seed.")] = 0,
    rows: Annotated[int, typer.Option(help="How many passes to run.", min=1)] = 40,
) -> None:
    """How right memory estimates are: real passes on this machine's first GPU, with shapes drawn from the seed."""
    from verl_shard.bench.memory import bench_memory

    bench_memory(seed=seed, n=rows, result=out)


def add_to(app: typer.Typer) -> None:
    """Adds the verb and its measurements."""
    bench = typer.Typer(no_args_is_help=True, help="Measure, on this machine.")
    bench.command("start")(start)
    bench.command("maps")(maps)
    bench.command("memory")(memory)
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench")
