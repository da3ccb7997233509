"""Findings, and the exceptions that carry them.

The tree::

    ShardError
    ├── ConfigError (also a ValueError)   what was given cannot work; holds every finding
    ├── DoesNotFitError                   the memory there is does not hold what was asked for
    ├── MissingExtraError (an ImportError too)  an optional dependency is not installed
    └── RunError                          a run started and failed

The command line turns each into one message on stderr: exit code 2 for all but RunError, which is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "notice"]


@dataclass(frozen=True)
class Finding:
    """One thing somebody should know about what they gave us.

    level: "error" stops, "warning" may go wrong, "notice" tells of a fallback that was taken.
    code: a stable short name, e.g. "flash-attention-unavailable".
    where: the key, argument or file that it is about.
    given: the value that was given there, as text.
    why: what is wrong, with the arithmetic.
    fix: what to write or do instead.
    """

    level: Level
    code: str
    where: str
    given: str
    why: str
    fix: str

    def __str__(self) -> str:
        given = f" = {self.given}" if self.given else ""
        said = f"{self.where}{given}: {self.why}. {self.fix}".rstrip(". ")
        return said if said.endswith("?") else said + "."


class ShardError(Exception):
    """The root of every error this package raises on purpose."""

    exit_code = 2


class ConfigError(ShardError, ValueError):
    """What was given cannot work. `findings` holds all faults, not just the first."""

    def __init__(self, findings: Finding | Iterable[Finding]) -> None:
        self.findings: Sequence[Finding] = (findings,) if isinstance(findings, Finding) else tuple(findings)
        super().__init__("\n".join(str(finding) for finding in self.findings))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[Sequence[Finding]]]:
        return type(self), (self.findings,)


class DoesNotFitError(ShardError):
    """The memory there is does not hold what was asked for."""


class MissingExtraError(ShardError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, needed_for: str, extra: str, package: str = "") -> None:
        self.needed_for, self.extra, self.package = needed_for, extra, package
        missing = f" ({package} is not installed)" if package else ""
        super().__init__(f'{needed_for} needs the extra "{extra}"{missing}: pip install "verl_shard[{extra}]"')

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), (self.needed_for, self.extra, self.package)


class RunError(ShardError):
    """A run started and failed."""

    exit_code = 1


class Faults:
    """Gathers the findings of several steps, so that all faults are said at once.

    `with faults.gathering():` around each step; `faults.check()` raises one ConfigError with all findings, if any.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """A ConfigError in here is kept and not raised; what the step would have made is then not there."""
        try:
            yield
        except ConfigError as error:
            self.findings.extend(error.findings)

    def check(self) -> None:
        """Raises ConfigError with all that was gathered."""
        if self.findings:
            raise ConfigError(self.findings)


def config_error(code: str, where: str, given: object, why: str, fix: str) -> ConfigError:
    """A ConfigError with one finding of level "error". The arguments are the Finding's; given: None is nothing."""
    return ConfigError(Finding("error", code, where, "" if given is None else str(given), why, fix))
