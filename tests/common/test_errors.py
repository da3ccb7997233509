"""Findings as text, and exceptions that keep what they carry."""

from __future__ import annotations

import pickle

import pytest

from verl_shard.common.errors import (
    ConfigError,
    DoesNotFitError,
    Finding,
    MissingExtraError,
    RunError,
    ShardError,
    config_error,
)

ONE = Finding("error", "a", "--steps", "0", "0 is less than 1", "Give 1 or more")
TWO = Finding("error", "b", "--out", "", "it is a file", "Name a folder.")


def test_a_finding_is_one_sentence_each_for_fault_and_fix() -> None:
    assert str(ONE) == "--steps = 0: 0 is less than 1. Give 1 or more."
    assert str(TWO) == "--out: it is a file. Name a folder."
    assert str(Finding("error", "c", "x", "1", "bad", "")) == "x = 1: bad."


def test_a_config_error_holds_every_finding_and_is_a_value_error() -> None:
    error = ConfigError(iter([ONE, TWO]))
    assert error.findings == (ONE, TWO)
    assert str(error) == f"{ONE}\n{TWO}"
    assert isinstance(error, ValueError)
    assert ConfigError(ONE).findings == (ONE,)


@pytest.mark.parametrize(
    "error", [ConfigError([ONE, TWO]), MissingExtraError("the picture", "plots", "matplotlib"), RunError("it broke")]
)
def test_errors_survive_the_way_between_processes(error: ShardError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_missing_extra_says_what_to_install() -> None:
    error = MissingExtraError("the picture", "plots", "matplotlib")
    assert str(error) == (
        'the picture needs the extra "plots" (matplotlib is not installed): pip install "verl_shard[plots]"'
    )
    assert isinstance(error, ImportError)


def test_exit_codes() -> None:
    assert [kind.exit_code for kind in (ConfigError, DoesNotFitError, MissingExtraError, RunError)] == [2, 2, 2, 1]


def test_config_error_makes_one_finding() -> None:
    assert config_error("a", "--steps", 0, "0 is less than 1", "Give 1 or more").findings == (ONE,)
    assert config_error("b", "--out", None, "it is a file", "Name a folder.").findings == (TWO,)
