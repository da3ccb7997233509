"""verl-shard explain"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

if TYPE_CHECKING:
    from verl_shard.diagnosis.explain_answer import Answer

HELP = """What went wrong in a run, from its log: the first cause, where, how far memory was over, and what to do.

LOG is a file, or the folder of a run (its newest log is read); without it the log is read from standard input:

python -m verl.trainer.main_ppo ... 2>&1 | tee run.log | verl-shard explain

Exit code 0 when nothing is found, 1 when a fault is, known or unknown, 2 when LOG cannot be read.
"""


def explain(
    log: Annotated[Path | None, typer.Argument(help="The log, or a run's folder.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what is only worth knowing, all sources, and of a folder all logs.")
    ] = False,
) -> int:
    """Explains a log."""
    from json import dumps

    from verl_shard.common.tables import out
    from verl_shard.diagnosis.explain_report import Report, to_dict
    from verl_shard.diagnosis.logs import files_of

    if log is None and sys.stdin.isatty():
        from verl_shard.common.errors import config_error

        raise config_error("no-log", "LOG", None, "neither a file nor a piped log", "Write verl-shard explain run.log")
    if log is None or str(log) == "-":
        answers = [("standard input", _explain(sys.stdin.buffer, "standard input"))]
    else:
        answers = []
        for file in files_of(log):
            with file.open("rb") as stream:
                answers.append((str(file), _explain(stream, str(file))))
            if not everything:
                break
    if json:
        shown = [to_dict(answer, where) for where, answer in answers]
        typer.echo(dumps(shown[0] if len(shown) == 1 else shown, indent=2))
    else:
        for number, (where, answer) in enumerate(answers):
            if number:
                out.print()
            out.print(Report(answer, where, everything=everything))
    return max(answer.exit_code for _, answer in answers)


def _explain(stream: BinaryIO, where: str) -> Answer:
    from verl_shard.diagnosis.explain import explain_stream
    from verl_shard.diagnosis.logs import check_is_text

    return explain_stream(stream, check_is_text(stream, where))


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("explain", help=HELP)(explain)
