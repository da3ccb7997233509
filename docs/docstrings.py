"""Docstrings as Markdown: "name: what it is" becomes an item of a list, whose further lines are indented already."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_FIELD = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def as_markdown(text: str, names: set[str]) -> str:
    """The text with each line that explains some of `names` as an item of a list."""
    made: list[str] = []
    in_list = False
    for line in text.splitlines():
        found = _FIELD.match(line)
        if found and set(found["names"].split(", ")) <= names:
            if made and made[-1] and not in_list:
                made.append("")
            explained = ", ".join(f"`{name}`" for name in found["names"].split(", "))
            line, in_list = f"- {explained}: {line[found.end() :]}", True
        elif in_list and line and not line.startswith(" "):
            if made[-1]:
                made.append("")
            in_list = False
        made.append(line)
    return "\n".join(made)


class FieldsAsLists(Extension):
    """What mkdocs.yml names."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites the docstring of every class and function."""
        if obj.docstring is None or not (obj.is_class or obj.is_function):
            return
        names = {parameter.name for parameter in getattr(obj, "parameters", ())} | set(obj.members)
        obj.docstring.value = as_markdown(obj.docstring.value, names)
