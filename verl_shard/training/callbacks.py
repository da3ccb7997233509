"""What hears of a run as it goes: callbacks, and a line of progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from verl_shard.common.errors import config_error
from verl_shard.common.tables import err

Metrics = Mapping[str, Any]
EVENTS = ("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end")
"""on_step_end(trainer, step, metrics), on_evaluate(trainer, step, metrics), on_save(trainer, step, folder); the other two
take the trainer."""


class Callbacks:
    """Callbacks by event. A callback is an object with some of the EVENTS as methods; a function is an on_step_end."""

    def __init__(self, given: Sequence[Any]) -> None:
        """Raises ConfigError for one that is neither."""
        self._by_event: dict[str, list[Any]] = {event: [] for event in EVENTS}
        for index, item in enumerate(given):
            methods = [event for event in EVENTS if callable(getattr(item, event, None))]
            for event in methods:
                self._by_event[event].append(getattr(item, event))
            if not methods:
                if not callable(item):
                    why = f"it has none of {', '.join(EVENTS)}, and is no function"
                    fix = "Give an object with one of these methods, or a function of (trainer, step, metrics)"
                    raise config_error("not-a-callback", f"callbacks[{index}]", type(item).__name__, why, fix)
                self._by_event["on_step_end"].append(item)

    def tell(self, event: str, *arguments: Any) -> None:
        """Calls everything that listens for an event."""
        for call in self._by_event[event]:
            call(*arguments)


def is_validation(metrics: Metrics) -> bool:
    """Whether metrics have those of a validation among them."""
    return any(name.startswith("val-") for name in metrics)


class Line:
    """The progress of a run: the step, reward, KL and response length."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, shown="starting")

    def show(self, step: int, metrics: Metrics) -> None:
        """Shows the metrics of a step."""
        parts = []
        kl = metrics.get("actor/reward_kl_penalty", metrics.get("actor/kl_loss"))
        values = (
            ("reward", metrics.get("critic/score/mean")),
            ("KL", kl),
            ("length", metrics.get("response_length/mean")),
        )
        parts = [f"{name} {value:.3g}" for name, value in values if value is not None]
        self._progress.update(self._task, completed=step, shown="  ".join(parts))


@contextmanager
def progress_line(total: int, *, shown: bool) -> Iterator[Line]:
    """A line on stderr, where that is a terminal."""
    columns = (
        TextColumn("PPO"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}  {task.fields[shown]}"),
    )
    with Progress(*columns, console=err, transient=True, disable=not (shown and err.is_terminal)) as progress:
        yield Line(progress, total)
