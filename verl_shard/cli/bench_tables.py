"""verl-shard bench: the three tables that people came for, and one page of all results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path | None, typer.Option(help="Where to write the result as JSON.")]
Picture = Annotated[Path | None, typer.Option(help="Where to draw it, as a PNG.")]
Model = Annotated[
    str | None, typer.Option(help="Whose shape the models have: a language model of the zoo, llama-1b or tiny.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A smaller batch, and fewer steps.")]
Memory = Annotated[
    str | None, typer.Option(help="How much of each GPU torch may take, such as 80GiB: as if it were a smaller card.")
]


def ladder(
    out: Out = None, picture: Picture = None, model: Model = None, quick: Quick = False, gpu_memory: Memory = None
) -> None:
    """One PPO update, remedy by remedy: plain fp32, autocast, flash attention, checkpointing, and on; memory and speed."""
    from verl_shard.bench.frame import Asked
    from verl_shard.bench.ladder import bench_ladder

    bench_ladder(Asked(out, picture, model, quick, gpu_memory))


def offload_advice(
    out: Out = None, picture: Picture = None, model: Model = None, quick: Quick = False, gpu_memory: Memory = None
) -> None:
    """Offloading in every way: GPU and host memory, seconds, what the planner predicted, and whether its advice was right."""
    from verl_shard.bench.frame import Asked
    from verl_shard.bench.offload_advice import bench_offload_advice

    bench_offload_advice(Asked(out, picture, model, quick, gpu_memory))


def elastic(
    out: Out = None, picture: Picture = None, model: Model = None, quick: Quick = False, gpu_memory: Memory = None
) -> None:
    """All components on the same GPUs, separated by hand, and where our placement puts them: throughput and memory."""
    from verl_shard.bench.elastic import bench_elastic
    from verl_shard.bench.frame import Asked

    bench_elastic(Asked(out, picture, model, quick, gpu_memory))


def report(
    folder: Annotated[Path, typer.Argument(help="A folder of results that --out wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; by default report.html in the folder.")] = None,
) -> None:
    """One HTML page of all results in a folder, with plots in it: it needs no network and no other file."""
    from verl_shard.bench.report import bench_report

    made = bench_report(folder, out)
    typer.echo(f"{made.path}: {made.words}")


def add_to(bench: typer.Typer) -> None:
    """Adds them to the verb `bench`."""
    bench.command("ladder")(ladder)
    bench.command("offload-advice")(offload_advice)
    bench.command("elastic")(elastic)
    bench.command("report")(report)
