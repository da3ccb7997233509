"""Models that cannot be read: one message with what was given, what is wrong and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from verl_shard.common.errors import ConfigError
from verl_shard.models.dtypes import dtype_name, parse_dtype
from verl_shard.models.read import read_spec


def _code(error: pytest.ExceptionInfo[ConfigError]) -> str:
    (finding,) = error.value.findings
    assert finding.why
    assert finding.fix
    assert "\n" not in str(error.value)
    return finding.code


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "model-folder-empty"),
        ({"model.safetensors": ""}, "no-config-json"),
        ({"adapter_config.json": "{}"}, "model-is-an-adapter"),
        ({"config.json": "{}"}, "no-model-type"),
        ({"config.json": "{broken"}, "damaged-config"),
        ({"config.json": "[]"}, "damaged-config"),
        ({"config.json": json.dumps({"model_type": "not-yet-invented"})}, "unknown-architecture"),
        ({"config.json": json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "code.Config"}})}, "remote-code"),
    ],
)
def test_folders_that_hold_no_model(files: dict[str, str], code: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)) as error:
        read_spec(tmp_path)
    assert _code(error) == code


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/no/such/folder", "model-folder-missing"),
        ("./checkpoints", "model-folder-missing"),
        ("runs/a/b", "model-folder-missing"),
        ("", "no-model"),
        ("somebody/not-cached", "model-not-found"),
        (__file__, "model-is-a-file"),
    ],
)
def test_names_with_nothing_behind_them(name: str, code: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_spec(name)
    assert _code(error) == code


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"
            "Check your internet connection or see how to run the library in offline mode at 'https://huggingface.co/docs/"
            "transformers/installation#offline-mode'.",
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files",
        ),
        ("nothing at https://a.b/c", "nothing at https://a.b/c"),
        ("no end " * 40, "no end " * 28 + "no ..."),
    ],
)
def test_what_the_hub_says_is_repeated_in_whole_sentences(
    raised: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(raised)

    monkeypatch.setattr("verl_shard.models.source.AutoConfig.from_pretrained", fail)
    with pytest.raises(ConfigError) as error:
        read_spec("nope")
    assert str(error.value) == (
        f"model = nope: not a folder here, and the hub gave no config.json ({said}). Check the name, or the network; or give "
        "a folder."
    )


def test_what_is_no_model_and_tasks_that_are_none(small_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="Give a hub id, a folder"):
        read_spec(42)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='Use one of "causal-lm"'):
        read_spec(small_config("qwen2"), task="chat")
    with pytest.raises(ConfigError, match='no AutoModelForTokenClassification for "olmo2"'):
        read_spec(small_config("olmo2"), task="value")


def test_an_unknown_block_class_and_a_lazy_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="no_split_module_classes = Block: Sequential has no module of that class"):
        read_spec(model, no_split_module_classes=["Block"])
    with pytest.raises(ConfigError, match="weight has no shape yet"):
        read_spec(nn.LazyLinear(2))


@pytest.mark.parametrize("given", ["bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
def test_dtypes_by_all_their_names(given: Any) -> None:
    assert parse_dtype(given) is torch.bfloat16
    assert dtype_name(parse_dtype(given)) == "bfloat16"


@pytest.mark.parametrize("given", ["int8", "bf15", "", torch.int64, 16, None])
def test_what_is_no_dtype_is_refused_with_the_choices(given: Any) -> None:
    with pytest.raises(ConfigError, match='"bfloat16", "bf16"'):
        parse_dtype(given)
