"""A run as it goes: a progress bar with the step, reward, KL, tokens/s and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from verl_shard.common.tables import err
from verl_shard.common.units import format_seconds
from verl_shard.quickstart.model_reward import EXACT

Record = dict[str, Any]

REWARD, LENGTH, THROUGHPUT = "critic/score/mean", "response_length/mean", "perf/throughput"
KLS = ("actor/reward_kl_penalty", "actor/kl_loss")
"""verl's name of the KL to the reference: the first when it is in the reward, the second when it is in the loss."""


def value(record: Record, *names: str) -> float | None:
    """The first of these metrics that the record has."""
    data = record["data"]
    return next((float(data[name]) for name in names if name in data), None)


def is_step(record: Record) -> bool:
    """Whether it is the record of a training step, and not of the validation before the first."""
    return REWARD in record["data"]


def validation_reward(record: Record) -> float | None:
    """The mean validation reward over all rows, where the record has one.

    verl reports one mean for each data_source; with as many rows of each (as the tasks have) their mean is the mean over rows.
    """
    return _mean(record, "reward")


def exact_validation(record: Record) -> float | None:
    """The mean, over the same rows, of the exact reward, where a reward model's is trained on and both are measured."""
    return _mean(record, EXACT)


def _mean(record: Record, variable: str) -> float | None:
    means = [
        float(score)
        for name, score in record["data"].items()
        if name.startswith("val-") and f"/{variable}/mean@" in name
    ]
    return sum(means) / len(means) if means else None


class Watch:
    """Shows the records of a run as they come."""

    def __init__(self, progress: Progress, total: int, first: int) -> None:
        self.progress = progress
        self.task = progress.add_task("starting verl", total=total, completed=first, line="")
        self.started = time.monotonic()
        self.total, self.step_times = total, [0.0]
        self.validation: float | None = None
        self.exact: float | None = None

    def on_record(self, record: Record) -> None:
        validation = validation_reward(record)
        self.validation = self.validation if validation is None else validation
        exact = exact_validation(record)
        self.exact = self.exact if exact is None else exact
        if not is_step(record):
            return
        now = time.monotonic()
        self.step_times = [*self.step_times, now][-20:] if self.step_times[-1] else [now]
        left = self.total - record["step"]
        reward, kl, speed = value(record, REWARD), value(record, *KLS), value(record, THROUGHPUT)
        parts = [
            f"reward {reward:.3f}",
            f"KL {kl:.4f}" if kl is not None else "",
            f"{speed:.0f} tokens/s" if speed else "",
        ]
        if self.validation is not None:
            parts.append(f"validation {self.validation:.3f}")
        if self.exact is not None:
            parts.append(f"exact {self.exact:.3f}")
        if len(self.step_times) > 1:
            pace = (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)
            parts.append(f"{format_seconds(pace * left)} left")
        line = "  ".join(part for part in parts if part)
        self.progress.update(self.task, completed=record["step"], description="training", line=line)
        if not self.progress.console.is_terminal and (record["step"] % 10 == 0 or left == 0):
            # A file or pipe cannot show a bar that moves.
            err.print(f"step {record['step']}/{self.total}  {line}")


@contextmanager
def watching(total: int, first: int) -> Iterator[Watch]:
    """A progress bar on stderr for steps `first` to `total`."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[line]}"),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
        yield Watch(progress, total, first)
