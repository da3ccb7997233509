"""What the catalogue is held against: quotes of public reports, user reports, and logs of failures provoked here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUOTES: list[dict[str, Any]] = tomllib.loads((HERE / "quotes.toml").read_text(encoding="utf-8"))["quote"]
REPORTS: list[dict[str, Any]] = tomllib.loads((HERE / "reports.toml").read_text(encoding="utf-8"))["report"]
THREADS: list[dict[str, Any]] = tomllib.loads((HERE / "threads.toml").read_text(encoding="utf-8"))["thread"]
PROVOKED: dict[str, str] = tomllib.loads((HERE / "provoked.toml").read_text(encoding="utf-8"))
ALSO_SEEN = {"critic-is-no-value-model": "critic_is_no_value_model"}
"""Faults that are only ever said after a weightier one, and the log in which both are."""
LOGS = HERE / "logs"


def log(name: str) -> list[str]:
    """The lines of a log that was provoked here."""
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()
