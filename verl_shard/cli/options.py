"""A command's flags from the fields of a dataclass: one place says what an option is, means and defaults to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def with_options(options: type, run: Callable[[dict[str, Any], list[str]], int | None]) -> Callable[..., int | None]:
    """A typer command with one flag for each field of the dataclass `options`.

    Each field is Annotated[type, help]. `run` gets the options that were given on the command line, by field name, and
    the arguments after "--".
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in fields(options):
        kind: Any
        kind, text = get_args(hints[field.name])
        assert field.default is not MISSING, f"{field.name} has no default"
        default: Any = field.default
        if get_origin(kind) is tuple:
            item = get_args(kind)[0]
            kind, default = list[item], list(field.default)  # type: ignore[valid-type]
        flags = [f"--{field.name.replace('_', '-')}"]
        annotation = Annotated[kind, typer.Option(*flags, help=text, show_default=bool(field.default))]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def command(context: typer.Context, **values: Any) -> int | None:
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
        }
        return run(given, list(context.args))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
