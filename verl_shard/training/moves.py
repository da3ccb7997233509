"""What can be moved while a training runs: one table by runner, component and strategy. update_resource acts and refuses by
it, and the docs print it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_shard.config.resource_rules import STRATEGIES
from verl_shard.config.roles import ROLES, Role

How = Literal["live", "relaunch", "no"]


@dataclass(frozen=True)
class Move:
    """live: between two steps, in place. relaunch: the launch ends after its next checkpoint, and another goes on from there.
    no: why, and what to do instead.

    instead: the strategy that stands in for the one that was named, and why.
    """

    how: How
    why: str = ""
    fix: str = ""
    instead: str = ""

    @property
    def words(self) -> str:
        """For a table."""
        if self.how == "no":
            return f"no: {self.why}. {self.fix}"
        said = "live, between two steps" if self.how == "live" else "after the next checkpoint, by another launch"
        return f"{said}, as {self.instead} ({self.why})" if self.instead else said


_LIVE, _RELAUNCH = Move("live"), Move("relaunch")
_SHARDED = "the local runner lays a model over its GPUs by layers and shards no tensor"
_SERVED = "the local runner serves no models"
_FOLLOWS = "the hf rollout generates on the actor's weights"
_ENGINE = "the rollout's engine has its GPUs from pools that verl's separate_async makes when it starts"
_NEW_START = "Stop, write the pools with pool_overrides(config), and start again with trainer.resume_mode=auto"
_WITH_ACTOR = Move("no", _FOLLOWS, "Move the actor")
_NO_SHARDS = Move(
    "no", "PPOTrainer's models on Ray are on the device_map engine, and verl shards over pools it makes at its start",
    "Use device_map; or, of a run on stock verl, " + _NEW_START[0].lower() + _NEW_START[1:],
)  # fmt: skip
_NO_SERVER = Move(
    "no", "PPOTrainer's reward models are in a process of each node that serves nobody else",
    "Use none, device_map or data_parallel; a served reward (reward.reward_model.enable) gains and loses replicas with "
    "add_replica and remove_replica",
)  # fmt: skip
_NO_ROLLOUT = Move("no", _ENGINE, _NEW_START)


def _local(role: Role, strategy: str) -> Move:
    if role == "rollout":
        return _WITH_ACTOR
    if strategy in ("fsdp", "fsdp2"):
        return Move("live", _SHARDED, instead="device_map")
    if strategy in ("vllm", "sglang"):
        return Move("live", _SERVED, instead="device_map")
    return _LIVE


def _verl(role: Role, strategy: str) -> Move:
    if role == "rollout":
        return _WITH_ACTOR if strategy == "hf" else _NO_ROLLOUT
    if strategy in ("fsdp", "fsdp2"):
        return _NO_SHARDS
    if strategy in ("vllm", "sglang"):
        return _NO_SERVER
    return _RELAUNCH


MOVES: dict[tuple[str, Role, str], Move] = {
    (runner, role, strategy): of(role, strategy)
    for runner, of in (("local", _local), ("verl", _verl))
    for role in ROLES
    for strategy in STRATEGIES[role]
}
"""By runner, component and strategy. `"cpu"` in the place of GPUs is a reward model's, of strategy none."""

_BEGIN, _END = "<!-- moves: begin -->\n", "<!-- moves: end -->"


def as_markdown() -> str:
    """The table of the docs."""
    lines = ['| component | strategy | `runner="local"` | `runner="verl"` |', "|---|---|---|---|"]
    for role in ROLES:
        for strategy in STRATEGIES[role]:
            cells = (MOVES[runner, role, strategy].words for runner in ("local", "verl"))
            lines.append(f"| {role} | `{strategy}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_table(docs: Path) -> None:
    """Puts the table between the marks of a page."""
    text = docs.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    docs.write_text(f"{before}{_BEGIN}{as_markdown()}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(sys.argv[1]))
