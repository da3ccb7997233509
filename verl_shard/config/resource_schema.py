"""The schema of resource_config.yaml: as JSON for editors, shipped as a file, and as the table of the docs.

`python -m verl_shard.config.resource_schema docs/resource_config.md` writes both anew.
"""

from __future__ import annotations

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from verl_shard.common.files import write_whole
from verl_shard.config.resource_config import SAME
from verl_shard.config.resource_rules import STRATEGIES
from verl_shard.config.roles import ROLES, ResourceConfig

FILE = "resource_config.schema.json"
_BEGIN, _END = "<!-- schema: begin -->\n", "<!-- schema: end -->"


def json_schema() -> dict[str, Any]:
    """The JSON schema of the file, made of the classes that read it."""
    made = TypeAdapter(ResourceConfig).json_schema()
    classes = made["$defs"]
    base = classes.pop("RoleConfig")
    properties = dict(base["properties"])
    for name, field in SAME.items():
        properties = (
            {name: properties[field], **properties} if name == "device_ids" else {**properties, name: properties[field]}
        )
    properties["model"] = {**properties["model"], "type": ["string", "null"], "description": "Folder or hub id."}
    for role in ROLES:
        own = {
            **properties["strategy"],
            "anyOf": [{"enum": list(STRATEGIES[role]), "type": "string"}, {"type": "null"}],
        }
        description = f"The {role}. What is left out is for the planner."
        classes[role] = {
            **base,
            "title": role,
            "description": description,
            "properties": {**properties, "strategy": own},
        }
        made["properties"][role] = {"anyOf": [{"$ref": f"#/$defs/{role}"}, {"type": "string"}, {"type": "null"}]}
    made.pop("required", None)
    made["title"] = "resource_config.yaml of verl_shard"
    made["description"] = "Which component of a run is on which GPUs, and how."
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_tidy(made)}


def shipped() -> str:
    """The file in the package, as text."""
    return (resources.files("verl_shard.config") / FILE).read_text(encoding="utf-8")


def as_text() -> str:
    """What the file in the package has to be."""
    return json.dumps(json_schema(), indent=2) + "\n"


def as_markdown() -> str:
    """The tables of the docs: keys of the file, of a component, of vllm_args and of nodes; strategies by component."""
    made = json_schema()
    classes = made["$defs"]
    parts = [
        ("The file", {name: value for name, value in made["properties"].items() if name not in ROLES}),
        ("A component", classes["actor"]["properties"]),
        ("`vllm_args`", classes["VllmArgs"]["properties"]),
        ("`nodes`", classes["Nodes"]["properties"]),
    ]
    lines: list[str] = []
    for title, keys in parts:
        lines += [f"### {title}", "", "| key | values | what it says |", "|---|---|---|"]
        if title == "The file":
            lines.append(
                f"| {', '.join(f'`{role}`' for role in ROLES)} | a component, or a model's name | The components. |"
            )
        for name, value in keys.items():
            same = f" The same as `{SAME[name]}`." if name in SAME else ""
            shown = _values(value) if name != "strategy" else "see below"
            lines.append(f"| `{name}` | {shown} | {value.get('description', '')}{same} |")
        lines.append("")
    lines += ["### Strategies", "", "| component | strategies |", "|---|---|"]
    lines += [f"| {role} | {', '.join(f'`{name}`' for name in STRATEGIES[role])} |" for role in ROLES]
    return "\n".join(lines) + "\n"


def write(docs: Path | None) -> None:
    """Writes the file in the package, and the tables between the marks of a page."""
    write_whole(Path(__file__).with_name(FILE), as_text())
    if docs is not None:
        text = docs.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        _, _, after = rest.partition(_END)
        write_whole(docs, f"{before}{_BEGIN}{as_markdown()}{_END}{after}")


def _tidy(value: Any) -> Any:
    """Without the titles that pydantic makes of names, and one type that may be null said once."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _tidy(item) for key, item in value.items()}
    if isinstance(made.get("title"), str) and "properties" not in made:
        del made["title"]
    if made.get("default", 0) is None:
        del made["default"]
    return made


def _values(value: dict[str, Any]) -> str:
    """The values of a key in a few words."""
    choices = value.get("anyOf", [value])
    words: list[str] = []
    for choice in choices:
        kind = choice.get("type")
        if "$ref" in choice:
            words.append("a mapping, see below")
        elif "enum" in choice:
            words += [f"`{item}`" for item in choice["enum"]]
        elif kind == "array":
            words.append("a list")
        elif kind == "integer":
            words.append("a whole number" + (f" from {choice['minimum']}" if "minimum" in choice else ""))
        elif kind == "number":
            low = f" above {choice['exclusiveMinimum']:g}" if "exclusiveMinimum" in choice else ""
            words.append(f"a number{low}" + (f" up to {choice['maximum']:g}" if "maximum" in choice else ""))
        elif kind == "boolean":
            words.append("`true`, `false`")
        elif kind == "object":
            words.append("a mapping")
        elif kind == "string" or kind == ["string", "null"]:
            words.append("a text")
    return ", ".join(dict.fromkeys(words))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
