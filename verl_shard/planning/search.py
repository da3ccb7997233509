"""The cheapest set of remedies with which a step fits: best first, by what it costs, over sets that matter."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from verl_shard.config.roles import Role
from verl_shard.config.workload import Workload
from verl_shard.planning.remedies import Change, Remedy, available
from verl_shard.planning.settings import Settings

MOST_TRIED = 60
"""Sets of remedies that are looked at, each with all that may follow it."""
FREE = 0.002
"""Of a step's time, what counts as no time."""
HOST = "host"
"""In place of a phase, where it is the host's memory that is short."""
Cell = tuple[str, int]
"""A phase and a GPU."""


@dataclass(frozen=True)
class Evaluation:
    """What a step takes with some settings.

    bytes: by phase and GPU. limits: by GPU. host: bytes of RAM by node, host_limits what there is, None unknown.
    """

    bytes: Mapping[Cell, int]
    limits: Mapping[int, int]
    seconds: float
    host: Mapping[int, int]
    host_limits: Mapping[int, int | None]

    @cached_property
    def over(self) -> dict[Cell, int]:
        """By how many bytes each cell is too large."""
        return {cell: size - self.limits[cell[1]] for cell, size in self.bytes.items() if size > self.limits[cell[1]]}

    @cached_property
    def host_over(self) -> dict[int, int]:
        """By how many bytes each node's RAM is too small."""
        limits = self.host_limits
        return {n: size - limit for n, size in self.host.items() if (limit := limits[n]) is not None and size > limit}

    @property
    def fits(self) -> bool:
        """Whether all is within the limits."""
        return not self.over and not self.host_over


@dataclass(frozen=True)
class Taken:
    """A remedy for a role, with what it did when it was taken after those before it.

    saved: bytes on the GPU of `phase` that was short; below 0 where it then takes more. seconds: how much longer a step takes.
    elsewhere: where it saves nothing there, the phase in which it saves most, of those that are short if it helps any, and
        the bytes there; None where it saves nothing at all.
    """

    remedy: Remedy
    role: Role
    change: Change
    phase: str
    saved: int
    seconds: float
    elsewhere: tuple[str, int] | None = None


Steps = tuple[Taken, ...]


@dataclass(frozen=True)
class Found:
    """Where a search ended. complete: every set that could have been cheaper was looked at."""

    settings: Settings
    evaluation: Evaluation
    taken: Steps
    complete: bool = True


def cheapest(
    start: Settings,
    workload: Workload,
    evaluate: Callable[[Settings], Evaluation],
    may: Callable[[Role, str], bool],
    can: Callable[[Settings], bool] = lambda _: True,
) -> Found:
    """The cheapest remedies with which `start` fits; where not even all of them are enough, all of them.

    may(role, field): whether a field may be changed. can(settings): whether there is such a run.
    Every set that fits has, for the cell that is most over, a remedy that lowers it; so only those are tried next, and of
    those that cost no time the best is taken without trying others. Sets are looked at in the order of cost: first how
    many change what is learned, then the seconds of a step. The first that fits is the cheapest, less what it does not need.
    """
    first = evaluate(start)
    if first.fits:
        return Found(start, first, ())
    everything = _everything(start, workload, evaluate, may, can)
    if not everything.evaluation.fits:
        return everything
    numbers = count()
    queue: list[tuple[int, float, int, Settings, Evaluation, Steps]] = [(0, first.seconds, 0, start, first, ())]
    seen = {key_of(start)}
    for _ in range(MOST_TRIED):
        if not queue:
            break
        changes, _, _, settings, now, taken = heapq.heappop(queue)
        if now.fits:
            return _needed(start, evaluate, taken)
        steps: list[tuple[Taken, Settings, Evaluation]] = []
        for remedy, role, change in available(settings, workload):
            if not all(may(role, name) for name in change) or not can(settings.changed(role, **change)):
                continue
            change, after, made = _far_enough(remedy, role, change, settings, workload, evaluate, now, can)
            phase, saved = _helped(now, made)
            if saved > 0 and key_of(after) not in seen:
                steps.append((Taken(remedy, role, change, phase, saved, made.seconds - now.seconds), after, made))
        free = [item for item in steps if item[0].remedy.same_result and item[0].seconds <= FREE * now.seconds]
        for step, after, made in [max(free, key=lambda item: item[0].saved)] if free else steps:
            seen.add(key_of(after))
            cost = changes + (not step.remedy.same_result)
            heapq.heappush(queue, (cost, made.seconds, next(numbers) + 1, after, made, (*taken, step)))
    needed = _needed(start, evaluate, everything.taken)
    return Found(needed.settings, needed.evaluation, needed.taken, complete=False)


