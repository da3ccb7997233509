"""Training data as people bring it, written as the parquet files that verl reads: the same for both runners."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Faults, Finding, config_error
from verl_shard.common.notices import notice
from verl_shard.config.data_files import HELD_OUT, DataFiles, hold_out
from verl_shard.training.data_of_tasks import write_data
from verl_shard.training.rewards import MESSAGES

Row = dict[str, Any]

QUICKSTART_ROWS = (1024, 64)


def read_rows(given: Any, where: str) -> list[Row]:
    """Rows in verl's columns from a parquet file (or several), a Dataset, or a list of prompts, conversations or rows.

    A row has a prompt, a text or a list of messages, and may have data_source, ground_truth (or reward_model) and
    extra_info. Raises ConfigError for what is none of these, with the first row that is wrong.
    """
    if isinstance(given, str | Path):
        rows: list[Any] = _read_parquet(Path(given), where)
    elif isinstance(given, list) and given and all(isinstance(x, Path) or str(x).endswith(".parquet") for x in given):
        rows = [row for path in given for row in _read_parquet(Path(path), where)]
    elif isinstance(given, Iterable) and not isinstance(given, Mapping):
        rows = list(given)
    else:
        fix = "Give a parquet file, a Dataset, or a list of prompts"
        raise config_error("not-data", where, type(given).__name__, "not something to train on", fix)
    if not rows:
        raise config_error("no-rows", where, None, "there are no rows", "Give some prompts")
    made = [_row(row, index, where) for index, row in enumerate(rows)]
    if faults := [row for row in made if isinstance(row, Finding)]:
        more = f" (and {len(faults) - 1} more rows)" if len(faults) > 1 else ""
        first = faults[0]
        raise ConfigError(Finding("error", first.code, first.where, first.given, first.why + more, first.fix))
    return [row for row in made if not isinstance(row, Finding)]


def read_given(train: Any, val: Any) -> tuple[list[Row] | None, list[Row] | None]:
    """(training rows, validation rows) as they were given, None where nothing was. Raises ConfigError with the faults of both."""
    faults = Faults()
    rows: list[Row] | None = None
    held: list[Row] | None = None
    with faults.gathering():
        rows = None if train is None else read_rows(train, "train_data")
    with faults.gathering():
        held = None if val is None else read_rows(val, "val_data")
    faults.check()
    return rows, held


def complete_rows(rows: list[Row] | None, held: list[Row] | None, *, seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, validation rows) of what `read_given` found. Without validation rows a tenth is held out; without
    training rows the quick start's tasks are taken, which a notice says."""
    if rows is None:
        notice(
            "quickstart-data", "train_data", None, "no data is given", "prompts of the quick start's reasoning tasks"
        )
        with tempfile.TemporaryDirectory(prefix="verl_shard_data_") as folder:
            made = write_data(Path(folder), seed=seed, n_train=QUICKSTART_ROWS[0], n_val=QUICKSTART_ROWS[1])
            return read_rows(made.train, "train_data"), read_rows(made.val, "val_data") if held is None else held
    return (rows, held) if held is not None else _hold_out(rows, seed)


def write_rows(rows: list[Row], held: list[Row], folder: Path) -> DataFiles:
    """Writes train.parquet and val.parquet, unless they are there: a run that goes on has its prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    files = DataFiles(folder / "train.parquet", folder / "val.parquet")
    for path, part in ((files.train, rows), (files.val, held)):
        if not path.is_file():
            _write(path, part)
    return files


def check_rows(rows: list[Row], tokenizer: Any, *, longest: int | None, where: str) -> int:
    """The tokens of the longest prompt under the chat template. Raises ConfigError for prompts longer than `longest`."""
    if tokenizer.chat_template is None:
        why = "its tokenizer has no chat template, and prompts are lists of messages"
        raise config_error(
            "no-chat-template", "actor_model", None, why, "Set one and save the tokenizer with the model"
        )
    texts = tokenizer.apply_chat_template([row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False)
    lengths = [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    if longest is not None and max(lengths) > longest:
        over = sum(length > longest for length in lengths)
        why = f"{over} of {len(lengths)} prompts of {where} are longer, the longest has {max(lengths)} tokens"
        fix = f"Give {max(lengths)} or more, or take the long prompts out of the data"
        raise config_error("prompts-too-long", "ppo_config['max_prompt_length']", longest, why, fix)
    return max(lengths)


def _row(given: Any, index: int, where: str) -> Row | Finding:
    row: Mapping[str, Any] = given if isinstance(given, Mapping) else {"prompt": given}
    prompt = row.get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    right = isinstance(messages, list | tuple) and messages and all(_is_message(message) for message in messages)
    if not right:
        has = (
            f"it has {', '.join(map(str, row))}"
            if prompt is None and isinstance(given, Mapping)
            else f"it is {prompt!r}"
        )
        why = f"its prompt is neither a text nor a list of messages with role and content ({has[:200]})"
        return Finding("error", "bad-row", f"{where}[{index}]", "", why, 'Write {"prompt": ...}, or a text')
    truth = row.get("reward_model")
    truth = truth.get("ground_truth") if isinstance(truth, Mapping) else row.get("ground_truth")
    assert messages is not None
    plain = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
    extra = {"index": index, **dict(row.get("extra_info") or {}), MESSAGES: json.dumps(plain)}
    return {
        "data_source": str(row.get("data_source") or "prompts"),
        "prompt": plain,
        "reward_model": {"style": "rule", "ground_truth": "" if truth is None else truth},
        "extra_info": extra,
    }


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _hold_out(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    if len(rows) < 1 / HELD_OUT:
        notice("no-held-out", "val_data", None, f"{len(rows)} rows are too few to hold some out", "the training rows")
        return rows, rows
    kept, held = hold_out(len(rows), seed)
    return [rows[i] for i in kept], [rows[i] for i in held]


def _read_parquet(path: Path, where: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        fix = "Name a parquet file, or give a list of prompts"
        raise config_error("no-data-file", where, path, "there is no such file", fix)
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as error:
        why = f"it cannot be read as parquet ({str(error).splitlines()[0]})"
        raise config_error("not-parquet", where, path, why, "Write it with pandas' to_parquet, for example") from error
    return rows


def _write(path: Path, rows: list[Row]) -> None:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        why = f"its values do not make a table ({str(error).splitlines()[0]})"
        fix = "Let each column hold one kind of value: ground_truth texts only, or numbers only"
        raise config_error("mixed-columns", "train_data", None, why, fix) from error
    pyarrow.parquet.write_table(table, path)
