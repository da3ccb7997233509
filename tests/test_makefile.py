"""`make gpu-tests` runs all tests that are skipped without GPUs, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = re.compile(r"needs (a GPU|two GPUs)$")


def reasons(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.keyword) and part.arg == "reason" and isinstance(part.value, ast.Constant):
                yield str(part.value.value)


def skipped_without_gpus(path: Path) -> list[str]:
    """Whole files by their path, single tests as pytest names them."""
    name, found = path.relative_to(ROOT).as_posix(), []
    for node in ast.parse(path.read_text()).body:
        marks = isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
        )
        if marks and any(map(SKIPPED.match, reasons([node.value]))):  # type: ignore[attr-defined]
            return [name]
        if isinstance(node, ast.FunctionDef) and any(map(SKIPPED.match, reasons(node.decorator_list))):
            found.append(f"{name}::{node.name}")
    return found


def test_all_that_need_gpus_are_listed_and_no_others() -> None:
    listed = set(re.findall(r"tests/\S+::\w+", (ROOT / "Makefile").read_text()))
    whole = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*on_gpus.py")}
    skipped = {name for path in ROOT.glob("tests/**/test_*.py") for name in skipped_without_gpus(path)}
    assert {name for name in skipped if name.partition("::")[0] not in whole} == listed
    assert {name.partition("::")[0] for name in skipped} >= whole
