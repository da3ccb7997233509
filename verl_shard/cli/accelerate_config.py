"""verl-shard accelerate-config"""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """A configuration file for accelerate launch with several GPUs to a process, on stdout.

verl-shard accelerate-config --gpus 8 --gpus-per-process 2 > accelerate.yaml

Each process then trains its own copy of the models, laid over its own GPUs, and gradients are averaged over processes.
"""


def accelerate_config(
    gpus: Annotated[int, typer.Option(help="GPUs of this machine to use.")],
    gpus_per_process: Annotated[int, typer.Option(help="GPUs that one copy of the models is laid over.")] = 1,
    mixed_precision: Annotated[
        str, typer.Option(help="bf16: float32 weights under bfloat16 autocast; no: all in float32.")
    ] = "bf16",
) -> None:
    """Prints the file."""
    from verl_shard.training.accelerate_config import accelerate_config as text

    typer.echo(text(gpus, gpus_per_process, mixed_precision), nl=False)


def add_to(app: typer.Typer) -> None:
    """Registers the verb."""
    app.command("accelerate-config", help=HELP)(accelerate_config)
