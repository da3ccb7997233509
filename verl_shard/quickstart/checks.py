"""What a user brings to the quick start, a model or data, looked at before anything is made or loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tekken.json",
)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_model(path: str | Path) -> None:
    """Raises ConfigError, with all faults, unless `path` is a folder of a model that transformers loads, or may be a hub id.

    What is no folder but looks like an id, "name" or "organisation/name", is left to `check_loads`.
    """
    folder = Path(path).expanduser()
    if str(path) and folder.is_dir():
        faults = folder_faults(folder, "--model")
    elif folder.is_file():
        faults = [_fault("not-a-folder", "--model", path, "it is a file", "Name the folder that the file is in")]
    elif _HUB_ID.fullmatch(str(path)):
        faults = []
    else:
        fix = "Name a folder that is there, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
        faults = [_fault("no-model-folder", "--model", path, "there is no such folder, and it is no hub id", fix)]
    if faults:
        raise ConfigError(faults)


def check_loads(path: str | Path) -> None:
    """Raises ConfigError unless the configuration and the tokenizer that are behind a folder or hub id can be read, and are a
    causal language model's. Of a hub id this fetches both, and no weights."""
    from transformers import AutoTokenizer

    from verl_shard.training.models import check_model as check_role

    where = "--model"
    name = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else str(path)
    try:
        check_role("actor", name)
    except ConfigError as error:
        raise ConfigError(replace(finding, where=where) for finding in error.findings) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # its Rust half raises that very class for a damaged file
        why = f"its tokenizer cannot be read ({' '.join(str(error).split())[:200].rstrip('. ')})"
        raise ConfigError(
            _fault("no-tokenizer", where, path, why, "Save the tokenizer there with save_pretrained")
        ) from error
    if tokenizer.chat_template is None:
        why = "its tokenizer has no chat template, and prompts are lists of messages"
        fix = "Set tokenizer.chat_template and save the tokenizer there, or take the model's chat version"
        raise ConfigError(_fault("no-chat-template", where, path, why, fix))


def check_data(files: Sequence[Path]) -> None:
    """Raises ConfigError, with the faults of all files, unless each is a parquet file with rows in verl's columns.

    Needed are data_source (text), prompt (a list of messages with role and content) and reward_model.ground_truth.
    """
    faults = [fault for path in files for fault in _file_faults(Path(path))]
    if not files:
        faults = [_fault("no-data", "--data", "", "no file is given", "Name a parquet file")]
    if faults:
        raise ConfigError(faults)


def folder_faults(folder: Path, where: str, *, needs_template: bool = True) -> list[Finding]:
    """What a folder lacks to be a model's with its tokenizer. where: the flag that names it."""
    if not any(folder.iterdir()):
        why, fix = "the folder is empty", "Save a model and its tokenizer there"
        return [_fault("empty-model-folder", where, folder, why, fix)]
    faults = []
    config = folder / "config.json"
    if not config.is_file():
        fix = "Save the model there with save_pretrained, which writes it"
        faults.append(_fault("no-model-config", where, folder, "it has no config.json", fix))
    elif not isinstance(_json(config), dict):
        faults.append(
            _fault("bad-model-config", where, folder, "its config.json is not a JSON object", "Save it again")
        )
    if not _any_file(folder, _TOKENIZERS):
        why = f"it has no tokenizer (none of {', '.join(_TOKENIZERS)})"
        faults.append(_fault("no-tokenizer", where, folder, why, "Save the tokenizer there with save_pretrained"))
    elif needs_template and not _has_chat_template(folder):
        why = "its tokenizer has no chat template, and prompts are lists of messages"
        fix = "Set tokenizer.chat_template and save the tokenizer there, or take the model's chat version"
        faults.append(_fault("no-chat-template", where, folder, why, fix))
    if not _any_file(folder, _WEIGHTS):
        why = f"it has no weights (none of {', '.join(_WEIGHTS)})"
        faults.append(_fault("no-weights", where, folder, why, "Save the model there with save_pretrained"))
    return faults


def _any_file(folder: Path, patterns: Sequence[str]) -> bool:
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


def _has_chat_template(folder: Path) -> bool:
    if _any_file(folder, ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")):
        return True
    # Mistral's own tokenizer file holds its template.
    settings = _json(folder / "tokenizer_config.json")
    return (folder / "tekken.json").is_file() or (isinstance(settings, dict) and bool(settings.get("chat_template")))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _file_faults(path: Path) -> list[Finding]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        why = "it is a folder" if path.is_dir() else "there is no such file"
        return [_fault("no-data-file", "--data", path, why, "Name a parquet file that is there")]
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as error:
        why = f"it cannot be read as parquet ({str(error).splitlines()[0]})"
        return [_fault("not-parquet", "--data", path, why, "Write it with pandas' to_parquet, for example")]
    if table.num_rows == 0:
        return [_fault("no-rows", "--data", path, "it has no rows", "Name a file with data")]
    faults = []
    for column, wanted, is_right in _COLUMNS:
        if column not in table.column_names:
            why = f"it has no column {column} (it has {', '.join(table.column_names)})"
            faults.append(_fault("missing-column", "--data", path, why, f"Add the column: {wanted}"))
            continue
        wrong = [index for index, value in enumerate(table.column(column).to_pylist()) if not is_right(value)]
        if wrong:
            why = f"in {len(wrong)} of {table.num_rows} rows {column} is not {wanted}, first in row {wrong[0]}"
            faults.append(_fault("bad-column", "--data", path, why, "Mend these rows or take them out"))
    return faults


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and isinstance(value.get("content"), str | list)


def _has_ground_truth(value: Any) -> bool:
    return isinstance(value, dict) and value.get("ground_truth") is not None


_COLUMNS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("data_source", "text that names where the row is from", _is_text),
    ("prompt", "a list of messages, each with role and content", _is_messages),
    ("reward_model", "a struct with the field ground_truth", _has_ground_truth),
)


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(given), why, fix)
