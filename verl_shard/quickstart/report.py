"""What a run came to: a table, a picture, and one plain sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from verl_shard.common.pictures import ACCENT, SOFT, STRONG, new_figure, save_png
from verl_shard.common.tables import table
from verl_shard.quickstart.watch import (
    KLS,
    LENGTH,
    REWARD,
    THROUGHPUT,
    Record,
    exact_validation,
    is_step,
    validation_reward,
    value,
)

WINDOW = 10
"""Steps that the picture's smooth line averages over."""


def validations(records: Sequence[Record]) -> list[tuple[int, float]]:
    """(step, validation reward), in order."""
    return _over_steps(records, validation_reward)


def exact_validations(records: Sequence[Record]) -> list[tuple[int, float]]:
    """(step, exact reward on the same answers), in order, of a run that a reward model scores."""
    return _over_steps(records, exact_validation)


def _over_steps(records: Sequence[Record], read: Callable[[Record], float | None]) -> list[tuple[int, float]]:
    return [(record["step"], score) for record in records if (score := read(record)) is not None]


def summary_table(records: Sequence[Record]) -> Table:
    """First, best and last of what is watched in a run; "first" and "last" are means over up to ten steps."""
    steps = [record for record in records if is_step(record)]
    # In a short run the two must not be the same steps.
    window = max(1, min(WINDOW, len(steps) // 2))
    rows = []
    for name, keys, digits in (
        ("reward", (REWARD,), 3),
        ("KL to the reference", KLS, 4),
        ("response length (tokens)", (LENGTH,), 1),
        ("tokens/s", (THROUGHPUT,), 0),
        ("seconds a step", ("perf/time_per_step",), 2),
    ):
        numbers = [number for record in steps if (number := value(record, *keys)) is not None]
        if numbers:
            first, last = numbers[:window], numbers[-window:]
            means = (sum(first) / len(first), sum(last) / len(last))
            rows.append((name, *(f"{mean:.{digits}f}" for mean in means)))
    exact = exact_validations(records)
    for name, scores in (
        ("validation, reward model's score" if exact else "validation reward", validations(records)),
        ("validation, exact reward", exact),
    ):
        if scores:
            rows.append((name, f"{scores[0][1]:.3f}", f"{scores[-1][1]:.3f}"))
    return table(f"{len(steps)} steps", ("", "first", "last"), rows)


def _count(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def sentence(records: Sequence[Record]) -> str:
    """The run in one sentence: the validation reward before and after; of a reward model its score, and the exact reward."""
    scores, steps = validations(records), sum(map(is_step, records))
    if len(scores) < 2:
        return f"{_count(steps)} ran; the validation reward was measured fewer than two times."
    (first_step, before), (last_step, after) = scores[0], scores[-1]
    ran, exact = _count(last_step - first_step), exact_validations(records)
    if not exact:
        return f"{ran} of RL {_changed('the validation reward', before, after)}."
    model = _changed("the reward model's validation score", before, after)
    return f"{ran} of RL {model}, and {_changed('the exact reward, which it was not trained on,', exact[0][1], exact[-1][1])}."


def _changed(what: str, before: float, after: float) -> str:
    change = after - before
    if change == 0:
        return f"left {what} at {before:.3f}"
    return f"{'raised' if change > 0 else 'lowered'} {what} from {before:.3f} to {after:.3f} ({change:+.3f})"


def draw(records: Sequence[Record], path: Path, title: str) -> None:
    """Reward, KL and response length over the steps, as a PNG. Raises MissingExtraError without matplotlib."""
    steps = [record for record in records if is_step(record)]
    figure = new_figure(12, 3.8, title)
    panels = (("reward", (REWARD,)), ("KL to the reference", KLS), ("response length (tokens)", (LENGTH,)))
    for axes, (label, keys) in zip(figure.subplots(1, 3), panels, strict=True):
        points = [(r["step"], number) for r in steps if (number := value(r, *keys)) is not None]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, color=SOFT, linewidth=1, label="each step")
        smooth = [
            sum(ys[max(0, i - WINDOW + 1) : i + 1]) / len(ys[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(ys))
        ]
        axes.plot(xs, smooth, color=STRONG, linewidth=2, label=f"mean of {WINDOW} steps")
        if label == "reward" and (scores := validations(records)):
            axes.plot(*zip(*scores, strict=True), "o-", color=ACCENT, markersize=4, linewidth=1.5, label="validation")
            if exact := exact_validations(records):
                axes.plot(
                    *zip(*exact, strict=True), "s--", color=ACCENT, markersize=4, linewidth=1, label="exact reward"
                )
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if label == "reward":
            axes.legend(frameon=False, fontsize=8)
    save_png(figure, path)
