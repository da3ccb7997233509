"""A Plan for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import RenderableType

from verl_shard.common.tables import as_text, table
from verl_shard.common.units import format_bytes, format_count
from verl_shard.planning.plan import Plan, RemedyRow
from verl_shard.planning.search import FREE

_MOST_COLUMNS = 8


def report(plan: Plan, width: int) -> str:
    """Tables of `width` characters: phase by GPU with the fullest first, verdict, remedies, advice, checks and roles."""
    shown: list[RenderableType] = [_heading(plan), _memory(plan), _verdict(plan)]
    if plan.remedies:
        shown.append(_remedies(plan))
    if plan.fits_with:
        shown.append(plan.fits_with)
    shown.append(_roles(plan))
    if plan.advice:
        shown.append(_advice(plan))
    shown += [f"{check.level}: {check.what}: {check.says}" for check in plan.checks]
    shown += [f"Also looked at: {words}" for words in plan.placements]
    if left := sorted({part for row in plan.phases for part in row.unmeasured}):
        shown.append(f"Calculated, and not measured by anybody yet: {', '.join(left)}.")
    return as_text(width, *shown)


def _heading(plan: Plan) -> str:
    w = plan.workload
    kind = f"{w.algorithm}, {w.train_batch_size} prompts x {w.n}, {w.prompt_length} + {w.response_length} tokens"
    engine = "device maps in one process" if plan.backend == "device_map" else f"stock verl, {plan.backend} and vLLM"
    return f"{plan.inventory.words}; {engine}; {kind}"


def _memory(plan: Plan) -> RenderableType:
    """One row a phase, the fullest first; equal GPUs share a column."""
    order = sorted(plan.phases, key=lambda row: -max(row.peaks.values()))
    groups = _equal_gpus(plan)
    title = "Peak memory by step phase, GiB a GPU"
    if len(groups) > _MOST_COLUMNS:
        groups = [[row.fullest] for row in order[:1]]
        title += "; of the GPUs only the fullest is shown"
    columns = ["phase", "role", *(_names(gpus) for gpus in groups), "reserved", "head-room", "seconds"]
    rows = []
    for row in order:
        limit = plan.limits[row.fullest]
        room = min(plan.limits[gpu] - size for gpu, size in row.peaks.items())
        cells = [_gib(row.peaks[gpus[0]]) for gpus in groups]
        verdict = _gib(room) if room >= 0 else f"{_gib(-room)} too much"
        reserved = _gib(min(row.reserved, limit)) + ("" if row.reserved <= limit else " (all)")
        rows.append([row.phase, row.role, *cells, reserved, verdict, f"{row.seconds:.2f}"])
    return table(title, columns, rows)


def _verdict(plan: Plan) -> str:
    worst = min(plan.phases, key=lambda row: min(plan.limits[gpu] - size for gpu, size in row.peaks.items()))
    gpu = min(worst.peaks, key=lambda g: plan.limits[g] - worst.peaks[g])
    size, limit = worst.peaks[gpu], plan.limits[gpu]
    at = f"{worst.phase} on GPU {gpu}: {format_bytes(size)} of {format_bytes(limit)}"
    step = f"A step takes about {plan.step_seconds:.1f} s."
    if plan.fits:
        tight = [row for row in plan.phases if row.reserved > plan.limits[row.fullest]]
        close = "; close: torch's allocator will have to give cached memory back" if tight else ""
        n = len(plan.faults)
        but = f", but cannot run as it is: below {'is a fault' if n == 1 else f'are {n} faults'}" if n else ""
        return f"It fits{but}. Fullest is {at}{close}. {step}{_host(plan)}"
    if size > limit:
        return f"It does not fit: {at}, {format_bytes(size - limit)} too much. {step}{_host(plan)}"
    return f"It does not fit in host memory. {step}{_host(plan)}"


def _host(plan: Plan) -> str:
    if not plan.host:
        return ""
    node = max(plan.host, key=lambda n: plan.host[n])
    there = plan.inventory.nodes[node].host_memory
    of = f" of {format_bytes(there)}" if there is not None else ""
    over = ", too much" if there is not None and plan.host[node] > there else ""
    return f" Host memory: {format_bytes(plan.host[node])}{of} a node{over}."


def _remedies(plan: Plan) -> RenderableType:
    taken = plan.remedies[0].taken
    title = "Chosen so that it fits" if taken else "Cheapest way to make it fit"
    columns = ("remedy", "role", "set", "saves a GPU", "in", "seconds a step", "price")
    rows = [
        (
            row.name, row.role, row.setting, *_saved(row), _longer(row.seconds, plan, "+.2f"),
            row.price + ("" if row.same_result else " (learns differently)"),
        )
        for row in plan.remedies
    ]  # fmt: skip
    return table(title, columns, rows)


def _saved(row: RemedyRow) -> tuple[str, str]:
    """What a remedy saves, and in which phase: in the one that was most over, else in another, with what that one has of it."""
    if row.saved > 0:
        return format_bytes(row.saved), row.phase
    there = f"nothing in {row.phase}" if row.saved == 0 else f"{format_bytes(-row.saved)} more in {row.phase}"
    if row.elsewhere is None:
        return "0 B", f"no phase; {there}" if row.saved else "no phase"
    return format_bytes(row.saved_elsewhere), f"{row.elsewhere}; {there}"


def _roles(plan: Plan) -> RenderableType:
    columns = ("role", "model", "parameters", "GPUs", "precision", "micro-batch", "other settings")
    rows = []
    for role, own in plan.roles.items():
        settings = dict(own.settings)
        micro = settings.pop("micro_batch_size", "-")
        words = [
            _setting(name, value)
            for name, value in settings.items()
            if name not in _SAID and value not in (False, 0, "none")
        ]
        if own.settings.get("strategy") == "data_parallel":
            words.append("a copy on each")
        where = ids_in_words(own.devices) if own.devices else "CPU"
        rows.append((role, own.model, format_count(own.n_params), where, own.precision, micro, ", ".join(words)))
    return table("Roles", columns, rows)


_SAID = ("precision", "task", "device_type", "strategy")


def _setting(name: str, value: object) -> str:
    return name if value is True else str(value) if name in ("optimizer", "attn_implementation") else f"{name}={value}"


def _advice(plan: Plan) -> RenderableType:
    rows = [
        (
            row.role, row.what, "on" if row.on else "off", row.why, format_bytes(max(0, row.saved)),
            row.phase if row.saved > 0 else "no phase", _longer(row.seconds, plan, ".2f"),
        )
        for row in plan.advice
    ]  # fmt: skip
    # For what is a remedy too, two figures may differ, and are of two questions.
    title = "Offload: this plan with it beside this plan without it, in the phase that it relieves most"
    title += "; a remedy is counted after those above it, and in the phase that was most over" if plan.remedies else ""
    return table(title, ("role", "what", "advice", "why", "saves a GPU", "in", "seconds a step"), rows)


def _longer(seconds: float, plan: Plan, form: str) -> str:
    """How much longer a step takes, of what is more than nothing to the search: other room on the GPUs gives other cuts of the
    roles, with a copy between GPUs more or fewer."""
    return "about 0" if abs(seconds) <= FREE * plan.step_seconds else format(seconds, form)


def _equal_gpus(plan: Plan) -> list[list[int]]:
    """GPUs in runs of equal figures, so that sixty-four equal ranks are one column."""

    def figures(gpu: int) -> tuple[int, ...]:
        return tuple(row.peaks[gpu] for row in plan.phases)

    return [list(gpus) for _, gpus in groupby(sorted(plan.limits), key=figures)]


def _names(gpus: Sequence[int]) -> str:
    return f"GPU {ids_in_words(gpus)}"


def ids_in_words(gpus: Sequence[int]) -> str:
    """ "0-3, 6" """
    runs: list[list[int]] = []
    for gpu in sorted(gpus):
        if runs and runs[-1][-1] + 1 == gpu:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
