"""verl-shard estimate: JSON as the function's, what is wrong in the words of the flags, and help that names what may be given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from verl_shard.cli.main import run
from verl_shard.common import choices
from verl_shard.mapping.costs import PURPOSES
from verl_shard.memory.passes import ATTENTIONS, PassSpec
from verl_shard.models import meta
from verl_shard.models.packed import PACKED


@pytest.fixture
def folder(tmp_path: Path, small_config: Any) -> str:
    small_config("llama").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_json_is_what_the_function_gives(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    from verl_shard import estimate_memory

    assert run(["estimate", folder, "--seq-len", "8", "--logits-to-keep", "8", "--json"]) == 0
    made = estimate_memory(folder, seq_len=8, logits_to_keep=8).to_dict()
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            ["--seq-len", "8", "--logits-to-keep", "9"],
            "--logits-to-keep = 9: a sequence has 8 tokens (--seq-len), 1 fewer than 9. Give 8 or less, or leave it out for the "
            "logits of all.",
        ),
        (
            ["--logits-to-keep", "3000"],
            "--logits-to-keep = 3000: a sequence has 2048 tokens by default (--seq-len), 952 fewer than 3000. Give 2048 or less, "
            "or leave it out for the logits of all.",
        ),
        (
            ["--lora-rank", "0"],
            "--lora-rank = 0: adapters of rank 0 are none, and it changes nothing. Leave it out, or give 1 or more.",
        ),
        (
            ["--phase", "forward", "--optimizer", "sgd"],
            "--optimizer = 'sgd': it changes nothing of --phase forward. Leave it out.",
        ),
        (
            ["--attn-implementation", "x"],
            "--attn-implementation = 'x': not a choice. Use one of \"sdpa\", \"sdpa_packed\", \"flash_attention_2\", \"eager\".",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong(extra: list[str], said: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", folder, *extra]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"error: {said}\n")


def test_all_that_is_wrong_is_said_at_once(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--device-map", f"{folder}/absent.json", "--loss", "x", "--lora-rank", "0", "--task", "fun"]
    assert run(["estimate", folder, *wrong]) == 2
    said = [line.partition(" = ")[0].partition(": it ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == [f"error: {folder}/absent.json", "error: --loss", "error: --lora-rank", "error: --task"]


def test_more_logits_than_a_model_has_positions(small_config: Any) -> None:
    """A length that is not given is no longer than the model's positions, and the logits are held against that."""
    from verl_shard import estimate_memory
    from verl_shard.common.errors import ConfigError

    config = small_config("llama", max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"a sequence has 64 tokens by default \(seq_len\), 36 fewer than 100"):
        estimate_memory(config, logits_to_keep=100)


def test_a_pass_of_our_own_may_have_more_logits_than_tokens() -> None:
    """The planner gives the share of responses of rows whose length it changes; all are meant then."""
    assert PassSpec(seq_len=8, logits_to_keep=9).logits_to_keep == 9


def _help(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The text of each flag."""
    monkeypatch.setenv("COLUMNS", "400")
    assert run([verb, "--help"]) == 0
    lines = [line.strip("│ ") for line in click.unstyle(capsys.readouterr().out).splitlines()]
    return {line.split()[0]: line for line in lines if line.startswith("--")}


CHECKED = {
    "--task": get_args(meta.Task), "--attn-implementation": ATTENTIONS, "--precision": get_args(choices.Precision),
    "--optimizer": get_args(choices.Optimizer),
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("map", {"--purpose": PURPOSES}),
        ("estimate", {"--loss": get_args(choices.Loss), "--phase": get_args(choices.Phase)}),
    ],
)
def test_help_names_every_value_that_the_check_knows(
    verb: str, more: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = _help(verb, monkeypatch, capsys)
    for flag, names in {**CHECKED, **more}.items():
        words = texts[flag].replace(",", " ").replace(";", " ").replace(".", " ").split()
        assert set(names) <= set(words), flag


def test_what_help_and_checks_share_is_what_others_have() -> None:
    assert choices.Task == meta.Task
    assert PACKED in ATTENTIONS


@pytest.mark.parametrize("verb", ["map", "estimate"])
def test_help_has_the_defaults(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts, spec = _help(verb, monkeypatch, capsys), PassSpec()
    of_length = "2048 for training; no KV cache for inference" if verb == "map" else "2048"
    for flag, shown in {
        "--batch-size": spec.batch_size, "--seq-len": of_length, "--optimizer": spec.optimizer, "--in-flight": spec.in_flight,
        "--attn-implementation": spec.attn_implementation,
    }.items():  # fmt: skip
        assert texts[flag].endswith(f"[{shown}]"), texts[flag]
    assert (spec.batch_size, spec.seq_len) == (1, 2048)
    if verb == "map":
        assert texts["--dtype"].endswith("[bfloat16]")


@pytest.mark.parametrize("module", ["verl_shard", "verl_shard.cli.main"])
def test_the_command_is_a_module_too(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    from verl_shard import __version__

    assert (done.stdout, done.stderr) == (f"{__version__}\n", "")
