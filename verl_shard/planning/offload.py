"""When to keep something in host memory: per role, on or off, because of which phase, and at what price."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_shard.common.units import format_bytes
from verl_shard.config.roles import Role
from verl_shard.planning.backends import Engine
from verl_shard.planning.plan import Advice
from verl_shard.planning.search import FREE, Evaluation
from verl_shard.planning.settings import Settings

_WAYS: dict[str, tuple[tuple[Role, str, dict[str, Any], dict[str, Any]], ...]] = {
    "device_map": (
        ("ref", "weights (offload=stream)", {"offload": "stream"}, {"offload": "none"}),
        ("reward", "weights (offload=stream)", {"offload": "stream"}, {"offload": "none"}),
    ),
    "fsdp": (
        ("actor", "param_offload", {"param_offload": True}, {"param_offload": False}),
        ("actor", "optimizer_offload", {"optimizer_offload": True}, {"optimizer_offload": False}),
        ("critic", "param_offload", {"param_offload": True}, {"param_offload": False}),
        ("critic", "optimizer_offload", {"optimizer_offload": True}, {"optimizer_offload": False}),
    ),
}
_POLICY_ON = {"offload_policy": True, "param_offload": False, "optimizer_offload": False}  # it has both of them in it
_POLICY: tuple[tuple[Role, str, dict[str, Any], dict[str, Any]], ...] = (
    ("actor", "offload_policy", _POLICY_ON, {"offload_policy": False}),
    ("critic", "offload_policy", _POLICY_ON, {"offload_policy": False}),
)


def advise(engine: Engine, settings: Settings) -> Iterator[Advice]:
    """One Advice for each thing that could be on the host: the step is worked out with it and without it.

    On when the step does not fit without and does with it, or when it is on and needed: what fits without is left alone, even
    where the step would be a little faster with it. Its own copies take time or are hidden; but the GPUs have other room then,
    and roles are cut otherwise, so that less may have to cross between them. saved is the most bytes that it
    takes off the fullest GPU of a phase.
    """
    ways = _WAYS["device_map" if settings.backend == "device_map" else "fsdp"]
    for role, what, on, off in (*ways, *(_POLICY if settings.backend == "fsdp2" else ())):
        own = settings.roles.get(role)
        if own is None or own.device_type == "cpu" or (role == "ref" and settings.ref_in_actor):
            continue
        if own.offload_policy and "offload_policy" not in on:
            continue
        is_on = all(getattr(own, name) == value for name, value in on.items())
        with_it = engine.evaluate(settings.changed(role, **on))
        without = engine.evaluate(settings.changed(role, **off))
        phase, saved = _saved(without, with_it)
        wanted = not without.fits and (with_it.fits or (is_on and saved > 0))
        yield Advice(
            role, what, wanted, _why(without, with_it, phase, saved), phase, saved, with_it.seconds - without.seconds
        )


def _saved(without: Evaluation, with_it: Evaluation) -> tuple[str, int]:
    """The phase whose fullest GPU it relieves most, and by how many bytes."""

    def fullest(made: Evaluation) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for (phase, _), size in made.bytes.items():
            peaks[phase] = max(size, peaks.get(phase, 0))
        return peaks

    before, after = fullest(without), fullest(with_it)
    phase = max(before, key=lambda name: before[name] - after[name])
    return phase, before[phase] - after[phase]


def _why(without: Evaluation, with_it: Evaluation, phase: str, saved: int) -> str:
    if without.fits:
        (name, gpu), size = max(without.bytes.items(), key=lambda item: item[1] - without.limits[item[0][1]])
        gained = without.seconds - with_it.seconds
        # Its own copies never make a step shorter: the room that it leaves lets roles be cut otherwise.
        faster = (
            f"; with it other cuts of the roles would save {gained:.2f} s" if gained > FREE * without.seconds else ""
        )
        return f"it fits without: {name} leaves {format_bytes(without.limits[gpu] - size)}{faster}"
    if not without.over:
        return "host memory is what is short, and this needs more of it"
    (name, _), lacking = max(without.over.items(), key=lambda item: item[1])
    peak = max(size for (at, _), size in without.bytes.items() if at == name)
    after = max(size for (at, _), size in with_it.bytes.items() if at == name)
    if after >= peak:
        other = f"; it would free {format_bytes(saved)} in {phase}" if saved > 0 else ""
        return f"{name} lacks {format_bytes(lacking)}, and this frees nothing there{other}"
    if with_it.fits:
        return f"{name} lacks {format_bytes(lacking)} without it"
    if with_it.host_over:
        return f"{name} lacks {format_bytes(lacking)}, but the host has no room for it"
    return f"{name} lacks {format_bytes(lacking)}, of which it frees {format_bytes(peak - after)}"
