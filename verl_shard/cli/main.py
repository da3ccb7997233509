"""The command line: one verb a file.

An error is one message on stderr. Exit code 0 is well, 1 a failed run, 2 a fault in what was given.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from verl_shard._version import __version__
from verl_shard.cli import (
    accelerate_config,
    bench,
    check,
    device_map,
    doctor,
    estimate,
    explain,
    gpus,
    memory,
    plan,
    quickstart,
)
from verl_shard.cli import (
    run as run_verb,
)
from verl_shard.common.errors import ConfigError, ShardError
from verl_shard.common.notices import ShardNotice
from verl_shard.common.tables import err

app = typer.Typer(
    name="verl-shard",
    help="Which model goes on which GPU, does it fit, and verl's own trainer run over the answer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
quickstart.add_to(app)
device_map.add_to(app)
estimate.add_to(app)
plan.add_to(app)
run_verb.add_to(app)
check.add_to(app)
doctor.add_to(app)
gpus.add_to(app)
memory.add_to(app)
explain.add_to(app)
accelerate_config.add_to(app)
bench.add_to(app)

INTERRUPTED = 130
"""The exit code after Ctrl-C, as a shell reports it; typer returns it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """What comes before a verb."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    try:
        with _notices_in_a_line():
            result = app(list(argv), prog_name="verl-shard", standalone_mode=False)
    except ShardError as error:
        show(error)
        return error.exit_code
    except typer.TyperException as error:
        # What was typed wrong; typer shows it with the command's usage.
        error.show() if hasattr(error, "show") else err.print(f"error: {error}")
        return error.exit_code
    except typer.Abort:
        result = INTERRUPTED
    if result == INTERRUPTED:
        err.print("Stopped.")
    return result if isinstance(result, int) else 0


@contextmanager
def _notices_in_a_line() -> Iterator[None]:
    """Notices without the file and line of the code that said them; other warnings as ever."""
    before = warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, ShardNotice):
            err.print(f"[bold yellow]notice:[/] {_escape(str(message))}", soft_wrap=True)
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show_warning
    try:
        yield
    finally:
        warnings.showwarning = before


def show(error: ShardError) -> None:
    """One message: each finding of a ConfigError on a line of its own."""
    if isinstance(error, ConfigError):
        for finding in error.findings:
            err.print(f"[bold red]error:[/] {_escape(str(finding))}", soft_wrap=True)
    else:
        err.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
