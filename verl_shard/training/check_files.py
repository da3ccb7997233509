"""Data files that a runner is to open, looked at before it is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from verl_shard.common.errors import ConfigError, Finding


def check_files(files: Sequence[Path], flag: str, *, only_parquet: bool = False) -> None:
    """Raises ConfigError, with the faults of all, unless each holds rows that verl reads: parquet, or JSON by its name.

    only_parquet: whatever the name, as the local runner reads them. A file that is not here is not looked at, but for its name.
    """
    faults = [fault for path in files if (fault := _fault(path, flag, only_parquet=only_parquet)) is not None]
    if faults:
        raise ConfigError(faults)


def _fault(path: Path, flag: str, *, only_parquet: bool) -> Finding | None:
    kinds = "a parquet file" if only_parquet else "a parquet, JSON or JSON lines file"
    parquet = only_parquet or path.suffix == ".parquet"
    code, why = "not-data", None
    if not parquet and path.suffix not in (".json", ".jsonl"):
        why = "verl reads files whose names end in .parquet, .json or .jsonl"
    elif path.is_dir():
        why = "it is a folder"
    elif path.is_file() and (wrong := _wrong_parquet(path) if parquet else _wrong_json(path)) is not None:
        code, why = wrong
    if why is None:
        return None
    return Finding("error", code, flag, str(path), why, f"Name {kinds} with a prompt in each row")


def _wrong_parquet(path: Path) -> tuple[str, str] | None:
    """Code and words for what is wrong. Of a large file only its end is read, which says what is in it."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return None if file.metadata.num_rows else ("no-rows", "it has no rows")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as error:
        return "not-parquet", f"it cannot be read as parquet ({str(error).splitlines()[0].rstrip('. ')})"


def _wrong_json(path: Path) -> tuple[str, str] | None:
    """As _wrong_parquet, of an object on each line, or of one text with all of them."""
    empty = True
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                empty = False
                try:
                    row = json.loads(line)
                except ValueError as error:
                    found = f"line {number}: {error}"
                    break
                if not isinstance(row, dict):
                    found = f"line {number} is no object"
                    break
            else:
                return ("no-rows", "it has no rows") if empty else None
        whole = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        return "not-json", f"it cannot be read as JSON ({error})"
    except OSError as error:
        return "not-json", f"it cannot be read ({error.strerror})"
    except ValueError:
        return "not-json", f"it cannot be read as JSON ({found})"
    if whole == [] or whole == {}:
        return "no-rows", "it has no rows"
    fine = isinstance(whole, dict) or (isinstance(whole, list) and all(isinstance(row, dict) for row in whole))
    return None if fine else ("not-json", f"it holds no list of objects ({found})")
