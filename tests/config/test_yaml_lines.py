"""YAML is read safely, and every key has its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.config.yaml_lines import load_marked, read_marked

TEXT = """\
actor: {ids: [0, 1],
        strategy: fsdp}
base: &base
  a: 1
  b: [x,
      {c: 2}]
more:
  <<: *base
  a: 3
"""


def test_values_are_those_of_yaml_and_lines_those_of_the_text() -> None:
    made = read_marked(TEXT)
    assert made.faults == []
    assert made.value == {
        "actor": {"ids": [0, 1], "strategy": "fsdp"},
        "base": {"a": 1, "b": ["x", {"c": 2}]},
        "more": {"a": 3, "b": ["x", {"c": 2}]},
    }
    wanted = {
        ("actor",): 1, ("actor", "ids", 1): 1, ("actor", "strategy"): 2, ("base", "b", 1, "c"): 6, ("more", "a"): 9,
        ("more", "b"): 5, ("actor", "absent"): 1, ("absent",): None,
    }  # fmt: skip
    assert {place: made.line_of(place) for place in wanted} == wanted


def test_what_is_wrong_with_the_text_is_said_all_at_once() -> None:
    made = read_marked(
        "a: {b: 1,\n b: 2}\nc: !!python/object/apply:os.system ['touch x']\non: 3\nd: 2012-99-99\na: 4\n"
    )
    assert [str(fault) for fault in made.faults] == [
        "line 2: a.b: it stands in line 1 already. Leave out one of them.",
        "line 3: c = !!python/object/apply:os.system: a tag that makes an object of it, which would run code. Write the plain "
        "value.",
        "line 4 = on: a key that is not a text: YAML reads it as yes or no. Write it in quotes.",
        "line 5: d = 2012-99-99: not a timestamp (month must be in 1..12). Write it in quotes if it is a text.",
        "line 6: a: it stands in line 1 already. Leave out one of them.",
    ]
    assert made.value == {"a": {"b": 1}, "c": None, "d": None}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: [1", r"YAML, line 3: it is not YAML|YAML, line 2: it is not YAML"),
        ("a: b: c", "line 1: it is not YAML"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: &a [*a]", "an alias that holds itself"),
        ("a: &a {<<: {<<: *a}}", "nested too deeply|holds itself"),
        ("[" * 3000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_marked(text)


def test_aliases_of_aliases_do_not_fill_the_memory() -> None:
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases of aliases"):
        read_marked("a0: &a0 [x, x]\n" + "\n".join(lines))


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xe4")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    for name, why in (
        ("absent", "No such file"),
        ("latin", "not UTF-8"),
        ("large", "more than"),
        (".", "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_marked(tmp_path / name)
    (tmp_path / "empty").touch()
    assert load_marked(tmp_path / "empty").value is None
