"""Flags from the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from verl_shard.cli.main import run as run_command_line
from verl_shard.cli.options import default, in_flags, one_of, with_options
from verl_shard.common.errors import ConfigError, RunError, config_error
from verl_shard.quickstart.options import QuickstartOptions


@dataclass(frozen=True)
class Options:
    """Of each kind of field one."""

    model: Annotated[str | None, "Which model."] = None
    steps: Annotated[int, "How many steps."] = 40
    rate: Annotated[float | None, "How fast."] = None
    file_names: Annotated[tuple[Path, ...], "Which files."] = ()
    dry: Annotated[bool, "Do nothing."] = False


def _call(*arguments: str, options: type = Options) -> Any:
    """(options that were given, extra arguments), or the result of a call that failed."""
    calls: list[tuple[dict[str, Any], list[str]]] = []
    app = typer.Typer()
    settings = {"allow_extra_args": True}
    app.command(context_settings=settings)(
        with_options(options, lambda given, extra: calls.append((given, extra)))  # type: ignore[func-returns-value]
    )
    result = CliRunner().invoke(app, list(arguments))
    return calls[0] if calls else result


def test_only_what_was_given_is_passed_on() -> None:
    assert _call() == ({}, [])
    assert _call("--steps", "40") == ({"steps": 40}, [])
    assert _call("--model", "a", "--rate", "0.5", "--dry") == ({"model": "a", "rate": 0.5, "dry": True}, [])


def test_a_flag_may_be_repeated_where_the_field_is_a_tuple() -> None:
    assert _call("--file-names", "a", "--file-names", "b") == ({"file_names": (Path("a"), Path("b"))}, [])


def test_what_follows_two_dashes_is_passed_on_as_it_is() -> None:
    assert _call("--steps", "3", "--", "data.seed=1", "+a.b='x y'") == ({"steps": 3}, ["data.seed=1", "+a.b='x y'"])


@pytest.mark.parametrize("arguments", [["--stepz", "3"], ["--steps", "three"], ["--steps"]], ids=" ".join)
def test_what_is_not_understood_ends_with_2(arguments: list[str]) -> None:
    result = _call(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in click.unstyle(result.output)


def test_help_texts_and_defaults_are_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = click.unstyle(_call("--help").output)
    for line in (
        "--model",
        "Which model.",
        "--file-names",
        "Which files.",
        "How many steps. [default: 40]",
        "Do nothing.",
    ):
        assert line in text
    assert text.count("[default:") == 1


def test_every_option_of_the_quick_start_is_a_flag_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = " ".join(click.unstyle(_call("--help", options=QuickstartOptions).output).replace("│", " ").split())
    for name, kind in QuickstartOptions.__annotations__.items():
        assert f"--{name.replace('_', '-')} " in text, name
        assert kind


def test_a_field_without_a_default_is_a_mistake_of_ours() -> None:
    @dataclass
    class Bad:
        steps: Annotated[int, "How many."]

    Bad.__annotations__ = {"steps": Annotated[int, "How many."]}
    with pytest.raises(AssertionError, match="steps has no default"):
        with_options(Bad, lambda given, extra: None)


def test_help_names_every_choice_and_a_default() -> None:
    assert one_of(Literal["a", "b-c", "d"], {"b-c": "the middle"}) == "a, b-c (the middle) or d"
    assert one_of(Literal["a", "b"]) == "a or b"
    with pytest.raises(AssertionError, match=r"\['x'\] are not among \('a', 'b'\)"):
        one_of(Literal["a", "b"], {"x": "which is none"})
    # A style would be taken out: what is shown is what is meant.
    assert [Text.from_markup(default(text)).plain for text in (2048, "adamw", "/tmp")] == [
        " [2048]",
        " [adamw]",
        " [/tmp]",
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (("n_gpus", "no GPU", "Say n_gpus=4 or devices=['cpu']"), "--gpus: no GPU. Say --gpus 4 or --devices cpu."),
        (("seq_len", "see seq_len", "Give seq_len too"), "--seq-len: see --seq-len. Give --seq-len too."),
        (
            ("task", "it is no task", 'Use task="reward", packed=True or --seq-len 8'),
            "--task: it is no task. Use --task reward, --packed or --seq-len 8.",
        ),
        (("model", "no such model", "Name a folder"), "model: no such model. Name a folder."),
    ],
)
def test_an_error_about_arguments_is_about_flags(said: tuple[str, str, str], shown: str) -> None:
    def command(model: str, seq_len: int, task: str, packed: bool, devices: str) -> None:
        """Has these flags."""

    where, why, fix = said
    with pytest.raises(ConfigError) as caught, in_flags(command, n_gpus="--gpus"):
        raise config_error("a-code", where, None, why, fix)
    assert str(caught.value) == shown
    assert [finding.code for finding in caught.value.findings] == ["a-code"]


class TestCommandLine:
    """Exit codes and messages of the whole command."""

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        from verl_shard import __version__

        assert run_command_line(["--version"]) == 0
        assert capsys.readouterr().out == f"{__version__}\n"

    @pytest.mark.parametrize(
        "arguments",
        [["quickstar"], ["quickstart", "--step", "1"], ["quickstart", "--steps", "x"], ["bench", "x"]],
        ids=" ".join,
    )
    def test_what_is_not_understood_ends_with_2(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command_line(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert arguments[-1] in captured.err or arguments[1] in captured.err

    @pytest.mark.parametrize(
        ("error", "code", "text"),
        [
            (config_error("a", "--n", 0, "less than 1", "Leave it out"), 2, "error: --n = 0: less than 1. Leave it out.\n"),
            (
                ConfigError(
                    [*config_error("a", "x", "[red]", "bad", "").findings, *config_error("b", "y", None, "bad", "").findings]
                ),
                2,
                "error: x = [red]: bad.\nerror: y: bad.\n",
            ),
            (RunError("verl ended: [Errno 2] no file"), 1, "error: verl ended: [Errno 2] no file\n"),
            (KeyboardInterrupt(), 130, "Stopped.\n"),
        ],
        ids=["config", "two findings", "run", "interrupt"],
    )  # fmt: skip
    def test_an_error_is_one_message_and_an_exit_code(
        self,
        error: BaseException,
        code: int,
        text: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(given: dict[str, Any], extra: list[str], **more: Any) -> None:
            raise error

        monkeypatch.setattr("verl_shard.quickstart.run.quickstart", fail)
        assert run_command_line(["quickstart"]) == code
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", text)

    def test_the_quick_start_gets_what_was_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        called = "verl_shard.quickstart.run.quickstart"
        monkeypatch.setattr(called, lambda given, extra, **more: calls.append((given, extra)))
        assert run_command_line(["quickstart", "--algorithm", "grpo", "--data", "a.parquet", "--", "x=1"]) == 0
        assert calls == [({"algorithm": "grpo", "data": (Path("a.parquet"),)}, ["x=1"])]
