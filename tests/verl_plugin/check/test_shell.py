"""The reader of shell scripts against bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from verl_shard.verl_plugin.check.arithmetic import evaluate
from verl_shard.verl_plugin.check.given import UNKNOWN
from verl_shard.verl_plugin.check.shell import Shell

SHOW = 'show() { for word in "$@"; do printf \'%s\\n\' "<$word>"; done; }\n'

SCRIPTS = [
    "show a b  c",
    "show 'a b' \"c d\" e\\ f",
    "show \\\n  a \\\n  b # not c\n",
    "X=1; show $X ${X} \"$X\" '$X' pre${X}post",
    "X='a b'; show $X \"$X\"",
    "X=''; show a $X b \"$X\"",
    "X=${Y_NOT_SET_HERE:-default}; show $X ${Y_NOT_SET_HERE:-a b} \"${Y_NOT_SET_HERE:-a b}\"",
    "X=3; Y=$((X * 2 + 1)); show $Y $(( (X + 1) * 1024 )) $((2 ** 5)) $((7 / 2)) $((-X))",
    'LIST=(a "b c" d); LIST+=(e); show "${LIST[@]}" x"${LIST[@]}"y',
    "A='x=1 y=2'\nshow $A z=3",
    "A=1\nA+=2\nshow $A",
    "N=8; show data.files=\"['/a/b','$N']\" k='[\"console\",\"wandb\"]' l=['console','wandb']",
    "show \"a\\\"b\" \"a\\$b\" 'a\\b' \"a\\b\" \"$\"",
    "export A=1 B='2 3'; show $A \"$B\"",
    "show a 2>&1 | cat; show b && show c || true",
    "cat > /dev/null <<EOF\nshow never $X\nEOF\nshow a",
    "show a#b # c\nshow '#d'",
    "if [ -z \"$Y_NOT_SET_HERE\" ]; then show yes; fi",
    "X=a; show \"${X}_b\" ${X:+set} ${Y_NOT_SET_HERE:+set} ${X-b}",
    "show \"$@\" end",
    "show $@ $* last",
    "X=\"a\\\nb\"; show \"$X\"",
    "show $'a b' k=\"v w\"x'y z'",
    "PRE='x '; show a$PRE''b a$PRE b$PRE",
    "PRE=' x'; show a$PRE $PRE ''$PRE",
    "E=(); show a \"${E[@]}\" b ${E[@]}",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_that_bash_has(script: str) -> None:
    wanted = subprocess.run(
        ["bash", "-c", SHOW + script, "x", "one", "two 2"], capture_output=True, text=True, check=True
    )
    commands = Shell(arguments=("one", "two 2")).read(script)
    shown = [f"<{word}>" for command in commands for word in _after_show(command.words)]
    assert shown == wanted.stdout.splitlines()


def _after_show(words: tuple[str, ...]) -> tuple[str, ...]:
    return words[words.index("show") + 1 :] if "show" in words else ()


PIECES = st.sampled_from(
    [
        "/a",
        "=",
        "/b.c",
        " ",
        "  ",
        "'x y'",
        '"x y"',
        "$X",
        '"$X"',
        "${X}",
        "\\ ",
        "\\\n",
        "[1,2]",
        "{k:v}",
        '"$Y z"',
        "$Y",
        "''",
        "+",
    ]
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    derandomize=True,
    database=None,
)
@given(texts=st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=20, max_size=20))
def test_any_mixture_of_quotes_and_variables(texts: list[str]) -> None:
    script = "X=1; Y='p q'\n" + "".join(f"show {text}\nshow END\n" for text in texts)
    wanted = subprocess.run(["bash", "-c", SHOW + script], capture_output=True, text=True)
    shown = [f"<{word}>" for command in Shell().read(script) for word in _after_show(command.words)]
    assert shown == wanted.stdout.splitlines()


def test_what_only_a_running_shell_knows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_NODES", raising=False)
    shell = Shell()
    (command,) = shell.read("show \\\n a=$MY_NODES b=$(date +%s) c=`hostname` d=$1 e=$((MY_NODES * 2))")
    assert command.words[1:] == (f"a={UNKNOWN}", f"b={UNKNOWN}", f"c={UNKNOWN}", f"d={UNKNOWN}", f"e={UNKNOWN}")
    assert shell.unset == {"MY_NODES": 2}
    assert command.lines == (1, 2, 2, 2, 2, 2)
    monkeypatch.setenv("MY_NODES", "3")
    assert Shell().read("show $((MY_NODES * 2))")[0].words == ("show", "6")


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    Shell().read(f"touch {made}; X=$(touch {made}); `touch {made}`; echo $((__import__('os').system('touch {made}')))")
    assert not made.exists()
    assert evaluate("__import__('os')") is None
    assert evaluate("9 ** 9 ** 9") is None


def test_arithmetic_is_that_of_bash() -> None:
    texts = [f"{a} {op} {b}" for a in (-7, 7, -6, 0) for op in "/%" for b in (-3, -2, 2, 3)]
    texts += ["-7/2*2 + -7%2", "(1 - 8)/2", "2 ** 10", "-2 * -3"]
    wanted = subprocess.run(
        ["bash", "-c", "".join(f"echo $(({text}))\n" for text in texts)], capture_output=True, text=True, check=True
    )
    assert [evaluate(text) for text in texts] == [int(line) for line in wanted.stdout.split()]
    assert (evaluate("-7/2"), evaluate("-7 % 2")) == (-3, -1)
    for refused in ("7 / 0", "7 % 0", "2 ** -1", "-2 ** 2", "True"):
        assert evaluate(refused) is None


@pytest.mark.parametrize(
    "script", ["'", '"', "${", "$((", "$(", "`", "A=(", "\\", "<<", "<<EOF", "${X:-", "a'b", "$", "export", "&&"]
)
def test_what_is_not_closed_ends(script: str) -> None:
    Shell().read(script)
    Shell().read(f"show a\n{script}\nshow b")
