"""Recorded override sets of verl, and what is asked about the findings of a check."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding
from verl_shard.verl_plugin.check.run import Report

SETS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "verl_override_sets.json").read_text())
"""60 override sets with what verl 0.9.1 made of each, recorded from it; `keys` are those at fault."""
GOOD: dict[str, list[str]] = {
    row["case"].split(": ")[1].split(" (")[0]: row["overrides"] for row in SETS if row["kind"] == "good"
}


def without(given: Iterable[str], *keys: str) -> list[str]:
    return [text for text in given if text.lstrip("+").split("=")[0] not in keys]


def rows(report: Report) -> list[tuple[str, str]]:
    return [(finding.level, finding.where) for finding in report.findings]


def about(report: Report, where: str) -> Finding:
    (found,) = [finding for finding in report.findings if finding.where == where]
    return found
