"""Which of a scoring model's outputs is the score, and how the scores of steps become one: from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_shard.common.errors import Faults, config_error
from verl_shard.models.meta import Task, config_for, parse_task, task_of
from verl_shard.runtime.scoring_inputs import AGGREGATES

TASKS = ("reward", "process-reward")


@dataclass(frozen=True)
class Outputs:
    """task: one of TASKS. label: the index of the output that is the score. aggregate: of the scores of steps."""

    task: Task
    label: int
    aggregate: str


def choose_outputs(
    path: str,
    config: Any,
    *,
    task: str | None = None,
    label: int | str | None = None,
    aggregate: str | None = None,
    separator: str | None = None,
    step_mark: str | None = None,
) -> Outputs:
    """What ScoringModel says of its arguments of these names. path: of the model, for messages.

    Raises ConfigError with every fault: of a task that gives no score, of what a model of whole responses has no use for, and
    of a label that is not there or not told apart.
    """
    faults = Faults()
    chosen: Task = "other"
    with faults.gathering():
        chosen = parse_task(task) or ("process-reward" if task_of(config) in ("value", "process-reward") else "reward")
        if chosen not in TASKS:
            raise config_error("unknown-task", "task", chosen, "it gives no score", f"Use one of {', '.join(TASKS)}")
    faults.check()
    for name, value in {"aggregate": aggregate, "separator": separator, "step_mark": step_mark}.items():
        with faults.gathering():
            if value is not None and chosen != "process-reward":
                why = f"{path} scores whole responses; only a token classifier scores steps"
                raise config_error("no-effect", name, repr(value), why, "Leave it out")
    with faults.gathering():
        if aggregate is not None and aggregate not in AGGREGATES:
            fix = f"Use one of {', '.join(AGGREGATES)}"
            raise config_error("unknown-aggregate", "aggregate", aggregate, "no such aggregate", fix)
    index = 0
    with faults.gathering():
        made = config_for(config, chosen)
        index = _choose_label(path, chosen, label, made)
        if made.num_labels == 1 and chosen == "process-reward" and aggregate == "product":
            why = f"{path} gives each step one unbounded number, no probability"
            raise config_error("product-of-logits", "aggregate", "product", why, "Use min, last or mean")
    faults.check()
    return Outputs(chosen, index, aggregate or "min")


def _choose_label(path: str, task: Task, label: int | str | None, config: Any) -> int:
    """The index of the output that is the score."""
    count, names = int(config.num_labels), dict(config.label2id or {})
    listed = ", ".join(f"{index} ({name})" for name, index in sorted(names.items(), key=lambda item: item[1]))
    if label is None and count > (1 if task == "reward" else 2):
        why = f"{path} has {count} outputs, {listed}, and none is said to be the score"
        raise config_error("which-label", "label", None, why, "Give label= with the one that means good")
    chosen = label if label is not None else count - 1
    found = names.get(chosen) if isinstance(chosen, str) else chosen
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < count:
        why = f"{path} has {listed or f'{count} outputs'}"
        raise config_error("unknown-label", "label", label, why, "Give the index or name of one of these")
    return found
