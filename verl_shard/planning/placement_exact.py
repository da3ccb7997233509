"""The placement search by enumeration: every way to share roles out into sets, and every count of GPUs for each set.

Here a role is a number, a set of roles an int with their bits, and a set on a count of GPUs a Column. What does not fit
has been left out before (by `least_overrun`), so that only seconds and GPUs are left to compare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

TIE = 1e-5
"""Two steps whose seconds differ by less than this share take equally long."""


@dataclass(frozen=True, slots=True)
class Column:
    """A set of roles on a count of GPUs.

    members: bit i is role i. seconds: by stage, the sum over its roles. overrun: bytes that a GPU of it lacks.
    position: the sum over its roles of their place in the order of roles, times the GPUs.
    """

    members: int
    n_gpus: int
    seconds: tuple[float, ...]
    overrun: int = 0
    position: int = 0


Choice = tuple[Column, ...]
"""One Column for each set of a partition of all roles."""


def step_seconds(choice: Sequence[Column]) -> float:
    """The sum over stages of the slowest set's seconds."""
    return float(sum(max(stage) for stage in zip(*(column.seconds for column in choice), strict=True)))


def partition_of(choice: Choice) -> tuple[int, ...]:
    """Its sets, the one with the first role first."""
    return tuple(column.members for column in choice)


def by_set(columns: Iterable[Column]) -> dict[int, list[Column]]:
    """The columns of each set, those with fewer GPUs first."""
    found: dict[int, list[Column]] = {}
    for column in columns:
        found.setdefault(column.members, []).append(column)
    return {members: sorted(own, key=lambda column: column.n_gpus) for members, own in found.items()}


def partitions(roles: int, usable: Collection[int]) -> Iterator[tuple[int, ...]]:
    """Every way to share out `roles` into sets of `usable`; larger first sets come first, and each way comes once."""
    if not roles:
        yield ()
        return
    first = roles & -roles
    rest = others = roles ^ first
    while True:
        if (members := first | others) in usable:
            for more in partitions(roles ^ members, usable):
                yield (members, *more)
        if not others:
            return
        others = (others - 1) & rest


def fewest_gpus(columns: Iterable[Column], roles: int) -> Choice | None:
    """The placement that takes the fewest GPUs, None if there is none; by dynamic programming over sets of roles."""
    least: dict[int, Column] = {}
    for column in columns:
        known = least.get(column.members)
        if known is None or column.n_gpus < known.n_gpus:
            least[column.members] = column
    best: dict[int, tuple[int, Choice]] = {0: (0, ())}
    for target in range(1, roles + 1):
        first = target & -target
        found = [
            (best[target ^ members][0] + column.n_gpus, (column, *best[target ^ members][1]))
            for members, column in least.items()
            if members & first and not members & ~target and target ^ members in best
        ]
        if found:
            best[target] = min(found, key=lambda entry: entry[0])
    return best[roles][1] if roles in best else None


def least_overrun(columns: Sequence[Column], roles: int, n_gpus: int) -> list[Column] | None:
    """The columns that the least bad placements are made of: those that fit where a placement does. None if none exists.

    The largest overrun is made as small as can be, then that of each role in their order, each by bisection over the
    overruns there are, as allowing more never makes a placement impossible.
    """
    kept = list(columns)
    for some in (roles, *(1 << role for role in range(roles.bit_length()))):
        levels = sorted({column.overrun for column in kept if column.members & some})
        low, high = 0, len(levels)
        while low < high:
            middle = (low + high) // 2
            choice = fewest_gpus(_at_most(levels[middle], kept, some), roles)
            if choice is not None and sum(column.n_gpus for column in choice) <= n_gpus:
                high = middle
            else:
                low = middle + 1
        if low == len(levels):
            return None
        kept = _at_most(levels[low], kept, some)
    return kept


def _at_most(overrun: int, columns: Sequence[Column], some: int) -> list[Column]:
    """Without those that have one of the roles `some` and a larger overrun."""
    return [column for column in columns if not column.members & some or column.overrun <= overrun]


def preferred(choices: Sequence[Choice]) -> Choice:
    """The fastest; of equally fast ones that with the fewest GPUs; then that whose earlier roles have more of them."""
    fastest = min(map(step_seconds, choices))
    return min((choice for choice in choices if step_seconds(choice) <= fastest * (1 + TIE)), key=_after_seconds)


def in_order(choices: Sequence[Choice]) -> list[Choice]:
    """The preferred one, then the preferred one of the others, and so on."""
    left, ordered = list(choices), []
    while left:
        ordered.append(preferred(left))
        left.remove(ordered[-1])
    return ordered


def _after_seconds(choice: Choice) -> tuple[int, int]:
    return sum(column.n_gpus for column in choice), sum(column.position for column in choice)


def search_exact(columns: Sequence[Column], roles: int, n_gpus: int, n_best: int) -> list[Choice]:
    """The best placement of each of the `n_best` best partitions, the best first. Empty if there is none."""
    columns_of = by_set(columns)
    found = []
    for sets in partitions(roles, columns_of):
        choices = _within(n_gpus, sets, columns_of)
        if choices:
            found.append(preferred(choices))
    return in_order(found)[:n_best]


def _within(n_gpus: int, sets: Sequence[int], columns_of: Mapping[int, Sequence[Column]]) -> list[Choice]:
    """Counts for these sets, among them all of the fastest placements; most that are slower are left out."""
    needed = [0]
    for members in reversed(sets):
        needed.insert(0, needed[0] + columns_of[members][0].n_gpus)
    fastest = float("inf")
    found: list[Choice] = []

    def add(chosen: Choice, left: int) -> None:
        nonlocal fastest
        at = len(chosen)
        if at == len(sets):
            fastest = min(fastest, step_seconds(chosen))
            found.append(chosen)
            return
        for column in columns_of[sets[at]]:
            if column.n_gpus + needed[at + 1] > left:
                return
            # More sets never make a step faster, so that what is slower already is not looked into.
            if step_seconds((*chosen, column)) <= fastest * (1 + TIE):
                add((*chosen, column), left - column.n_gpus)

    add((), n_gpus)
    return found
