"""Blocks of shell commands: each is parsed by the program it is for, and those of ours that are quick are run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from docs.blocks import ROOT, Block
from verl_shard.cli.main import app, run

QUICK = {"map", "estimate", "plan", "accelerate-config", "explain", "check", "run"}
"""Verbs that are run; of these "run" with --dry-run only. The others measure, train, or look at the machine."""
HARMLESS = {"cd", "export", "tee", "cat", "source"}
MORE = "..."
"""What stands for more arguments of verl's."""


@dataclass(frozen=True)
class Command:
    """One program with its arguments. piped: it reads what another writes. out: the file that it writes to."""

    argv: tuple[str, ...]
    piped: bool = False
    out: str | None = None

    @property
    def words(self) -> str:
        """For messages."""
        return shlex.join(self.argv)


def commands_of(text: str) -> Iterator[Command]:
    """Every command of a block, without comments, variables and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;><")
        lexer.whitespace_split = True
        argv: list[str] = []
        out, piped, to_file = None, False, False
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|&;"):
                while argv and re.match(r"[A-Za-z_]\w*=", argv[0]):
                    argv = argv[1:]
                if argv:
                    yield Command(tuple(argv), piped, out)
                argv, out, piped = [], None, word.startswith("|")
            elif word in (">", ">>", "<"):
                to_file = True
            elif word == ">&":
                assert argv.pop() == "2", f"{line}: a redirection that is not understood"
                to_file = True
            elif to_file:
                out, to_file = (None if word == "1" else word), False
            else:
                argv.append(word)


def check_command(command: Command, written: set[str]) -> str:
    """Parses a command; returns what was done: "parsed" or "named". Raises AssertionError for one that cannot work.

    written: the files that commands before it write.
    """
    program, *rest = command.argv
    if program in HARMLESS:
        return "named"
    assert program in _CHECKS, f"{command.words}: no test knows how to check {program}"
    _CHECKS[program](rest, written)
    return "parsed"


def is_quick(command: Command) -> bool:
    """Whether a test runs it."""
    if command.argv[0] != "verl-shard" or command.piped:
        return False
    verb = command.argv[1]
    return verb in QUICK and (verb != "run" or "--dry-run" in command.argv)


def run_command(command: Command) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one of our commands, in this process."""
    shown, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
        code = run(command.argv[1:])
    if command.out:
        Path(command.out).write_text(shown.getvalue())
    return code, shown.getvalue(), said.getvalue()


def _ours(argv: Sequence[str], _: set[str]) -> None:
    """Parses as the command line does, and runs nothing."""
    made: Any = typer.main.get_command(app)
    context, rest = made.make_context("verl-shard", list(argv)), list(argv)
    while hasattr(made, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, made, rest = made.resolve_command(context, rest)
        context = made.make_context(name, rest, parent=context)


def _make(argv: Sequence[str], _: set[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = [word for word in argv if "=" not in word]
    assert wanted, "make without a target"
    assert set(wanted) <= targets, f"make {argv}: the Makefile has {sorted(targets)}"


def _python(argv: Sequence[str], written: set[str]) -> None:
    if argv[:2] == ["-m", "verl.trainer.main_ppo"]:
        compose([word for word in argv[2:] if word != MORE])
    elif argv[:2] == ["-m", "pip"]:
        _pip(argv[2:], written)
    elif argv[0] == "-m":
        assert argv[1] in ("pytest", "venv") or argv[1].startswith("verl_shard."), f"python {argv}"
        for word in argv[2:]:
            assert "/" not in word or (ROOT / word).exists(), f"{word} is not there"
    else:
        _script(argv, written)


def _script(argv: Sequence[str], written: set[str]) -> None:
    script = argv[0]
    assert (ROOT / script).is_file() or script in written, f"there is no {script}"


def _pip(argv: Sequence[str], _: set[str]) -> None:
    from configparser import ConfigParser

    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert argv[0] == "install"
    for word in argv[1:]:
        extra = re.fullmatch(r"(?:\.|verl_shard)\[(\w[\w-]*)\]", word)
        assert not extra or extra[1] in setup["options.extras_require"], f"there is no extra {word}"


def _accelerate(argv: Sequence[str], written: set[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert argv[0] == "launch"
    read = launch_command_parser().parse_args(list(argv[1:]))
    if read.config_file:
        assert read.config_file in written, f"no command before it writes {read.config_file}"
    _script([read.training_script], written)


def _torchrun(argv: Sequence[str], written: set[str]) -> None:
    from torch.distributed.run import get_args_parser

    _script([get_args_parser().parse_args(list(argv)).training_script], written)


def compose(overrides: Sequence[str]) -> Any:
    """verl's configuration with these overrides, as its main program composes it; Hydra refuses keys that do not exist."""
    import verl
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    _with_our_groups()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        made = hydra_compose("ppo_trainer", overrides=list(overrides))
    GlobalHydra.instance().clear()
    return made


@cache
def _with_our_groups() -> None:
    from verl_shard.verl_plugin import search_path

    search_path.register()


_CHECKS: dict[str, Callable[[Sequence[str], set[str]], None]] = {
    "verl-shard": _ours,
    "make": _make,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
}


def check_block(block: Block, written: set[str]) -> list[tuple[Command, str]]:
    """Every command of a block with what was done with it."""
    done = []
    for command in commands_of(block.text):
        done.append((command, check_command(command, written)))
        if command.out:
            written.add(command.out)
        written |= {command.argv[n + 1] for n, word in enumerate(command.argv) if word in ("--save", "tee")}
        if command.argv[0] == "tee":
            written.add(command.argv[-1])
    return done


def flat(content: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a nested mapping, joined by dots as Hydra writes them."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def as_override(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    from verl_shard.verl_plugin.overrides import hydra_value

    return hydra_value(value)
