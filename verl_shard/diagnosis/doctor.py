"""The doctor: is this machine ready? Facts of it, checks over them, and an answer for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from verl_shard.common.errors import Finding, Level
from verl_shard.diagnosis import doctor_gpus, doctor_host, doctor_network, doctor_ray, doctor_versions
from verl_shard.diagnosis.doctor_facts import VERDICTS, Check, Facts, Verdict

SCHEMA = "verl_shard/doctor/1"
FAMILIES: Mapping[str, tuple[Callable[[Facts], Iterator[Check]], ...]] = {
    "versions": doctor_versions.CHECKS,
    "GPUs": doctor_gpus.CHECKS,
    "host": doctor_host.CHECKS,
    "network": doctor_network.CHECKS,
    "Ray": doctor_ray.CHECKS,
}
"""Checks by family, in the order of the table. Each looks at facts alone, so it can be asked about any machine."""
_LEVELS: Mapping[Verdict, Level] = {"warning": "warning", "fault": "error"}
_STYLES: Mapping[Verdict, str] = {"ok": "green", "warning": "bold yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Diagnosis:
    """What all checks said of a machine."""

    facts: Facts
    families: Mapping[str, tuple[Check, ...]]

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of all families."""
        return tuple(check for checks in self.families.values() for check in checks)

    @property
    def verdict(self) -> Verdict:
        """The worst of all checks."""
        return VERDICTS[self.exit_code]

    @property
    def exit_code(self) -> int:
        """0 when all is well, 1 with warnings, 2 with faults."""
        return max((VERDICTS.index(check.verdict) for check in self.checks), default=0)

    def findings(self) -> list[Finding]:
        """Warnings and faults as findings."""
        return [
            Finding(_LEVELS[one.verdict], one.code, f"{family}: {one.name}", one.found, one.why, one.fix)
            for family, checks in self.families.items() for one in checks if one.verdict != "ok"
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON has it, with the facts that it rests on."""
        checks = [{"family": family, **asdict(one)} for family, checks in self.families.items() for one in checks]
        counted = Counter(one.verdict for one in self.checks)
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "counts": {verdict: counted[verdict] for verdict in VERDICTS},
            "checks": checks,
            "facts": {
                **asdict(self.facts),
                "packages": {name: one.version for name, one in self.facts.packages.items()},
            },
        }


def examine(facts: Facts) -> Diagnosis:
    """Runs every check on the facts of a machine, here or elsewhere."""
    return Diagnosis(
        facts, {family: tuple(c for check in checks for c in check(facts)) for family, checks in FAMILIES.items()}
    )


class Report:
    """A diagnosis for a terminal: a line a check, and what to do under each that is not well."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        families = self.diagnosis.families
        names = max((len(check.name) for check in self.diagnosis.checks), default=0)
        for family, checks in families.items():
            if not checks:
                continue
            yield Text(family, style="bold")
            grid = Table.grid(padding=(0, 2))
            grid.add_column(width=7)
            grid.add_column(width=min(names, 16), overflow="fold")
            grid.add_column(overflow="fold")
            for check in checks:
                grid.add_row(Text(check.verdict, style=_STYLES[check.verdict]), Text(check.name), _said(check))
            yield grid
            yield Text("")
        yield self._summary()

    def _summary(self) -> Text:
        counted = Counter(check.verdict for check in self.diagnosis.checks)
        parts = [
            (f"{number} {word if number == 1 or word == 'ok' else word + 's'}", _STYLES[word])
            for word in reversed(VERDICTS) if (number := counted[word])
        ]  # fmt: skip
        text = Text()
        for index, part in enumerate(parts):
            text.append(", " if index else "").append(*part)
        return text


def _said(check: Check) -> Text:
    text = Text(check.found)
    if check.verdict != "ok":
        text.append(f"\n{check.why}", style="")
        text.append("\n-> ", style="bold").append(check.fix, style="green")
    return text
