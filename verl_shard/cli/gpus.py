"""verl-shard gpus"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from verl_shard.cli.options import default

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from verl_shard.resources.usage import GpuUsage

HELP = """What the GPUs of this machine are doing, and who uses them: memory, utilisation, temperature, processes and leases.

Asks NVIDIA's driver and starts nothing on a GPU. Exit code 2 without a driver.
"""


def gpus(
    devices: Annotated[
        str | None,
        typer.Option(help='Those GPUs only, as torch counts them: "0,2" or "0-3".' + default("all of the machine")),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(help="With --watch: seconds from one look to the next.", min=0.1)] = 2.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table; with --watch a line each time.")
    ] = False,
) -> None:
    """Prints the GPUs."""
    from json import dumps
    from time import sleep

    from rich.live import Live

    from verl_shard.common.tables import out
    from verl_shard.resources.usage import get_gpu_usage, to_dict

    found = get_gpu_usage(devices)
    if json:
        while True:
            typer.echo(dumps(to_dict(found), indent=None if watch else 2))
            if not watch:
                return
            sleep(every)
            found = get_gpu_usage(devices)
    if not watch:
        out.print(as_table(found))
        return
    with Live(as_table(found), console=out, auto_refresh=False) as live:
        while True:
            sleep(every)
            live.update(as_table(get_gpu_usage(devices)), refresh=True)


def as_table(found: Sequence[GpuUsage]) -> Table:
    """A row for each GPU; a process is a line of its last column."""
    from verl_shard.common.tables import table
    from verl_shard.common.units import format_bytes

    rows = []
    for gpu in found:
        who = [process.words for process in gpu.processes]
        if gpu.leased_by is not None:
            who.append(f"leased by {gpu.leased_by.words}")
        rows.append(
            (
                f"GPU {gpu.id}" if gpu.id is not None else f"hidden ({gpu.index})",
                gpu.name,
                f"{format_bytes(gpu.used)} of {format_bytes(gpu.total)}",
                format_bytes(gpu.free),
                "?" if gpu.utilization is None else f"{gpu.utilization} %",
                "?" if gpu.temperature is None else f"{gpu.temperature} °C",
                "\n".join(who) or "nobody",
            )
        )
    made = table("GPUs of this machine", ("", "name", "used", "free", "busy", "heat", "who"), rows)
    made.columns[-1].justify = "left"
    return made


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("gpus", help=HELP)(gpus)
