"""Configuration classes: frozen pydantic dataclasses whose every fault is reported at once, as a ConfigError."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

import pydantic
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from verl_shard.common.errors import ConfigError, Finding

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def config_class(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose fields are checked; unknown names are refused with the nearest known.

    Making one raises ConfigError with every fault. A field's description is its help.
    """
    made: Any = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True, strict=False)
    )(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        try:
            init(self, *args, **given)
        except ValidationError as error:
            raise ConfigError(findings_of(error, made)) from None

    made.__init__ = checked
    return made  # type: ignore[no-any-return]


def read(
    cls: type[T],
    given: Mapping[str, Any],
    where: str = "",
    line_of: Callable[[tuple[Any, ...]], int | None] | None = None,
) -> T:
    """An instance of nested mappings, as a file has them. Raises ConfigError with every fault at its key (and line)."""
    try:
        return TypeAdapter(cls).validate_python(dict(given))
    except ValidationError as error:
        raise ConfigError(findings_of(error, cls, where, line_of)) from None


def findings_of(
    error: ValidationError, cls: type, where: str = "", line_of: Callable[[tuple[Any, ...]], int | None] | None = None
) -> list[Finding]:
    """What pydantic found, in our words: one Finding a fault."""
    found: dict[tuple[Any, ...], Finding] = {}
    for fault in error.errors(include_url=False):
        location = tuple(part for part in fault["loc"] if not _is_branch(part))
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # raised by a __post_init__, which sees its own fields only
            for n, own in enumerate(cause.findings):
                at = ".".join(map(str, (*([where] if where else []), *location, own.where)))
                line = None if line_of is None else line_of((*location, *own.where.split(".")))
                found[(*location, n)] = replace(own, where=at if line is None else f"line {line}: {at}")
            continue
        key = ".".join(map(str, location))
        at = f"{where}.{key}" if where and key else where or key
        line = None if line_of is None else line_of(location)
        if line is not None:
            at = f"line {line}: {at}"
        given = fault["input"]
        shown = "" if isinstance(given, Mapping) or is_dataclass(given) else repr(given)
        if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            known = _names_at(cls, location[:-1])
            near = get_close_matches(str(location[-1]), known, 1)
            fix = f'Did you mean "{near[0]}"?' if near else f"Use some of {', '.join(known)}"
            found[location] = Finding("error", "unknown-key", at, shown, "there is no such setting", fix)
        elif location in found:  # one of several types it could have been: the choices together
            before = found[location]
            fix = f"{before.fix}; or: {fault['msg']}" if fault["msg"] not in before.fix else before.fix
            found[location] = Finding("error", before.code, at, shown, before.why, fix)
        else:
            message = fault["msg"].removeprefix("Value error, ")
            found[location] = Finding("error", fault["type"].replace("_", "-"), at, shown, "not a valid value", message)
    return list(found.values())


def _is_branch(part: Any) -> bool:
    """Pydantic names the branch of a union in the location."""
    return isinstance(part, str) and ("[" in part or part in ("int", "str", "bool", "float", "none", "constrained-int"))


def _names_at(cls: Any, location: tuple[Any, ...]) -> list[str]:
    """The fields of the class that is at `location`."""
    for part in location:
        hints = get_type_hints(cls, include_extras=False) if is_dataclass(cls) else {}
        cls = hints.get(str(part), cls) if hints else cls
        inner = [argument for argument in get_args(cls) if is_dataclass(argument)]
        if inner:
            cls = inner[0]
    return sorted(field.name for field in fields(cls)) if is_dataclass(cls) else []
