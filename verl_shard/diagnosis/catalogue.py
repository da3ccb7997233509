"""The catalogue of faults, read from the TOML files in faults/: one entry a fault.

An entry is data, so that a fault can be added without code; docs/explain.md says how.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

FOLDER = Path(__file__).parent / "faults"

Rank = Literal["cause", "likely", "symptom", "consequence", "warning", "notice"]
"""What a fault is to a run that failed, the weightiest first.

cause: it ends a run. likely: it ends a run unless somebody caught it. symptom: something else may have led to it, such as
a timeout. consequence: something else did. warning: no run ends by it, and it is wrong. notice: worth knowing, and no fault.
"""
RANKS: tuple[Rank, ...] = get_args(Rank)
_CHECK = re.compile(r"(?P<first>\w+) (?P<operation>[/-]) (?P<second>\w+) >= (?P<least>[\d.]+)")


@dataclass(frozen=True)
class Advice:
    """One remedy.

    do: what to do. write: the line to write, in the spelling of verl 0.9.1 where it is a key of verl's.
    planner: the name of the planner's remedy that this is, which says what it saves and costs.
    """

    do: str
    write: str = ""
    planner: str = ""


@dataclass(frozen=True)
class Case:
    """What a fault means in some phases or roles, or where some text stands in its lines; empty fields fit all."""

    phases: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    text: str = ""
    title: str = ""
    cause: str = ""
    remedies: tuple[Advice, ...] = ()

    def fits(self, phase: str, role: str, said: str) -> bool:
        """Whether this is the case at hand."""
        return (
            (not self.phases or phase in self.phases)
            and (not self.roles or role in self.roles)
            and (not self.text or re.search(self.text, said) is not None)
        )


@dataclass(frozen=True)
class Fault:
    """An entry of the catalogue.

    id: a stable short name. title: what happened, in a few words. rank: see Rank.
    hints: one of these texts is in every line that a pattern matches; a line without any is not looked at further.
    patterns: regular expressions, any of which says that the fault is there; their named groups may be used in `title`,
    `cause` and remedies as {name}. details: more of them, looked for in the lines that the same process says next.
    cause: why it happens. remedies: what to do, in order. cases: what is more particular; the first that fits counts.
    check: a condition on numbers that the patterns name, as "ref / old >= 5"; a match without them needs none.
    frames: an expression for a frame of the traceback above a match, as "/torch/x.py:12 in name"; without it none is needed.
    sources: threads, documents or files of a library. reports: references of user reports that this answers.
    """

    id: str
    title: str
    rank: Rank
    hints: tuple[str, ...]
    patterns: tuple[str, ...]
    cause: str
    remedies: tuple[Advice, ...]
    sources: tuple[str, ...]
    details: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    check: str = ""
    frames: str = ""
    reports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        missing = [
            name for name in ("title", "hints", "patterns", "cause", "remedies", "sources") if not getattr(self, name)
        ]
        if missing:
            raise ValueError(f"fault {self.id}: {', '.join(missing)} is empty")
        if self.rank not in RANKS:
            raise ValueError(f"fault {self.id}: its rank {self.rank!r} is none of {', '.join(RANKS)}")
        if self.check and not _CHECK.fullmatch(self.check):
            raise ValueError(f"fault {self.id}: its check {self.check!r} is not of the form: name / name >= number")

    @cached_property
    def searches(self) -> Sequence[re.Pattern[str]]:
        """The patterns, compiled when they are first needed."""
        return [re.compile(pattern) for pattern in self.patterns]

    @cached_property
    def detail_searches(self) -> Sequence[re.Pattern[str]]:
        """The details, compiled."""
        return [re.compile(pattern) for pattern in self.details]

    def match(self, text: str) -> re.Match[str] | None:
        """The first pattern's match in a line's text."""
        if not any(hint in text for hint in self.hints):
            return None
        match = next((match for search in self.searches if (match := search.search(text))), None)
        return match if match is not None and self._holds(match.groupdict()) else None

    def _holds(self, groups: Mapping[str, str | None]) -> bool:
        if not self.check:
            return True
        condition = _CHECK.fullmatch(self.check)
        assert condition is not None
        first, second = groups.get(condition["first"]), groups.get(condition["second"])
        if first is None or second is None:
            return True
        a, b = float(first), float(second)
        value = a - b if condition["operation"] == "-" else a / b if b else math.inf
        return value >= float(condition["least"])


def read_fault(entry: Mapping[str, Any]) -> Fault:
    """An entry as it stands in TOML. Raises ValueError that names the entry and what is wrong with it."""
    fields = dict(entry)
    name = fields.get("id", "?")
    try:
        cases = tuple(_read_case(case) for case in fields.pop("cases", ()))
        remedies = _read_remedies(fields.pop("remedies", ()))
        texts: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        return Fault(**texts, cases=cases, remedies=remedies)
    except TypeError as error:
        raise ValueError(f"fault {name}: {error}") from error


def _read_case(entry: Mapping[str, Any]) -> Case:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    fields["remedies"] = _read_remedies(entry.get("remedies", ()))
    return Case(**fields)


def _read_remedies(entries: Sequence[str | Mapping[str, str]]) -> tuple[Advice, ...]:
    return tuple(Advice(do=entry) if isinstance(entry, str) else Advice(**entry) for entry in entries)


@cache
def catalogue() -> tuple[Fault, ...]:
    """All entries, in the order of the files' names and of the entries in them."""
    faults = []
    for file in sorted(FOLDER.glob("*.toml")):
        faults += [read_fault(entry) for entry in tomllib.loads(file.read_text(encoding="utf-8"))["fault"]]
    names = [fault.id for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"faults twice in the catalogue: {', '.join(sorted(twice))}")
    return tuple(faults)
