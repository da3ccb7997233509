"""The 60 recorded sets: each that verl refused or took wrongly is said to be, by key, and no other has a fault."""

from __future__ import annotations

from functools import cache
from typing import Any

import omegaconf.base
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from override_sets import SETS

from verl_shard.verl_plugin.check import by_verl
from verl_shard.verl_plugin.check.run import check, gather
from verl_shard.verl_plugin.check.tree import compose

BEYOND = {"train_batch*n not divisible by GPUs": {"actor_rollout_ref.actor.ppo_mini_batch_size"}}
"""Where a set has a fault more than the one that it was written for: 33 % 32 is 1."""
ELSEWHERE = ("LoRA r=16", "model path missing", "+unknown model key")
"""Refused for a model or an engine, which are not looked at when verl is asked."""


def test_all_of_them_are_here() -> None:
    assert len(SETS) == 60
    assert sum(row["status"] == "ACCEPTED" for row in SETS) == 19
    assert sum(row["kind"] == "good" for row in SETS) == 8
    assert all(row["keys"] for row in SETS if row["kind"] != "good")


@pytest.mark.parametrize("row", SETS, ids=[row["case"] for row in SETS])
def test_a_set(row: dict[str, Any]) -> None:
    found = check(row["overrides"], plan=False, ask_verl=False).findings
    faults = {finding.where for finding in found if finding.level == "error"}
    if row["kind"] == "good":
        assert not faults
        return
    assert {finding.where for finding in found} & set(row["keys"])
    assert faults <= set(row["keys"]) | BEYOND.get(row["case"].split(": ")[-1], set()), "a fault where there is none"
    assert all(finding.why and finding.fix for finding in found)
    missing_here = any(part in row["case"] for part in ELSEWHERE[:2])
    if row["kind"] == "rejected" and not missing_here:
        assert faults & set(row["keys"]), "verl refuses it, which is more than a warning"


def test_the_sets_are_those_that_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own check and dataclasses say of each what they said then, so that the test above is of the right ones."""
    monkeypatch.setattr(omegaconf.base, "parse", cache(omegaconf.base.parse))  # the same interpolations each time
    for row in SETS:
        if row["status"] not in ("REJECTED@validate", "REJECTED@dataclass") or any(
            part in row["case"] for part in ELSEWHERE
        ):
            continue
        found = list(by_verl.find(compose(gather(row["overrides"], None, None))))
        said = row["message"].split("\n")[0].split(": ", 1)[1][:60]
        assert any(said in finding.why for finding in found), row["case"]


@pytest.mark.parametrize("row", [row for row in SETS if row["kind"] == "good"], ids=lambda row: row["case"])
def test_verl_itself_takes_the_good_ones(row: dict[str, Any]) -> None:
    assert list(by_verl.find(compose(gather(row["overrides"], None, None)))) == []


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        (row["overrides"][-1], row["keys"][0]) for row in SETS if row["status"] == "REJECTED@compose"
    ] + [("+trainer.val_before_train=True", "trainer.val_before_train")],
)  # fmt: skip
def test_what_hydra_refuses_is_found_without_it(extra: str, key: str) -> None:
    made = compose(gather([], None, None))
    with pytest.raises(ConfigCompositionException):
        ConfigLoaderImpl._apply_overrides_to_config([OverridesParser.create().parse_override(extra)], made.config)
    assert key in {f.where for f in check([extra], plan=False, ask_verl=False).findings if f.level == "error"}
