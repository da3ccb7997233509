"""Reads a launch script as bash would, as far as that needs no running: words, quotes, variables, arrays, arithmetic.

Nothing is started. A word that depends on what only a running shell knows has UNKNOWN in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_shard.verl_plugin.check.arithmetic import evaluate
from verl_shard.verl_plugin.check.given import UNKNOWN

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
_PREFIXES = (
    "export", "env", "declare", "local", "readonly", "-x", "then", "do", "else", "if", "!", "time", "nohup", "exec", "{",
)  # fmt: skip
_ENDS = (";", "\n", "|", "&", ")", "(")
_REDIRECT = re.compile(r"(\d*|&)(>>|>\||>&|<&|>|<)")


@dataclass(frozen=True)
class Command:
    """A simple command. assigned: variables before its words. lines: of each word, counted from 1."""

    words: tuple[str, ...]
    assigned: Mapping[str, str]
    lines: tuple[int, ...]


@dataclass
class Shell:
    """State of the script as it is read. arguments: what "$@" stands for. unset: variables that nothing set."""

    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: dict[str, int] = field(default_factory=dict)
    unset: dict[str, int] = field(default_factory=dict)
    used_arguments: bool = False

    def read(self, text: str) -> list[Command]:
        """The commands of a script in their order; both branches of a condition, one after the other."""
        scanner = _Scanner(_without_heredocs(text), self)
        return scanner.commands()

    def value(self, name: str, line: int) -> str:
        """Of a variable: as the script or this process's environment has it."""
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ""
        if name in self.variables:
            return self.variables[name]
        if name in os.environ:
            return os.environ[name]
        self.unset.setdefault(name, line)
        return UNKNOWN


def _without_heredocs(text: str) -> str:
    """Bodies of heredocs become empty lines, so that lines keep their numbers."""
    lines, kept, until = text.split("\n"), [], None
    for line in lines:
        if until is not None:
            kept.append("")
            if line.strip() == until:
                until = None
            continue
        match = _HEREDOC.search(line)
        if match and "<<<" not in line:
            until = match[3]
            line = line[: match.start()] + line[match.end() :]
        kept.append(line)
    return "\n".join(kept)


