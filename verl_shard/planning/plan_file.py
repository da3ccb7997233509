"""plan.yaml: which role has which device_map and precision, as the engine reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_shard.common.errors import config_error
from verl_shard.common.files import write_whole

SCHEMA = "verl_shard/plan/1"


def write_plan(path: Path, roles: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes `roles`: for each role a mapping with device_map, precision, and loads (bytes by device)."""
    write_whole(
        path, yaml.safe_dump({"schema": SCHEMA, "roles": {k: dict(v) for k, v in roles.items()}}, sort_keys=False)
    )


def read_role(path: str | Path, role: str) -> dict[str, Any]:
    """The entry of one role in a plan.yaml. Raises ConfigError when file, schema or role are not there."""
    where = f"plan {path}"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise config_error("bad-plan", where, None, f"it cannot be read ({error})", "Name a plan.yaml") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        given = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise config_error("bad-plan", where, given, f"its schema is not {SCHEMA}", "Name a plan.yaml of this version")
    roles = content.get("roles") or {}
    if role not in roles:
        raise config_error(
            "role-not-planned", where, role, f"it plans {', '.join(roles) or 'no role'}", f"Add an entry for {role}"
        )
    return dict(roles[role])


def planned_peak(path: str | Path, phase: str) -> int | None:
    """Bytes that a plan expects a phase to take of its fullest GPU; None where it says only where models are."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    rows = content.get("phases") or () if isinstance(content, dict) else ()
    peaks = [peak for row in rows if row.get("phase") == phase for peak in row.get("peaks", {}).values()]
    return max(peaks, default=None)
