"""What every bench ends with: its tables, and a record that says what was measured where, when and with which command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_shard.common.files import write_whole
from verl_shard.common.tables import out

_COMMAND = "verl-shard"


def machine() -> dict[str, Any]:
    """What figures of this process are measured on: CPUs, GPUs by name, and versions."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = {name: _version(name) for name in ("verl", "torch", "transformers", "accelerate", "ray")}
    return {"cpus": os.cpu_count(), "gpus": gpus, "python": platform.python_version(), "packages": packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def typed() -> str:
    """The command as it was typed, or as it would be on the PATH; empty in a process of another program."""
    began = Path(sys.argv[0])
    ours = began.name == _COMMAND or began.parts[-2:] == ("verl_shard", "__main__.py")
    return shlex.join([_COMMAND, *sys.argv[1:]]) if ours else ""


def tell(
    schema: str,
    content: Mapping[str, Any],
    shown: Iterable[Any],
    *,
    result: Path | None = None,
    as_json: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Prints tables and sentences, or with `as_json` the record instead, and writes it as JSON when `result` is given.

    The record is the content behind its schema, the date, the command and the machine. facts: of the machine, where it is not
    as this process sees it.
    """
    where = machine() if facts is None else dict(facts)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    record = {"schema": schema, "date": date, "command": typed(), "machine": where, **content}
    text = json.dumps(record, indent=1, default=str) + "\n"
    if as_json:
        print(text, end="")
    else:
        for each in shown:
            out.print(each, markup=False)
    if result is not None:
        write_whole(result, text)