class _Scanner:
    def __init__(self, text: str, shell: Shell) -> None:
        self.text, self.shell, self.at, self.line = text, shell, 0, 1

    def commands(self) -> list[Command]:
        found: list[Command] = []
        while self.at < len(self.text):
            start = self.at
            command = self._command()
            if command is not None:
                found.append(command)
            if self.at == start:
                self._step()
        return found

    def _step(self, count: int = 1) -> str:
        taken = self.text[self.at : self.at + count]
        self.line += taken.count("\n")
        self.at += count
        return taken

    def _blank(self) -> None:
        while self.at < len(self.text):
            if self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self._step(2 if self.text[self.at + 1] == "\n" else 3)
            elif self.text[self.at] in " \t\r":
                self._step()
            elif self.text[self.at] == "#" and (self.at == 0 or self.text[self.at - 1] in " \t\n;|&("):
                while self.at < len(self.text) and self.text[self.at] != "\n":
                    self._step()
            else:
                return

    def _command(self) -> Command | None:
        """Up to its end; None where there is nothing."""
        words: list[str] = []
        lines: list[int] = []
        assigned: dict[str, str] = {}
        while self.at < len(self.text):
            self._blank()
            if self.at >= len(self.text):
                break
            if (redirect := _REDIRECT.match(self.text, self.at)) is not None:
                self._step(len(redirect[0]))
                self._blank()
                self._word()
                continue
            if self.text[self.at] in _ENDS:
                self._step()
                break
            match = _ASSIGNMENT.match(self.text, self.at)
            if match is not None and not [word for word in words if word not in _PREFIXES]:
                self._assignment(match, assigned, words)
                continue
            line, made = self.line, self._word()
            words += made
            lines += [line] * len(made)
        self._keep(words, lines)
        return Command(tuple(words), assigned, tuple(lines)) if words else None

    def _assignment(self, match: re.Match[str], assigned: dict[str, str], words: list[str]) -> None:
        name, add = match[1], bool(match[2])
        line = self.line
        self._step(len(match[0]))
        shell = self.shell
        if self.at < len(self.text) and self.text[self.at] == "(":
            self._step()
            items = self._array()
            shell.arrays[name] = [*(shell.arrays.get(name, []) if add else []), *items]
            return
        ended = self.at >= len(self.text) or self.text[self.at] in " \t\n;"
        value = "" if ended else " ".join(self._word(split=False))
        if add:
            value = shell.variables.get(name, "") + value
        assigned[name] = value
        # Of "export A=b" the variable is set as of a plain assignment.
        if "export" in words:
            shell.exported[name] = line
        shell.variables[name] = value

    def _array(self) -> list[str]:
        items: list[str] = []
        while self.at < len(self.text):
            self._blank()
            if self.at >= len(self.text):
                break
            if self.text[self.at] == "\n":
                self._step()
            elif self.text[self.at] == ")":
                self._step()
                break
            else:
                items += self._word()
        return items

    def _keep(self, words: list[str], lines: list[int]) -> None:
        if words[:1] == ["export"]:
            for name, line in zip(words[1:], lines[1:], strict=True):
                self.shell.exported.setdefault(name, line)
        elif words[:1] == ["unset"]:
            for name in words[1:]:
                self.shell.variables.pop(name, None)

    def _word(self, *, split: bool = True) -> list[str]:
        """A word with what it expands to: several, where an array or an unquoted variable has blanks in it."""
        several = [""]
        quoted: set[int] = set()  # words with quotes in them stay also where they are empty
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r" or char in _ENDS:
                break
            if self.text.startswith("\\\n", self.at):
                self._step(2)  # a word goes on after it
            elif char == "\\":
                self._step()
                quoted.add(len(several) - 1)
                several[-1] += self._step()
            elif char == "'" or self.text.startswith("$'", self.at):
                quoted.add(len(several) - 1)
                self._step(1 if char == "'" else 2)
                end = self.text.find("'", self.at)
                several[-1] += self._step((len(self.text) if end < 0 else end) - self.at)
                self._step()
            elif char == '"':
                first = len(several) - 1
                if self._double(several):
                    quoted |= set(range(first, len(several)))
            elif char in "$`":
                expanded = self._expansion()
                items = expanded if isinstance(expanded, list) else [expanded]
                if not split:
                    several[-1] += " ".join(items)
                    continue
                for index, item in enumerate(items):
                    if index:
                        several.append("")
                    self._splice(several, item)
            else:
                several[-1] += self._step()
        return [word for index, word in enumerate(several) if word or index in quoted]

    @staticmethod
    def _splice(several: list[str], text: str) -> None:
        """Adds an unquoted expansion, which is cut at its blanks."""
        if UNKNOWN in text:
            several[-1] += text
            return
        for part in re.split(r"(\s+)", text):
            if part.isspace():
                several.append("")
            else:
                several[-1] += part

    def _double(self, several: list[str]) -> bool:
        """Text between double quotes. Returns whether it is more than an array without items, which is no word."""
        self._step()
        more = self.text[self.at : self.at + 1] == '"'
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.at + 1 < len(self.text) and self.text[self.at + 1] in '"\\$`\n':
                self._step()
                escaped = self._step()
                several[-1] += "" if escaped == "\n" else escaped
                more = True
            elif char in "$`":
                expanded = self._expansion()
                if isinstance(expanded, list):
                    several[-1] += "".join(expanded[:1])
                    several.extend(expanded[1:])
                    more = more or bool(expanded)
                else:
                    several[-1] += expanded
                    more = True
            else:
                several[-1] += self._step()
                more = True
        self._step()
        return more

    def _expansion(self) -> str | list[str]:
        """What stands at $ or `. A list for arrays and all arguments."""
        shell, line = self.shell, self.line
        if self.text[self.at] == "`":
            self._step()
            while self.at < len(self.text) and self.text[self.at] != "`":
                self._step()
            self._step()
            return UNKNOWN
        self._step()
        rest = self.text[self.at :]
        if rest.startswith("(("):
            inner = self._until("((", "))")
            return self._arithmetic(inner)
        if rest.startswith("("):
            self._until("(", ")")
            return UNKNOWN
        if rest.startswith("{"):
            return self._braced(self._until("{", "}"), line)
        if rest[:1] in "@*":
            self._step()
            shell.used_arguments = True
            return list(shell.arguments)
        if rest[:1].isdigit() or rest[:1] in "#?$!-":
            self._step()
            return UNKNOWN
        match = _NAME.match(rest)
        if match is None:
            return "$"
        self._step(len(match[0]))
        return shell.value(match[0], line)

    def _until(self, opening: str, closing: str) -> str:
        """The text between brackets, which may be nested."""
        self._step(len(opening))
        depth, start = 1, self.at
        while self.at < len(self.text):
            if self.text.startswith(closing, self.at):
                depth -= 1
                if depth == 0:
                    break
                self._step(len(closing))
            elif self.text.startswith(opening, self.at):
                depth += 1
                self._step(len(opening))
            else:
                self._step()
        inner = self.text[start : self.at]
        self._step(len(closing))
        return inner

    def _braced(self, inner: str, line: int) -> str | list[str]:
        shell = self.shell
        if re.fullmatch(r"[@*]", inner):
            shell.used_arguments = True
            return list(shell.arguments)
        if (match := re.fullmatch(r"([A-Za-z_]\w*)\[[@*]\]", inner)) is not None:
            return list(shell.arrays.get(match[1], []))
        if (match := re.fullmatch(r"(#?)([A-Za-z_]\w*|\d+|[@*#])(.*)", inner, re.DOTALL)) is None:
            return UNKNOWN
        counted, name, rest = match[1], match[2], match[3]
        if counted or not (_NAME.fullmatch(name) or name.isdigit()):
            return UNKNOWN
        known = name in shell.variables or name in shell.arrays or (name in os.environ and _NAME.fullmatch(name))
        if not rest:
            return shell.value(name, line) if _NAME.fullmatch(name) else UNKNOWN
        if (default := re.match(r":?([-=+?])(.*)", rest, re.DOTALL)) is not None:
            value = shell.value(name, line) if known else ""
            if default[1] == "+":
                return self._inside(default[2]) if value else ""
            if value:
                return value
            if default[1] == "?":
                return shell.value(name, line) if _NAME.fullmatch(name) else UNKNOWN
            made = self._inside(default[2])
            if default[1] == "=":
                shell.variables[name] = made
            return made
        return UNKNOWN

    def _inside(self, text: str) -> str:
        """A default value, with what is in it expanded."""
        inner = _Scanner(text, self.shell)
        inner.line = self.line
        words: list[str] = []
        while inner.at < len(inner.text):
            inner._blank()
            before = inner.at
            words += inner._word(split=False)
            if inner.at == before:
                inner._step()
        return " ".join(words)

    def _arithmetic(self, inner: str) -> str:
        names = {name: self.shell.value(name, self.line) for name in _NAME.findall(inner)}
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: names.get(m[1], m[0]), inner)
        value = evaluate(text)
        return UNKNOWN if value is None else str(value)
