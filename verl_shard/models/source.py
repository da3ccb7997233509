"""From a hub id or a folder to a configuration, without reading a weight."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

from transformers import AutoConfig, PretrainedConfig

from verl_shard.common.errors import config_error

HUB_KEYS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Keywords of `from_pretrained` that say where files come from; they hold for the config and for the weights."""

_WHERE = "model"
_FIX = "Give a hub id, or a folder that save_pretrained wrote"
_LONGEST = 200
"""Characters of a library's message that ours repeats."""


def read_config(model: str | os.PathLike[str], *, trust_remote_code: bool = False, **hub: Any) -> PretrainedConfig:
    """The configuration behind a hub id or a folder. Of a folder only config.json is read.

    hub: what `from_pretrained` takes to find files, the keys in HUB_KEYS.
    Raises ConfigError for a folder that is missing, empty or without config.json, for a damaged config.json, for an
    architecture that this transformers does not know, and for a hub id that cannot be reached.
    """
    name = os.fspath(model)
    _check_folder(name, str(hub.get("subfolder", "")))
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _explain(name, error)
    assert isinstance(config, PretrainedConfig)
    return config


def _check_folder(name: str, subfolder: str) -> None:
    path = Path(name).expanduser()
    if not name.strip():
        raise config_error("no-model", _WHERE, repr(name), "no model is named", _FIX)
    if path.is_file():
        raise config_error("model-is-a-file", _WHERE, name, "a file, not a folder", f"Name its folder: {path.parent}")
    if not path.is_dir():
        if _is_path(name):
            raise config_error("model-folder-missing", _WHERE, name, "there is no such folder", _FIX)
        return
    folder = path / subfolder
    if folder.is_dir() and (folder / "config.json").is_file():
        return
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if not held:
        raise config_error("model-folder-empty", _WHERE, folder, "the folder is empty", _FIX)
    if "adapter_config.json" in held:
        fix = "Give the base model here and load the adapter over it with peft"
        raise config_error("model-is-an-adapter", _WHERE, folder, "it holds a PEFT adapter and no config.json", fix)
    shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
    why = f"the folder has no config.json, only {shown}"
    raise config_error("no-config-json", _WHERE, folder, why, _FIX)


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/") or "\\" in name


def _explain(name: str, error: Exception) -> NoReturn:
    text = " ".join(str(error).split())
    said = _first_sentence(text)
    if "trust_remote_code" in text:
        fix = "Read that code first; when you trust it, pass trust_remote_code=True"
        raise config_error("remote-code", _WHERE, name, "the model brings code of its own", fix) from error
    if not Path(name).expanduser().is_dir():
        why = f"not a folder here, and the hub gave no config.json ({said})"
        raise config_error(
            "model-not-found", _WHERE, name, why, "Check the name, or the network; or give a folder"
        ) from error
    if isinstance(error, ValueError) and "model type" in text:
        fix = "Update transformers, or give a model of an architecture that it knows"
        raise config_error("unknown-architecture", _WHERE, name, said, fix) from error
    if isinstance(error, ValueError) and "model_type" in text:
        fix = 'Add "model_type" to its config.json, for example "model_type": "qwen2"'
        raise config_error("no-model-type", _WHERE, name, 'its config.json names no "model_type"', fix) from error
    why = f"its config.json cannot be read ({said})"
    raise config_error("damaged-config", _WHERE, name, why, "Write it again with config.save_pretrained") from error


def _first_sentence(text: str) -> str:
    """What it says first, whole and without its full stop; one that is very long ends between two words."""
    first = re.split(r"[.!?](?:\s+(?=[A-Z\"'])|$)", text, maxsplit=1)[0]
    return first if len(first) <= _LONGEST else first[: first.rfind(" ", 0, _LONGEST)] + " ..."
