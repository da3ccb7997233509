"""An answer for people, as JSON, and as a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verl_shard.common.errors import Finding, Level
from verl_shard.diagnosis.catalogue import Advice
from verl_shard.diagnosis.explain_answer import Answer, Sighting, Unknown
from verl_shard.diagnosis.explain_place import Frame, Place

SCHEMA = "verl_shard/explain/1"
_LEVELS: Mapping[str, Level] = {"warning": "warning", "notice": "notice"}
_SHOWN_FRAMES = 6
SHOWN_CHARACTERS = 400
"""Characters of a line that are shown."""
_FOLLOWS = {
    "cause": "a cause of its own", "likely": "may be a cause of its own", "symptom": "may follow from it",
    "consequence": "follows from it", "warning": "no run ends by it", "notice": "worth knowing",
}  # fmt: skip


def finding(answer: Answer, where: str) -> Finding | None:
    """What counts, as a finding, or None where nothing was found."""
    if answer.cause is not None:
        cause = answer.cause
        fix = "; ".join(f"{advice.do} ({advice.write})" if advice.write else advice.do for advice in cause.remedies)
        level = _LEVELS.get(cause.fault.rank, "error")
        return Finding(
            level, cause.fault.id, f"{where}:{cause.line.number}", cause.said[0][:SHOWN_CHARACTERS], cause.cause, fix
        )
    if answer.unknown is not None:
        unknown = answer.unknown
        said = f"{unknown.type}: {unknown.message}"[:SHOWN_CHARACTERS]
        return Finding(
            "error", "unknown", f"{where}:{unknown.line.number}", said, "no entry of the catalogue knows it", ""
        )
    return None


def to_dict(answer: Answer, where: str) -> dict[str, Any]:
    """The answer as JSON has it."""
    return {
        "schema": SCHEMA,
        "log": where,
        "lines": answer.lines,
        "verdict": answer.verdict,
        "cause": None if answer.cause is None else _sighting(answer.cause),
        "unknown": None if answer.unknown is None else _unknown(answer.unknown),
        "also": [_sighting(one) for one in answer.also],
    }


def _sighting(seen: Sighting) -> dict[str, Any]:
    return {
        "id": seen.fault.id,
        "rank": seen.fault.rank,
        "title": seen.title,
        "cause": seen.cause,
        "line": seen.line.number,
        "times": seen.count,
        "processes": len(seen.processes),
        "place": _place(seen.place),
        "memory": None if seen.memory is None else {**seen.memory.said, "over": seen.memory.over},
        "values": seen.groups,
        "said": [text[:SHOWN_CHARACTERS] for text in seen.said],
        "frames": [str(frame) for frame in seen.frames[-_SHOWN_FRAMES:]],
        "remedies": [{"do": advice.do, "write": advice.write, "planner": advice.planner} for advice in seen.remedies],
        "sources": list(seen.fault.sources),
        "reports": list(seen.fault.reports),
    }


def _unknown(seen: Unknown) -> dict[str, Any]:
    return {
        "type": seen.type,
        "message": seen.message,
        "line": seen.line.number,
        "times": seen.count,
        "place": _place(seen.place),
        "frames": [str(frame) for frame in seen.frames[-_SHOWN_FRAMES:]],
    }


def _place(place: Place) -> dict[str, Any]:
    return {"role": place.role, "phase": place.phase, "process": place.process, "rank": place.rank}


class Report:
    """The answer for a terminal. everything: also what is only worth knowing, and all frames and sources."""

    def __init__(self, answer: Answer, where: str, *, everything: bool = False) -> None:
        self.answer, self.where, self.everything = answer, where, everything

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        answer = self.answer
        if answer.cause is not None:
            yield from self._cause(answer.cause)
        elif answer.unknown is not None:
            yield from self._unknown(answer.unknown)
        else:
            steps = f", {answer.steps} steps" if answer.steps else ""
            yield Text(f"No fault in {self.where} ({answer.lines} lines{steps}).")
        also = [one for one in answer.also if self.everything or one.fault.rank != "notice"]
        if also:
            yield Text("\nAlso in the log", style="bold")
            for one in also:
                times = f", {one.count} times" if one.count > 1 else ""
                said = f"line {one.line.number}{times}: {one.title} ({one.fault.id}; {self._relation(one)})"
                yield Padding(Text(said), (0, 0, 0, 2))

    def _relation(self, one: Sighting) -> str:
        if self.answer.cause is None and one.fault.rank in ("symptom", "consequence"):
            return "something led to it"
        return _FOLLOWS[one.fault.rank]

    def _cause(self, cause: Sighting) -> RenderResult:
        style = {"warning": "bold yellow", "notice": "bold"}.get(cause.fault.rank, "bold red")
        yield Text(cause.title, style=style)
        rows = [("where", self._where(cause))]
        if cause.memory is not None and str(cause.memory):
            rows.append(("memory", str(cause.memory)))
        rows += [("why", cause.cause + "."), ("it said", _cut(cause.said[0]))]
        if self.everything:
            rows += [("", _cut(text)) for text in cause.said[1:]]
        yield _table(rows)
        yield from _frames(cause.frames, self.everything)
        yield Text("\nWhat to do, in order", style="bold")
        yield _advice(cause.remedies)
        sources = cause.fault.sources if self.everything else cause.fault.sources[:2]
        yield Text(f"\nSee {', '.join(sources)}  [{cause.fault.id}]", style="dim")

    def _unknown(self, unknown: Unknown) -> RenderResult:
        yield Text("An error that is not in the catalogue", style="bold red")
        said = f"{unknown.type}: {unknown.message}" if unknown.message else unknown.type
        where = ", ".join(part for part in (str(unknown.place), f"line {unknown.line.number} of {self.where}") if part)
        yield _table([("where", where), ("it said", _cut(said))])
        yield from _frames(unknown.frames, True)
        yield Text(
            "\nNo known remedy: read the lines around it, the first traceback of a worker first. How to add it: docs/explain.md",
            style="dim",
        )

    def _where(self, cause: Sighting) -> str:
        parts = [str(cause.place), f"line {cause.line.number} of {self.where}"]
        if cause.count > 1:
            named = len(cause.processes - {""})
            by = f" by {named} processes" if named > 1 else ""
            parts.append(f"said {cause.count} times{by}")
        return ", ".join(part for part in parts if part)


def _table(rows: Sequence[tuple[str, str]]) -> Padding:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    return Padding(grid, (0, 0, 0, 2))


def _frames(frames: Sequence[Frame], everything: bool) -> RenderResult:
    """The innermost frames; without `everything` only the last one."""
    shown = frames[-_SHOWN_FRAMES:] if everything else frames[-1:]
    if shown:
        yield _table([("at" if frame is shown[-1] else "", str(frame)) for frame in reversed(shown)])


def _advice(remedies: Sequence[Advice]) -> Padding:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for number, advice in enumerate(remedies, 1):
        text = Text(advice.do)
        if advice.planner:
            saves, price = _planner(advice.planner)
            text.append(f" [{advice.planner}: saves {saves}; costs {price}]", style="dim")
        if advice.write:
            text.append(f"\n{advice.write}", style="green")
        grid.add_row(f"{number}.", text)
    return Padding(grid, (0, 0, 0, 2))


def _planner(name: str) -> tuple[str, str]:
    """What the planner's remedy of that name saves and costs."""
    from verl_shard.planning.remedies import REMEDIES

    return next((remedy.saves, remedy.price) for remedy in REMEDIES if remedy.name == name)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 4] + " ..."
