"""Keywords that a trainer does not take: refused with where they belong, its signature as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.training.article_keys import KEYS, REFUSED

_P = ParamSpec("_P")
_SECTIONS = ("ppo_config", "generation_config", "model_config")


def refuse_unknown(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that raises ConfigError for keywords it does not have, where Python raises a bare TypeError.

    The signature stays the constructor's own: a **more in it would hide typing mistakes from those who read or check it.
    """
    taken = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(*args: _P.args, **given: _P.kwargs) -> None:
        unknown = {name: value for name, value in given.items() if name not in taken}
        if unknown:
            raise ConfigError(_finding(name, value, taken) for name, value in unknown.items())
        init(*args, **given)

    return checked


def _finding(name: str, value: Any, taken: list[str]) -> Finding:
    fix = _place_of(name, value)
    if fix is None:
        near = get_close_matches(name, taken, 1)
        fix = f"Did you mean {near[0]}?" if near else f"Use some of {', '.join(taken)}"
    return Finding("error", "unknown-keyword", name, repr(value), "there is no such setting", fix)


def _place_of(name: str, value: Any) -> str | None:
    """Which dict has it as a key, in words."""
    known = {(key.section, key.name): key.roles for key in KEYS}
    sections = [section for section in _SECTIONS if (section, name) in known]
    refused = next((REFUSED[section, name] for section in _SECTIONS if (section, name) in REFUSED), None)
    if not sections:
        return None if refused is None else refused[0].upper() + refused[1:]
    written = [
        f'model_config={{"{known[section, name][0]}": {{"{name}": {value!r}}}}}'
        if section == "model_config"
        else f'{section}={{"{name}": {value!r}}}'
        for section in sections
    ]
    return f"It is a key of {' and of '.join(sections)}: write {', or '.join(written)}"
