"""plan.yaml: what is written is read back, and every fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from verl_shard.common.errors import ConfigError
from verl_shard.planning.plan_file import read_role, write_plan


def test_a_role_is_read_back(tmp_path: Path) -> None:
    actor = {"device_map": {"model.embed_tokens": 0, "lm_head": 1, "model.norm": "cpu"}, "precision": "bf16-mixed"}
    write_plan(tmp_path / "plan.yaml", {"actor": actor, "ref": {"device_map": {"": 0}}})
    assert read_role(tmp_path / "plan.yaml", "actor") == actor
    assert read_role(str(tmp_path / "plan.yaml"), "ref") == {"device_map": {"": 0}}
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["schema"] == "verl_shard/plan/1"


def test_order_is_kept(tmp_path: Path) -> None:
    names = [f"model.layers.{index}" for index in (2, 10, 1)]
    write_plan(tmp_path / "plan.yaml", {"actor": {"device_map": dict.fromkeys(names, 0)}})
    assert list(read_role(tmp_path / "plan.yaml", "actor")["device_map"]) == names


def test_a_role_that_is_not_planned_is_named_with_those_that_are(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.yaml", {"actor": {}, "ref": {}})
    with pytest.raises(ConfigError, match=r"= critic: it plans actor, ref\. Add an entry for critic"):
        read_role(tmp_path / "plan.yaml", "critic")
    write_plan(tmp_path / "plan.yaml", {})
    with pytest.raises(ConfigError, match="it plans no role"):
        read_role(tmp_path / "plan.yaml", "critic")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "it cannot be read"),
        ("{a: [", "it cannot be read"),
        ("", "= NoneType: its schema is not verl_shard/plan/1"),
        ("- a", "= list: its schema is not"),
        ("schema: verl_shard/plan/2", "= verl_shard/plan/2: its schema is not"),
        ("schema: verl_shard/plan/1\nroles:", "it plans no role"),
    ],
)
def test_what_is_no_plan_is_refused(text: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_role(file, "actor")
