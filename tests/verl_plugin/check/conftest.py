from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from override_sets import GOOD, without

from verl_shard.verl_plugin.check.run import check
from verl_shard.verl_plugin.check.world import Machines

Looked = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    """looked("a=1", of="GRPO plain"): (level, key, line to write) of what is found in a good set with these changes.

    flash-attn is said to be installed, so that its lack on this machine is not in every answer.
    """
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: object() if name == "flash_attn" else original(name, *more)
    )

    def look(
        *changes: str, of: str = "GRPO plain", drop: Sequence[str] = (), machines: Machines | None = None, **more: Any
    ) -> list[tuple[str, str, str]]:
        named = [text.lstrip("+~").split("=")[0] for text in changes]
        given = [*without(GOOD[of], *named, *drop), *changes]
        report = check(given, machines=machines, plan=False, ask_verl=False, **more)
        return [(finding.level, finding.where, finding.fix) for finding in report.findings]

    return look
