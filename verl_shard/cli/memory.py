"""verl-shard memory"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_shard.common.outputs import check_outputs

if TYPE_CHECKING:
    from verl_shard.diagnosis.memory_timeline import PhaseMemory
    from verl_shard.runtime.oom_report import OutOfMemoryReport


def memory(
    run: Annotated[Path, typer.Argument(help="A run's folder, also while it runs.")],
    picture: Annotated[
        Path | None, typer.Option(help="Also draw it over time, into this PNG, the plan as a line.")
    ] = None,
    last: Annotated[int, typer.Option(help="The picture shows so many last steps.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot", help="Ask the run for torch's snapshot of its next step's phases, in RUN/snapshots."
        ),
    ] = False,
) -> None:
    """What each phase of a run took of the GPUs, beside what its plan expected; and each time that memory ran out."""
    from dataclasses import asdict

    from verl_shard.common.errors import Faults, config_error
    from verl_shard.common.tables import out, table
    from verl_shard.common.units import format_bytes
    from verl_shard.diagnosis.memory_timeline import by_phase, draw, expected_peaks, last_steps, read_moments

    faults, moments = Faults(), []
    with faults.gathering():
        check_outputs(picture=picture)
    with faults.gathering():
        moments = read_moments(run)
    faults.check()
    expected = expected_peaks(run)
    rows = by_phase(moments, expected)
    if snapshot:
        from verl_shard.runtime.snapshots import ask_for_snapshot

        if not rows:
            why = "the run has used no GPU, and torch records GPUs' memory"
            raise config_error("no-snapshot", "--snapshot", None, why, "Leave it out")
        out.print(f"Asked for: the phases of the next step, in {ask_for_snapshot(run)}", soft_wrap=True)
    if as_json:
        phases = [{**asdict(row), "off": row.off} for row in rows]
        print(json.dumps({"schema": "verl_shard/memory/1", "run": str(run), "phases": phases}, indent=1))
    else:
        if rows:
            columns = ("phase", "GPU", "times", "peak", "reserved", "plan", "off")
            out.print(table(str(run), columns, map(_cells, rows)))
        for number, report in enumerate(_reports(run), 1):
            out.print(f"Out of memory, {number}: {report}", markup=False, soft_wrap=True)
        host = max(moment.host for moment in moments)
        out.print(f"Host: a process held at most {format_bytes(host)}." + ("" if rows else " No GPU was used."))
        if rows and not expected:
            out.print(
                "The run's plan.yaml says where models are, not what they take, as a Plan does (verl-shard run PLAN)."
            )
    if picture is not None:
        draw(last_steps(moments, last), expected, picture, f"{run}: memory by phase")
        if not as_json:
            out.print(f"Picture: {picture}", markup=False, soft_wrap=True)


def _reports(run: Path) -> list[OutOfMemoryReport]:
    """What the run said each time when memory ran out."""
    from verl_shard.common.files import read_json_lines

    lines = [line for line in read_json_lines(run / "events.jsonl") if line["kind"] == "out-of-memory"]
    if not lines:
        return []
    from verl_shard.runtime.oom_report import OutOfMemoryReport

    return [OutOfMemoryReport.from_dict(line) for line in lines]


def _cells(row: PhaseMemory) -> tuple[object, ...]:
    from verl_shard.common.units import format_bytes

    planned = "-" if row.planned is None else format_bytes(row.planned)
    off = "-" if row.off is None else f"{row.off:+.1%}"
    return (row.phase, row.gpu, row.times, format_bytes(row.peak), format_bytes(row.reserved), planned, off)


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("memory")(memory)
