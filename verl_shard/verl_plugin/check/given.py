"""What somebody has for verl: overrides, a launch script, a configuration file; each setting with where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_shard.common.errors import Finding

UNKNOWN = "__only_the_running_shell_knows__"
"""Stands for what a script gets from elsewhere; plain text to Hydra's grammar."""


@dataclass(frozen=True)
class Setting:
    """One override. sign: "", "+", "++" or "~". value: as Hydra's grammar reads it. at: where it stands, in words.

    in_file: of a YAML file, where Hydra adds keys without a sign.
    """

    key: str
    value: Any
    sign: str = ""
    at: str = ""
    text: str = ""
    in_file: bool = False


@dataclass
class Given:
    """Everything that was given, in the order in which verl would see it.

    environment: variables that a script exports, with where. text: its lines, comments left out, for what is no override.
    launcher: the program that starts verl, when it is not python. program: what it starts.
    left_out: in words, what could not be looked at.
    """

    settings: list[Setting] = field(default_factory=list)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict)
    text: list[tuple[str, str]] = field(default_factory=list)
    launcher: tuple[str, str] | None = None
    config_name: str | None = None
    findings: list[Finding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, text: str, at: str) -> None:
        """An override as it is typed; one that Hydra cannot read is a finding."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        text = text.strip()
        if text.startswith("-"):
            self._flag(text, at)
            return
        try:
            override = OverridesParser.create().parse_override(text)
            value = override.value()
        except HydraException as error:
            key = text.split("=")[0]
            why = f"Hydra cannot read it ({' '.join(str(error).split()).split(' See https')[0]})"
            fix = f"Write {key}=VALUE without blanks around =, and the value between quotes: {key}='\"...\"'"
            self.findings.append(Finding("error", "unreadable-override", key, text, said_at(why, at), fix))
            return
        sign = "~" if override.is_delete() else "++" if override.is_force_add() else "+" if override.is_add() else ""
        self.settings.append(Setting(override.get_key_element().lstrip("+~"), value, sign, at, text))

    def _flag(self, text: str, at: str) -> None:
        name, _, value = text.partition("=")
        if name in ("--config-name", "-cn"):
            self.config_name = value
        elif name not in HYDRA_FLAGS:
            self.text.append((at, text))
            self.findings.append(unknown_flag(text, at))

    def add_tree(self, content: Mapping[str, Any], at: str) -> None:
        """The leaves of a YAML file; a key may have dots in it."""
        for key, value in leaves(content):
            if key.split(".")[0] not in ("defaults", "hydra"):
                self.settings.append(Setting(key, value, "", at, f"{key}: {value}", in_file=True))


HYDRA_FLAGS = (
    "--config-path", "-cp", "--config-dir", "-cd", "--multirun", "-m", "--cfg", "-c", "--resolve", "--info", "-i", "--help",
    "--hydra-help", "--run", "--package", "--shell-completion", "--experimental-rerun", "--version",
)  # fmt: skip


def unknown_flag(text: str, at: str) -> Finding:
    """A flag that verl's main program does not have, with what is meant where that is known."""
    from verl_shard.verl_plugin.check.articles import FLAGS

    name = text.split("=")[0].split()[0]
    if name in FLAGS:
        why, fix = FLAGS[name]
        return Finding("error", "never-in-verl", name, text, said_at(why, at), fix)
    why = said_at("verl's main program has no flags but Hydra's", at)
    return Finding("error", "unknown-flag", name, text, why, "Write an override, key=value")


def said_at(why: str, at: str) -> str:
    """A reason with where the thing stands, if that is said."""
    return f"{why}, {at}" if at else why


def leaves(content: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings; an empty mapping is a value."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{before}.{key}" if before else str(key)
        if isinstance(value, Mapping) and value:
            found += leaves(value, name)
        else:
            found.append((name, value))
    return found
