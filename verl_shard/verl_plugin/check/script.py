"""From a launch script to what it gives verl."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from verl_shard.common.errors import Finding, config_error
from verl_shard.verl_plugin.check.articles import FLAGS, LAUNCHERS, of_launcher
from verl_shard.verl_plugin.check.given import UNKNOWN, Given, unknown_flag
from verl_shard.verl_plugin.check.shell import Command, Shell

MAIN = re.compile(r"(^|[./])main_\w*(ppo|dapo|grpo|prime|spin|sppo)\w*(\.py)?$")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")
_OTHER_MAINS = re.compile(r"verl\.(trainer|experimental|recipe)\S*")


def read_script(path: Path, arguments: Sequence[str]) -> Given:
    """What the script gives verl. arguments: what "$@" stands for; where the script has none they come last.

    Raises ConfigError when it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why, fix = f"it cannot be read ({error})", "Give a shell script as text"
        raise config_error("no-script", "--script", path, why, fix) from error
    given = Given()
    lines = [
        (f"{path.name}:{n}", line) for n, line in enumerate(text.splitlines(), 1) if not line.strip().startswith("#")
    ]
    given.text = lines
    if path.suffix == ".py":
        _flags(given, lines)
        return given
    shell = Shell(arguments=tuple(arguments))
    commands = shell.read(text)
    for name, line in shell.exported.items():
        given.environment[name] = (shell.value(name, line), f"{path.name}:{line}")
    mains = [(command, index) for command in commands if (index := _main(command)) is not None]
    for command, index in mains[:1]:
        _read_main(command, index, path, given)
    for command in commands:
        _never(command, path, given, started=bool(mains))
    if len(mains) > 1:
        where = ", ".join(str(command.lines[index]) for command, index in mains[1:])
        given.left_out.append(
            f"{path.name} starts verl several times; the first is looked at, not those in line {where}"
        )
    if not mains:
        why = "no command in it starts verl.trainer.main_ppo"
        other = next((m[0] for _, line in lines if (m := _OTHER_MAINS.search(line))), "")
        seen = f"{why}, only {other}" if other else why
        given.findings.append(
            Finding(
                "warning", "no-verl-command", "--script", path.name, seen, "Give the script that starts the trainer"
            )
        )
    if arguments and not shell.used_arguments:
        for text_ in arguments:
            given.add(text_, "on the command line")
    used = {name: line for name, line in shell.unset.items() if not name.startswith("_")}
    for name, line in used.items():
        if any(f"${name}" in text_ or f"${{{name}" in text_ for _, text_ in lines):
            given.left_out.append(f"${name} is not set in {path.name} (line {line}): what it decides is not looked at")
    return given


def _main(command: Command) -> int | None:
    """Where in the words verl's main program is named."""
    return next((i for i, word in enumerate(command.words) if MAIN.search(word)), None)


def _read_main(command: Command, index: int, path: Path, given: Given) -> None:
    for name, value in command.assigned.items():
        given.environment[name] = (value, f"{path.name}:{command.lines[0]}")
    for number, word in enumerate(command.words[:index]):
        at = f"{path.name}:{command.lines[number]}"
        base = Path(word).name
        if base in LAUNCHERS:
            given.findings.append(of_launcher(base, at))
        elif re.match(r"[A-Za-z_]\w*=", word):
            name, _, value = word.partition("=")
            given.environment[name] = (value, at)
        elif word.startswith("--runtime-env-json"):
            _runtime_env(command.words[number : number + 2], at, given)
    skip = False
    for word, line in zip(command.words[index + 1 :], command.lines[index + 1 :], strict=True):
        at = f"{path.name}:{line}"
        if skip:
            given.config_name, skip = word, False
        elif word in ("--config-name", "-cn"):
            skip = True
        elif word in ("--config-path", "-cp", "--config-dir", "-cd"):
            given.left_out.append(f"the configuration under {word} ({at}): give that file with --config")
        elif word == UNKNOWN:
            given.left_out.append(f"a word that only the running shell knows ({at})")
        else:
            given.add(word, at)


def _runtime_env(words: Sequence[str], at: str, given: Given) -> None:
    """Variables that `ray job submit` hands on."""
    text = words[0].partition("=")[2] or (words[1] if len(words) > 1 else "")
    try:
        variables = json.loads(text).get("env_vars", {})
    except (ValueError, AttributeError):
        return
    for name, value in variables.items():
        given.environment[name] = (str(value), at)


def _never(command: Command, path: Path, given: Given, *, started: bool) -> None:
    """Flags and launchers of commands that start a training of another make."""
    is_main = _main(command) is not None
    for word, line in zip(command.words, command.lines, strict=True):
        name = word.split("=")[0]
        if name in FLAGS and not is_main and any(_PYTHON.search(w) for w in command.words):
            given.findings.append(unknown_flag(word, f"{path.name}:{line}"))
    first = Path(command.words[0]).name
    trains = any("ppo" in word or "verl" in word for word in command.words) and not any(
        "sft" in w for w in command.words
    )
    if first in LAUNCHERS and not is_main and trains and not started:
        given.findings.append(of_launcher(first, f"{path.name}:{command.lines[0]}"))


def _flags(given: Given, lines: list[tuple[str, str]]) -> None:
    """Flags in a Python file that starts verl by hand."""
    for at, line in lines:
        for name in FLAGS:
            if re.search(rf"['\"\s]{name}\b", line) and "verl" in line:
                given.findings.append(unknown_flag(name, at))
