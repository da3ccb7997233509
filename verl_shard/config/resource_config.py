"""resource_config.yaml: read with all its faults and their lines, and who owns which GPU as a table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.tables import table
from verl_shard.config.inventory import Inventory
from verl_shard.config.resource_rules import (
    backend_faults,
    backend_of,
    colocation_faults,
    faults_of,
    gpus_of,
    missing_gpus,
    node_faults,
    role_faults,
)
from verl_shard.config.roles import ROLES, ResourceConfig, Role, RoleConfig
from verl_shard.config.validated import read
from verl_shard.config.yaml_lines import load_marked

SAME = {"device_ids": "devices", "attention": "attn_implementation"}
"""Keys of a component in a file, and the fields of RoleConfig that they are."""
Place = tuple[Any, ...]
LineOf = Callable[[Place], int | None]
T = TypeVar("T")


def load_resource_config(path: str | os.PathLike[str]) -> ResourceConfig:
    """What resource_config.yaml asks for: components with blanks for the planner. docs/resource_config.md has the schema.

    The file is checked by itself; build_plan checks it against GPUs. It is read safely: nothing in it can run code.
    Raises ConfigError with every fault and its line.
    """
    marked = load_marked(os.fspath(path))
    faults = Faults()
    faults.findings += marked.faults
    made = None
    with faults.gathering():
        made = _read(marked.value, marked.line_of)
    name = Path(path).name
    faults.findings = [
        replace(
            finding, where=f"{name} {finding.where}" if finding.where.startswith("line") else f"{name}: {finding.where}"
        )
        for finding in sorted(faults.findings, key=_line)
    ]
    faults.check()
    assert made is not None, "a fault was raised otherwise"
    return made


def as_resource_config(given: ResourceConfig | Mapping[str, Any] | str | os.PathLike[str]) -> ResourceConfig:
    """A ResourceConfig, checked; or one made of a file's path or of a dict as the file would have it.

    Raises ConfigError with every fault.
    """
    if isinstance(given, ResourceConfig):
        if faults := faults_of(given):
            raise ConfigError(faults)
        return given
    if isinstance(given, Mapping):
        return _read(dict(given), lambda place: None)
    return load_resource_config(given)


def _read(content: Any, line_of: LineOf) -> ResourceConfig:
    if not isinstance(content, Mapping):
        given = "" if content is None else type(content).__name__
        fix = "Write components, such as actor: {device_ids: [0, 1], strategy: fsdp}"
        raise config_error("no-components", "file", given, "it has no components in it", fix)
    faults = Faults()
    roles: dict[Role, RoleConfig] = {}
    for role in ROLES:
        if role in content:
            with faults.gathering():
                roles[role] = _component(role, content[role], line_of, faults)
    roles.setdefault("actor", RoleConfig())
    rest = {name: value for name, value in content.items() if name not in ROLES}
    top = _what_can_be_read(ResourceConfig, rest, faults, lambda finding: _marked(finding, content, line_of))
    backend = top.backend if "backend" in rest else backend_of(roles)
    known = {"actor", *(role for role in ROLES if role in content)}
    together = [
        *backend_faults(backend, roles),
        *colocation_faults(top.colocation, roles, known),
        *node_faults(top.nodes, roles),
    ]
    made, own = top, {str(role): component for role, component in roles.items()}
    try:
        made = replace(top, backend=backend, **dict[str, Any](own))
    except ConfigError as error:
        together += error.findings
    faults.findings += [_marked(finding, content, line_of) for finding in together]
    faults.check()
    return made


def _what_can_be_read(cls: type[T], given: Mapping[str, Any], faults: Faults, at: Callable[[Finding], Finding]) -> T:
    """An instance of what is right in `given`, so that one fault does not hide others; the rest is added to `faults`.

    at: puts a finding, whose `where` is a field of `cls`, at its place.
    """
    fields = {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    while True:
        try:
            return read(cls, fields if cls is not ResourceConfig else {"actor": RoleConfig(), **fields})
        except ConfigError as error:
            deeper, before = [finding.where for finding in error.findings], repr(fields)
            for finding in error.findings:
                if not any(other.startswith(f"{finding.where}.") for other in deeper):  # else that says it better
                    faults.findings.append(at(finding))
                name, _, inner = finding.where.partition(".")
                within = fields.get(name)
                if isinstance(within, dict) and inner in within:
                    del within[inner]
                else:
                    fields.pop(name, None)
            if repr(fields) == before:
                raise AssertionError("a fault is about no field") from error


def _component(role: Role, given: Any, line_of: LineOf, faults: Faults) -> RoleConfig:
    """One component; what cannot work of it is added to `faults`. Raises ConfigError when it cannot be read at all."""
    section = {} if given is None else {"model": given} if isinstance(given, str) else given
    if not isinstance(section, Mapping):
        why, fix = "not a component", f"Write {role}: {{device_ids: [0], strategy: ...}}, or the name of a model"
        raise ConfigError(_at(Finding("error", "not-a-component", role, str(given), why, fix), line_of((role,))))
    fields: dict[str, Any] = {}
    for name, value in section.items():
        field = SAME.get(name, name)
        if field in fields:
            finding = Finding(
                "error", "key-twice", f"{role}.{name}", "", f"{field} is given too", "Leave out one of them"
            )
            faults.findings.append(_at(finding, line_of((role, name))))
        fields[field] = value
    written = {field: name for name, field in SAME.items() if name in section}

    def at(finding: Finding) -> Finding:
        return _of_role(role, finding, written, line_of)

    made = _what_can_be_read(RoleConfig, fields, faults, at)
    faults.findings += [at(finding) for finding in role_faults(role, made)]
    return made


def _of_role(role: Role, finding: Finding, written: Mapping[str, str], line_of: LineOf) -> Finding:
    first, *more = finding.where.split(".")
    place = (written.get(first, first), *more)
    for name in ("tensor_parallel_size", "gpu_memory_utilization"):  # where vllm_args has it
        if place == (name,) and line_of((role, "vllm_args", name)) != line_of((role, "vllm_args")):
            place = ("vllm_args", name)
    return _at(replace(finding, where=".".join((role, *place))), line_of((role, *place)))


def _marked(finding: Finding, content: Mapping[str, Any], line_of: LineOf) -> Finding:
    """A finding about several components, at its line and by the keys that were written."""
    first, *more = finding.where.split(".")
    section = content.get(first)
    if isinstance(section, Mapping) and more:
        more[0] = next((name for name, field in SAME.items() if field == more[0] and name in section), more[0])
    place = (first, *more)
    return _at(replace(finding, where=".".join(place)), line_of(place))


def _at(finding: Finding, line: int | None) -> Finding:
    return finding if line is None else replace(finding, where=f"line {line}: {finding.where}")


def _line(finding: Finding) -> int:
    found = re.match(r"line (\d+)", finding.where)
    return int(found[1]) if found else 0


def inventory_of(config: ResourceConfig) -> Inventory | None:
    """The GPUs that the file's `nodes` describe; None when it does not say how many and which."""
    nodes = config.nodes
    if nodes is None or nodes.gpus is None or (nodes.card is None and nodes.memory is None):
        return None
    from verl_shard.common.units import parse_bytes

    host = None if nodes.host_memory is None else parse_bytes(nodes.host_memory, "nodes.host_memory")
    return Inventory.declared(
        nodes.count * nodes.gpus, card=nodes.card, memory=nodes.memory, n_nodes=nodes.count, host_memory=host
    )


