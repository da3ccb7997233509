"""NVIDIA's management library: opened for a question, closed after it, with a clear answer where there is none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from verl_shard.common.errors import config_error

T = TypeVar("T")


@contextmanager
def nvml() -> Iterator[Any]:
    """The module `pynvml`, started. Raises ConfigError without the package, the driver or the right to ask it."""
    try:
        module = importlib.import_module("pynvml")
    except ImportError:
        why = "the package that asks NVIDIA's driver is not installed"
        raise config_error("no-nvml", "gpus", None, why, "pip install nvidia-ml-py") from None
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        why = f"NVIDIA's driver does not answer on this machine ({_text(error)})"
        fix = "Look where the GPUs are; in a container, start it with its GPUs (docker run --gpus all)"
        raise config_error("no-driver", "gpus", None, why, fix) from None
    try:
        yield module
    finally:
        module.nvmlShutdown()


def asked(module: Any, question: Callable[[], T]) -> T | None:
    """The answer, or None where this GPU or this user gets none (utilisation of a MIG slice, a fan that is not there)."""
    try:
        return question()
    except module.NVMLError:
        return None


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
