"""The quick start's tasks: reasoning-gym generators at a small difficulty, each with worked answers.

The question, the right answer and the verifier are reasoning-gym's own. Ours is only what a warm-up learns from: the steps as
somebody would note them, then the answer, in tags or bare. All worked answers are right, but like text gathered from several
sources they do not all keep to the form: a bare one is worth nothing to the reward, which reads the tags. A task's
`bare_share` says how many are, and that is what reinforcement learning finds to improve within minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

SOURCE = "reasoning_gym/"
"""What the column data_source starts with; the task's name follows."""

INSTRUCTION = "Work step by step and end with <answer>the answer</answer>"
"""The system message: the form in which the reward finds the answer."""

Entry = dict[str, Any]
"""What a reasoning-gym data set yields: question, answer and metadata."""


@dataclass(frozen=True)
class Task:
    """One generator of reasoning-gym.

    name: as reasoning-gym registers it.
    ability: verl's column of that name.
    settings: what the generator's configuration is given besides seed and size.
    working: the steps between an entry's question and its answer; none when it can be read off.
    bare_share: the share of its worked answers that give the answer without tags.
    """

    name: str
    ability: str
    settings: dict[str, Any]
    working: Callable[[Entry], list[str]]
    bare_share: float

    def entries(self, seed: int) -> Iterator[Entry]:
        """Entries without end, the same for a seed, as they are after JSON: so a verifier in another process sees them."""
        import reasoning_gym

        entries = reasoning_gym.create_dataset(self.name, seed=seed, size=2**31, **self.settings)
        for index in range(2**31):
            yield json.loads(json.dumps(entries[index]))


def _read_off(entry: Entry) -> list[str]:
    return []


def _gcd_steps(entry: Entry) -> list[str]:
    """12 and 9: "9,3". Euclid's pairs, until the second divides the first."""
    a, b = sorted(entry["metadata"]["numbers"], reverse=True)
    steps = []
    while a % b:
        a, b = b, a % b
        steps.append(f"{a},{b}")
    return steps


def _leg_steps(entry: Entry) -> list[str]:
    """2 cats and 3 bees: "2*4+3*6", "8+18"."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    counts = [(count, ANIMALS[animal]) for animal, count in entry["metadata"]["animals"].items()]
    steps = ["+".join(f"{count}*{legs}" for count, legs in counts)]
    if len(counts) > 1:
        steps.append("+".join(str(count * legs) for count, legs in counts))
    return steps


TASKS: tuple[Task, ...] = (
    Task("gcd", "number theory", {"min_value": 1, "max_value": 15}, _gcd_steps, 0.75),
    Task("leg_counting", "counting", {"min_animals": 1, "max_animals": 2, "max_instances": 3}, _leg_steps, 0.25),
    Task("spell_backward", "spelling", {"min_word_len": 3, "max_word_len": 5}, _read_off, 0.75),
)


@cache
def verifier(task: str) -> Callable[[str | None, Entry], float]:
    """reasoning-gym's own score_answer of a task; made once, since making a data set may read word lists."""
    import reasoning_gym

    score: Callable[[str | None, Entry], float] = reasoning_gym.get_score_answer_fn(task)
    return score


def worked_answer(task: Task, entry: Entry, *, bare: bool = False) -> str:
    """The right answer of an entry with its working; `bare` leaves out the tags that the reward reads."""
    steps = task.working(entry)
    if bare:
        return "; ".join([*steps, entry["answer"]])
    answer = f"<answer>{entry['answer']}</answer>"
    return f"{'; '.join(steps)} {answer}" if steps else answer


def task_of(data_source: str) -> Task:
    """The task that a row's data_source names."""
    return next(task for task in TASKS if SOURCE + task.name == data_source)
