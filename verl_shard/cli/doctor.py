"""verl-shard doctor"""

from __future__ import annotations

from typing import Annotated

import typer

HELP = """Is this machine ready: versions, GPUs, driver, flash attention, memory and its limits, NCCL, Ray, disks.

Nothing is changed. What takes a while (torch, each GPU, flash-attn, Ray) is asked in processes of its own, side by side.

Exit code 0 when all is well, 1 with warnings, 2 with faults.
"""


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the facts and the source of each rule.")
    ] = False,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds that each look may take.")] = 60.0,
) -> int:
    """Examines this machine."""
    from json import dumps

    from verl_shard.common.tables import out
    from verl_shard.diagnosis.doctor import Report, examine
    from verl_shard.diagnosis.doctor_gather import gather

    diagnosis = examine(gather(time_limit))
    if json:
        typer.echo(dumps(diagnosis.to_dict(), indent=2))
    else:
        out.print(Report(diagnosis))
    return diagnosis.exit_code


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("doctor", help=HELP)(doctor)
