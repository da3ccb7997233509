"""A command's flags from the fields of a dataclass: one place says what an option is, means and defaults to. And what the
commands have in common: help that names what the checks know, and errors in the words of flags."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
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


def one_of(choices: Any, about: Mapping[str, str] | None = None) -> str:
    """For help: "adamw, adamw-fused (saves memory) or sgd", every choice of a Literal. about: words on some of them."""
    names, words = get_args(choices), about or {}
    assert words.keys() <= set(names), f"{sorted(words.keys() - set(names))} are not among {names}"
    shown = [f"{name} ({words[name]})" if name in words else str(name) for name in names]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"


def default(text: object) -> str:
    """For help: a default that a function chooses, " [2048]". A "[" before a letter would be a style, which rich takes out."""
    shown = f"[{text}]"
    return rf" \{shown}" if re.match(r"\[[a-z#/@]", shown) else f" {shown}"


@contextmanager
def in_flags(command: Callable[..., Any], **more: str) -> Iterator[None]:
    """A ConfigError in here is about what was typed: what a function of ours calls seq_len is --seq-len.

    command: whose parameters are flags. more: flags of arguments that have another name, n_gpus="--gpus".
    """
    from verl_shard.common.errors import ConfigError

    flags = {name: f"--{name.replace('_', '-')}" for name in inspect.signature(command).parameters if name != "model"}
    flags |= more

    def said(text: str) -> str:
        # As Python writes it, n_gpus=4 and devices=["cpu"]; then names alone, of which those of one word are also words.
        named = "|".join(map(re.escape, flags))
        text = re.sub(rf"\b({named})=(?:\[?[\"']([^\"']*)[\"']\]?|([\w.]+))", _typed, text)
        return re.sub(rf"(?<!-)\b({named})\b", lambda found: flags[found[1]] if "_" in found[1] else found[1], text)

    def _typed(found: re.Match[str]) -> str:
        value = found[2] if found[2] is not None else found[3]
        return flags[found[1]] if value == "True" else f"{flags[found[1]]} {value}"

    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            replace(one, where=flags.get(one.where, one.where), why=said(one.why), fix=said(one.fix))
            for one in error.findings
        ) from error
