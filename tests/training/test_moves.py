"""The table of what can be moved: whole, printed in the docs as it is, and what the code acts by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.config.resource_rules import STRATEGIES
from verl_shard.config.roles import ROLES, Role
from verl_shard.training.inputs import RUNNERS
from verl_shard.training.moves import MOVES, as_markdown
from verl_shard.training.moving import read_change
from verl_shard.training.placement import Places, RolePlace

DOCS = Path(__file__).parents[2] / "docs" / "moving_resources.md"


def test_the_docs_have_the_table_as_it_is() -> None:
    found = re.search(r"<!-- moves: begin -->\n(.*)<!-- moves: end -->", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert found[1] == as_markdown(), "run python -m verl_shard.training.moves docs/moving_resources.md"


def test_what_moves_how() -> None:
    """By hand, and not from the table: what the local runner and verl can do."""
    assert set(MOVES) == {
        (runner, role, strategy) for runner in RUNNERS for role in ROLES for strategy in STRATEGIES[role]
    }
    moved = {key for key, move in MOVES.items() if move.how != "no"}
    engine = {(role, how) for role in ("actor", "critic", "ref") for how in ("none", "device_map")}
    reward = {("reward", how) for how in ("none", "device_map", "data_parallel")} | {("ref", "data_parallel")}
    theirs = {(role, how) for role in ("actor", "critic", "ref") for how in ("fsdp", "fsdp2")}
    theirs |= {("reward", "vllm"), ("reward", "sglang")}
    assert {key[1:] for key in moved if key[0] == "verl"} == engine | reward
    assert {key[1:] for key in moved if key[0] == "local"} == engine | reward | theirs
    assert {MOVES[key].how for key in moved if key[0] == "local"} == {"live"}
    assert {MOVES[key].how for key in moved if key[0] == "verl"} == {"relaunch"}
    assert {key[1:] for key in moved if MOVES[key].instead} == theirs
    for key, move in MOVES.items():
        assert (move.how == "no") == bool(move.fix), key


@pytest.mark.parametrize(("runner", "role", "strategy"), sorted(MOVES))
def test_the_code_does_as_the_table_says(runner: str, role: Role, strategy: str) -> None:
    roles = {name: RolePlace((0,), None, None, "fp32", "sdpa") for name in ("actor", "critic", "ref", "reward")}
    places, move = Places(False, (0, 1, 2), roles, roles), MOVES[runner, role, strategy]
    ids = [1] if strategy == "none" else [1, 2]

    def change() -> str:
        return read_change(role, ids, strategy, runner=runner, places=places, lora=False).strategy

    if move.how == "no":
        with pytest.raises(ConfigError, match=re.escape(move.why)):
            change()
    elif move.instead:
        with pytest.warns(ShardNotice, match=re.escape(move.why)):
            assert change() == "device_map"
    else:
        assert change() == strategy
