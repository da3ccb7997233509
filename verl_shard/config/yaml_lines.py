"""YAML read safely, with the line of every key: what it says, and what is wrong with how it says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_shard.common.errors import Finding, config_error

Place = tuple[Any, ...]
"""Keys and indices from the top."""
_MOST_BYTES = 1 << 20
_MOST_NODES = 20_000
"""More are made of a file by aliases of aliases only."""
_KINDS = (
    "str",
    "int",
    "float",
    "bool",
    "null",
    "timestamp",
    "binary",
    "seq",
    "map",
    "set",
    "omap",
    "pairs",
    "merge",
    "value",
)
_SAFE_TAGS = {f"tag:yaml.org,2002:{name}" for name in _KINDS}


@dataclass
class Marked:
    """value: plain Python. lines: from 1, of each key and item by its path. faults: keys given twice, tags that make objects."""

    value: Any
    lines: dict[Place, int] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)

    def line_of(self, path: Place) -> int | None:
        """The line of the key or item at `path`, or of the nearest that holds it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None


def load_marked(path: str | Path) -> Marked:
    """Reads a YAML file. Raises ConfigError when there is none, and for text that is not YAML, with the line."""
    where = str(path)
    fix = "Name a YAML file"
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise config_error("no-file", where, None, f"it cannot be read ({error.strerror})", fix) from error
    if len(data) > _MOST_BYTES:
        raise config_error("too-large", where, None, f"{len(data)} bytes are more than a configuration has", fix)
    try:
        return read_marked(data.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise config_error("not-text", where, None, f"it is not UTF-8 text ({error.reason})", fix) from error


def read_marked(text: str, where: str = "YAML") -> Marked:
    """Reads YAML text. Raises ConfigError, with the line, for what is not YAML."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        made = Marked(None)
        if node is not None:
            made.value = _Reader(made).read(node, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = where if mark is None else f"{where}, line {mark.line + 1}"
        why = getattr(error, "problem", None) or " ".join(str(error).split())
        fix = "A value with a colon, a brace or a # in it needs quotes; a list item needs a space after its dash"
        raise config_error("not-yaml", at, None, f"it is not YAML ({why})", fix) from error
    except RecursionError:
        raise config_error("not-yaml", where, None, "it is nested too deeply", "Write it flat") from None
    return made


class _Reader:
    def __init__(self, made: Marked) -> None:
        self.made = made
        self.loader = yaml.SafeLoader("")
        self.inside: list[yaml.Node] = []
        self.nodes = 0

    def read(self, node: yaml.Node, path: Place) -> Any:
        self.nodes += 1
        if any(node is outer for outer in self.inside) or self.nodes > _MOST_NODES:
            raise yaml.constructor.ConstructorError(
                None, None, "an alias that holds itself, or aliases of aliases", node.start_mark
            )
        if node.tag not in _SAFE_TAGS:
            why = (
                "a tag that makes an object of it, which would run code"
                if "python" in node.tag
                else "a tag that is not known"
            )
            self.fault(
                "unsafe-tag", node, path, node.tag.replace("tag:yaml.org,2002:", "!!"), why, "Write the plain value"
            )
            return None
        if isinstance(node, yaml.ScalarNode):
            try:
                return self.loader.construct_object(node)
            except (ValueError, yaml.YAMLError) as error:
                why = f"not a {node.tag.rsplit(':', 1)[1]} ({error})"
                self.fault("not-a-value", node, path, node.value, why, "Write it in quotes if it is a text")
                return None
        self.inside.append(node)
        try:
            return self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self.sequence(node, path)
        finally:
            self.inside.pop()

    def sequence(self, node: yaml.Node, path: Place) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.made.lines[(*path, index)] = item.start_mark.line + 1
            items.append(self.read(item, (*path, index)))
        return items

    def mapping(self, node: yaml.MappingNode, path: Place) -> dict[str, Any]:
        seen: dict[str, int] = {}
        made: dict[str, Any] = {}
        for key, value, merged in self.pairs(node):
            line = key.start_mark.line + 1
            name = self.read(key, path)
            if not isinstance(name, str):
                why = "a key that is not a text" + (": YAML reads it as yes or no" if isinstance(name, bool) else "")
                self.fault("key-not-text", key, path, getattr(key, "value", ""), why, "Write it in quotes")
                continue
            if not merged and name in seen:
                self.fault(
                    "key-twice",
                    key,
                    (*path, name),
                    "",
                    f"it stands in line {seen[name]} already",
                    "Leave out one of them",
                )
                continue
            if not merged:
                seen[name] = line
            elif name in made:
                continue  # what stands here wins over what is merged in
            self.made.lines[(*path, name)] = line
            made[name] = self.read(value, (*path, name))
        return made

    def pairs(self, node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node, bool]]:
        """(key, value, whether it is merged in): the mapping's own first."""
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                yield key, value, False
        for value in merges:
            for inner in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(inner, yaml.MappingNode) and inner is not node:
                    yield from ((key, item, True) for key, item, _ in self.pairs(inner))

    def fault(self, code: str, node: yaml.Node, path: Place, given: str, why: str, fix: str) -> None:
        line = node.start_mark.line + 1
        at = ".".join(map(str, path))
        where = f"line {line}: {at}" if at else f"line {line}"
        self.made.faults.append(Finding("error", code, where, given, why, fix))
