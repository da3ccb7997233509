"""Right and wrong answers to the tasks' questions: what the demo reward model learns to tell apart."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from verl_shard.training.data_tasks import Entry, Task, worked_answer

WORKED = 0.7
"""The share of answers in tags that show their working; the reward does not ask for it."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Answers:
    """Answers to one question. wrong: each with its kind, a key of KINDS."""

    right: str
    wrong: tuple[tuple[str, str], ...]


def make_answers(task: Task, entry: Entry, chance: random.Random, n: int) -> Answers:
    """A right answer to an entry, with its working or without, and n wrong ones, of kinds as KINDS weighs them."""
    right = worked_answer(task, entry) if chance.random() < WORKED else _tagged(entry["answer"])
    kinds = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=n)
    return Answers(right, tuple((kind, KINDS[kind][1](task, entry, chance)) for kind in kinds))


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _untagged(task: Task, entry: Entry, chance: random.Random) -> str:
    """Right, but in no tags: half of what the warm-up teaches, and worth nothing."""
    return worked_answer(task, entry, bare=True)


def _wrong_untagged(task: Task, entry: Entry, chance: random.Random) -> str:
    return worked_answer(task, {**entry, "answer": _near(entry["answer"], chance)}, bare=True)


def _slip(task: Task, entry: Entry, chance: random.Random) -> str:
    """Right up to the answer, if it works at all."""
    wrong = _near(entry["answer"], chance)
    return worked_answer(task, {**entry, "answer": wrong}) if chance.random() < WORKED else _tagged(wrong)


def _misread(task: Task, entry: Entry, chance: random.Random) -> str:
    """The right answer to a question much like this one."""
    other = copy.deepcopy(entry)
    while _same(other["answer"], entry["answer"]):
        # Of 1 and 1 both must be misread.
        _MISREAD[task.name](other, chance)
    return worked_answer(task, other)


def _broken(task: Task, entry: Entry, chance: random.Random) -> str:
    """A right answer whose tags are broken, empty, or cut off."""
    answer, whole = entry["answer"], worked_answer(task, entry)
    opening = whole.index("<answer>")
    return chance.choice(
        [
            whole.removesuffix("</answer>"),
            whole.replace("<answer>", ""),
            whole.replace("</answer>", "<answer>"),
            whole[:opening] + f"</answer>{answer}<answer>",
            whole[:opening] + _tagged(""),
            whole + _tagged(""),
            whole[: chance.randrange(opening, len(whole) - 1)],
        ]
    )


def _stammered(task: Task, entry: Entry, chance: random.Random) -> str:
    """Something over and over: the opening tag, or a piece of a wrong answer. A policy soon finds out that this is liked,
    if the model that scores it has never seen it."""
    if chance.random() < 0.5:
        text = worked_answer(task, entry) if chance.random() < WORKED else _tagged(entry["answer"])
        return text.replace("<answer>", "<answer>" * chance.randint(2, 8))
    text, times = _slip(task, entry, chance), chance.randint(2, 6)
    opening = text.index("<answer>")
    if opening and chance.random() < 0.5:
        at = chance.randrange(opening)
        return text[:at] + text[at] * times + text[at + 1 :]
    repeated = chance.choice(entry["answer"]) * times
    return text[:opening] + _tagged(repeated * 2 if _same(repeated, entry["answer"]) else repeated)


def _empty(task: Task, entry: Entry, chance: random.Random) -> str:
    return ""


KINDS: dict[str, tuple[float, Callable[[Task, Entry, random.Random], str]]] = {
    "no tags": (0.18, _untagged),
    "wrong and no tags": (0.06, _wrong_untagged),
    "wrong": (0.36, _slip),
    "misread": (0.18, _misread),
    "broken tags": (0.08, _broken),
    "stammered": (0.1, _stammered),
    "empty": (0.04, _empty),
}
"""The kinds of wrong answers that the warmed-up policy gives: each one's share, and what makes it."""


def _near(answer: str, chance: random.Random) -> str:
    """A number or a word that is close to the answer and is not it."""
    wrong = answer
    while _same(wrong, answer):
        if answer.isdigit():
            number = int(answer)
            wrong = str(
                max(0, chance.choice([number + chance.choice([-6, -4, -3, -2, -1, 1, 2, 3, 4, 6]),
                                      chance.randint(1, 40), int(answer[::-1])]))
            )  # fmt: skip
        else:
            wrong = chance.choice([_swapped, _dropped, _replaced, _garbled, _guessed, _turned])(answer, chance)
    return wrong


def _same(one: str, other: str) -> bool:
    """The verifiers take capitals for small letters."""
    return one.lower() == other.lower()


def _swapped(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word) - 1)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _dropped(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word))
    return word[:at] + word[at + 1 :]


def _replaced(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word))
    return word[:at] + chance.choice(_LETTERS) + word[at + 1 :]


def _garbled(word: str, chance: random.Random) -> str:
    """Its beginning, then letters as they come."""
    kept = chance.randrange(len(word))
    return word[:kept] + "".join(chance.choice(word + _LETTERS) for _ in word[kept:])


def _guessed(word: str, chance: random.Random) -> str:
    """One to three letters, as of a policy that knows no more than that letters are asked for."""
    return "".join(chance.choice(word) for _ in range(chance.randint(1, 3)))


def _turned(word: str, chance: random.Random) -> str:
    return word[::-1]


def _misread_numbers(entry: Entry, chance: random.Random) -> None:
    numbers = entry["metadata"]["numbers"]
    at = chance.randrange(len(numbers))
    numbers[at] = chance.randint(1, 15)
    entry["answer"] = str(math.gcd(*numbers))


def _misread_animals(entry: Entry, chance: random.Random) -> None:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    animals = entry["metadata"]["animals"]
    name = chance.choice(list(animals))
    if chance.random() < 0.5:
        animals[name] = chance.randint(1, 3)
    else:
        # One animal taken for another: its legs are what is hard to know.
        animals = {chance.choice(list(ANIMALS)) if animal == name else animal: n for animal, n in animals.items()}
        entry["metadata"]["animals"] = animals
    entry["answer"] = str(sum(count * ANIMALS[animal] for animal, count in animals.items()))


def _misread_word(entry: Entry, chance: random.Random) -> None:
    entry["answer"] = _near(entry["answer"], chance)


_MISREAD: dict[str, Callable[[Entry, random.Random], None]] = {
    "gcd": _misread_numbers,
    "leg_counting": _misread_animals,
    "spell_backward": _misread_word,
}