def _far_enough(
    remedy: Remedy,
    role: Role,
    change: Change,
    settings: Settings,
    workload: Workload,
    evaluate: Callable[[Settings], Evaluation],
    now: Evaluation,
    can: Callable[[Settings], bool],
) -> tuple[Change, Settings, Evaluation]:
    """A remedy that can be taken again and again, such as halving a micro-batch, as few times as mend the phase that is
    most over, or as often as it goes where that is not enough. By bisection: more always needs less."""
    levels = [change]
    while more := remedy.change(settings.changed(role, **levels[-1]).roles[role], workload):
        if not can(settings.changed(role, **more)):
            break
        levels.append(more)
    phase = _worst(now)

    def at(level: int) -> tuple[Settings, Evaluation, bool]:
        after = settings.changed(role, **levels[level])
        made = evaluate(after)
        return after, made, not any(cell[0] == phase for cell in made.over) and (phase != HOST or not made.host_over)

    low, high = 0, len(levels) - 1
    best = at(high)
    while best[2] and low < high:
        middle = (low + high) // 2
        tried = at(middle)
        if tried[2]:
            best, high = tried, middle
        else:
            low = middle + 1
    return levels[high], best[0], best[1]


def _everything(
    start: Settings,
    workload: Workload,
    evaluate: Callable[[Settings], Evaluation],
    may: Callable[[Role, str], bool],
    can: Callable[[Settings], bool],
) -> Found:
    """All remedies that keep the result, each as far as it goes; and where that is not enough, the others too."""
    settings, taken = start, []
    for same_result in (True, False):
        while wanted := [
            (remedy, role, change)
            for remedy, role, change in available(settings, workload)
            if remedy.same_result >= same_result
            and all(may(role, name) for name in change)
            and can(settings.changed(role, **change))
        ]:
            for remedy, role, change in wanted:
                settings = settings.changed(role, **change)
                taken.append((remedy, role, change))
        made = evaluate(settings)
        if made.fits:
            break
    return _counted(start, evaluate, taken)


def _counted(
    start: Settings, evaluate: Callable[[Settings], Evaluation], taken: Sequence[tuple[Remedy, Role, Change]]
) -> Found:
    """Remedies in the order in which they are taken, with what each does after those before it.

    Of several levels of one setting only the last is evaluated and told.
    """
    last = {(remedy.name, role): (remedy, role, change) for remedy, role, change in taken}
    settings, now, steps = start, evaluate(start), []
    for remedy, role, change in last.values():
        settings = settings.changed(role, **change)
        made = evaluate(settings)
        phase, saved = _helped(now, made)
        elsewhere = None if saved > 0 else _helped_most(now, made)
        steps.append(Taken(remedy, role, change, phase, saved, made.seconds - now.seconds, elsewhere))
        now = made
    return Found(settings, now, tuple(steps))


def _needed(start: Settings, evaluate: Callable[[Settings], Evaluation], taken: Steps) -> Found:
    """The same without what turned out not to be needed once others were taken, what saves least first."""
    kept = list({(step.remedy.name, step.role): step for step in taken}.values())
    for step in sorted(kept, key=lambda step: step.saved):
        rest = [other for other in kept if other is not step]
        settings = start
        for other in rest:
            settings = settings.changed(other.role, **other.change)
        if evaluate(settings).fits:
            kept = rest
    return _counted(start, evaluate, [(step.remedy, step.role, step.change) for step in kept])


def _worst(evaluation: Evaluation) -> str:
    """The phase that is most over, or the host; when nothing is over, the phase that is fullest."""
    if evaluation.over:
        return max(evaluation.over, key=lambda at: evaluation.over[at])[0]
    if evaluation.host_over:
        return HOST
    return max(evaluation.bytes, key=lambda at: evaluation.bytes[at] - evaluation.limits[at[1]])[0]


def _helped(before: Evaluation, after: Evaluation) -> tuple[str, int]:
    """That phase, and by how many bytes its fullest GPU, whichever that then is, got further from being over."""
    phase = _worst(before)
    if phase == HOST:
        node = max(before.host_over, key=lambda at: before.host_over[at])
        return HOST, before.host[node] - after.host[node]

    return phase, _most(before).get(phase, 0) - _most(after).get(phase, 0)


def _helped_most(before: Evaluation, after: Evaluation) -> tuple[str, int] | None:
    """The phase that got furthest from being over, one that was over first, and by how many bytes; None where none did."""
    was, is_ = _most(before), _most(after)
    saved = {phase: size - is_.get(phase, size) for phase, size in was.items() if is_.get(phase, size) < size}
    over = {phase: size for phase, size in saved.items() if was[phase] > 0}
    among = over or saved
    return max(among.items(), key=lambda item: item[1]) if among else None


def _most(made: Evaluation) -> dict[str, int]:
    """By phase, by how many bytes its fullest GPU is over its limit; below 0 where it is under."""
    found: dict[str, int] = {}
    for (phase, gpu), size in made.bytes.items():
        found[phase] = max(size - made.limits[gpu], found.get(phase, size - made.limits[gpu]))
    return found


def key_of(settings: Settings) -> tuple[object, ...]:
    """What tells settings apart: models do not differ within a search, and need not be hashable."""
    return tuple(
        (role, *(value for name, value in vars(own).items() if name != "model")) for role, own in settings.roles.items()
    )