def check_inventory(config: ResourceConfig, inventory: Inventory) -> None:
    """Raises ConfigError, with every fault, for GPUs and machines that are not there."""
    faults = list(missing_gpus(config.roles, inventory))
    nodes = config.nodes
    if nodes is not None and nodes.count != len(inventory.nodes):
        why = f"there {'is' if len(inventory.nodes) == 1 else 'are'} {len(inventory.nodes)}"
        faults.append(Finding("error", "no-such-node", "nodes", str(nodes.count), why, "Give the number there is"))
    if faults:
        raise ConfigError(faults)


def ownership(config: ResourceConfig, inventory: Inventory | None = None) -> Table:
    """Who owns which GPU: a row for each GPU, then what is on the CPU and what the planner places.

    inventory: all its GPUs have a row, those that nobody owns too. Raises ConfigError for GPUs that it has not.
    """
    inventory = inventory or inventory_of(config)
    if inventory is not None:
        check_inventory(config, inventory)
    owned = gpus_of(config)
    last = max((gpu for ids in owned.values() for gpu in ids), default=-1) + 1
    rows: list[tuple[str, ...]] = []
    for gpu in range(len(inventory) if inventory is not None else last):
        owners = [_with_strategy(config, role) for role, ids in owned.items() if gpu in ids]
        where = "" if inventory is None else inventory.gpus[gpu].card.name
        node = "" if inventory is None or len(inventory.nodes) == 1 else f"node {inventory.gpus[gpu].node}"
        rows.append((f"GPU {gpu}", ", ".join(owners) or "nobody", " ".join(filter(None, (where, node)))))
    on_cpu = [_with_strategy(config, role) for role, own in config.roles.items() if own.device_type == "cpu"]
    if on_cpu:
        rows.append(("CPU", ", ".join(on_cpu), ""))
    if left := [_with_strategy(config, role) for role in config.roles if role not in owned]:
        rows.append(("the planner's", ", ".join(left), ""))
    made = table("Who owns which GPU", ("", "components", "card"), rows)
    for column in made.columns:
        column.justify = "left"
    return made


def _with_strategy(config: ResourceConfig, role: Role) -> str:
    strategy = config.roles[role].strategy
    return role if strategy in (None, "none") else f"{role} ({strategy})"
