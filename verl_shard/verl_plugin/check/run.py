"""Everything together: what was given, composed, and every rule asked about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.common.errors import Finding, config_error
from verl_shard.config.inventory import Inventory
from verl_shard.verl_plugin.check import articles, attention, batches, ignored, keys, models, rewards, world
from verl_shard.verl_plugin.check.given import Given
from verl_shard.verl_plugin.check.script import read_script
from verl_shard.verl_plugin.check.tree import Composed, compose
from verl_shard.verl_plugin.check.world import Machines

SCHEMA = "verl_shard/check/1"
_ORDER = {"error": 0, "warning": 1, "notice": 2}


@dataclass(frozen=True)
class Report:
    """findings: the gravest first. verdict: what the planner says of memory. left_out: what was not looked at, in words."""

    findings: tuple[Finding, ...]
    verdict: str
    left_out: tuple[str, ...]
    n_settings: int

    @property
    def exit_code(self) -> int:
        """0 for nothing, 1 where there are warnings, 2 with a fault."""
        levels = {finding.level for finding in self.findings}
        return 2 if "error" in levels else 1 if "warning" in levels else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, opening with the schema."""
        return {
            "schema": SCHEMA,
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "left_out": list(self.left_out),
        }


def check(
    overrides: Sequence[str] = (),
    *,
    script: Path | None = None,
    config: Path | None = None,
    inventory: Inventory | None = None,
    machines: Machines | None = None,
    plan: bool = True,
    ask_verl: bool = True,
) -> Report:
    """All that is wrong with what somebody would give verl, without starting anything.

    overrides: as on verl's command line; with a script, what its "$@" stands for. inventory: the GPUs it is for, and
    machines: those by node, with CPUs and RAM. plan: ask the planner whether it fits. ask_verl: where our rules find
    no fault, let verl check it too; that imports it, which takes seconds.
    Raises ConfigError for files that cannot be read, and MissingExtraError without verl.
    """
    given = gather(overrides, script, config)
    made = compose(given)
    machines = machines or Machines()
    card = inventory.gpus[0].card if inventory is not None else None
    elsewhere = inventory is not None or bool(machines.gpus)
    local = any("verl_shard" in line for _, line in given.text)
    found = [*given.findings, *made.findings]
    found += articles.of_environment(given.environment)
    found += articles.of_text(given.text, local=local)
    found += keys.find(made)
    found += list(_rules(made, machines, card, elsewhere)) if given.settings else []
    faulty = any(finding.level == "error" for finding in found)
    verdict, left_out = "", list(given.left_out)
    if faulty or not given.settings:
        if plan and given.settings:
            left_out.append("whether it fits: that is planned when the faults above are mended")
    else:
        if plan:
            from verl_shard.verl_plugin.check.fits import fit

            outcome = fit(made, inventory)
            found += outcome.findings
            verdict = outcome.verdict
            left_out += [outcome.left_out] if outcome.left_out else []
        if ask_verl:
            from verl_shard.verl_plugin.check import by_verl

            found += by_verl.find(made)
    if given.settings and (unknown := attention.not_looked_at(made, card, elsewhere=elsewhere)):
        left_out.append(unknown)
    unique = dict.fromkeys(found)
    ordered = sorted(unique, key=lambda finding: _ORDER[finding.level])
    return Report(tuple(ordered), verdict, tuple(dict.fromkeys(left_out)), len(given.settings))


def gather(overrides: Sequence[str], script: Path | None, config: Path | None) -> Given:
    """Everything in the order in which it wins: the file, the script, the command line."""
    given = Given()
    if config is not None:
        given.add_tree(read_yaml(config), f"in {config.name}")
    if script is not None:
        of_script = read_script(script, overrides)
        given = Given(
            settings=[*given.settings, *of_script.settings],
            environment=of_script.environment,
            text=of_script.text,
            config_name=of_script.config_name,
            findings=of_script.findings,
            left_out=of_script.left_out,
        )
    else:
        for text in overrides:
            given.add(text, "")
    return given


def read_yaml(path: Path) -> Mapping[str, Any]:
    """A configuration file. Raises ConfigError when it is none."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = f"it cannot be read ({' '.join(str(error).split())})"
        raise config_error("no-config", "--config", path, why, "Give a YAML file") from error
    if not isinstance(content, Mapping):
        raise config_error("no-config", "--config", path, "there are no keys in it", "Give a YAML file of key: value")
    return content


def _rules(made: Composed, machines: Machines, card: Any, elsewhere: bool) -> Iterator[Finding]:
    yield from batches.find(made)
    yield from world.find(made, machines)
    yield from ignored.find(made)
    yield from rewards.find(made)
    yield from models.find(made)
    yield from attention.find(made, card, elsewhere=elsewhere)
    if made.strategy == "device_map":
        from verl_shard.verl_plugin.trainer_config import find_faults

        yield from find_faults(made.config)
