"""update_resource: what is asked for, checked; and what a move of a role between two steps is made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.errors import ConfigError, Faults, RunError, config_error
from verl_shard.common.notices import notice, record_event
from verl_shard.config.device_ids import parse_device_ids
from verl_shard.config.resource_rules import STRATEGIES, role_faults
from verl_shard.config.roles import ROLES, Role, RoleConfig
from verl_shard.config.run_folder import RunFolder, whole_checkpoints
from verl_shard.mapping.devices import device_label, parse_device
from verl_shard.training.moves import MOVES
from verl_shard.training.placement import Places, place_again, section_of
from verl_shard.verl_plugin.local.group import Processes

if TYPE_CHECKING:
    from verl_shard.verl_plugin.local.run import LocalRun

_PATIENCE_S = 60.0
"""So long one process waits for the others to move the same."""


class Relaunch(Exception):  # noqa: N818 - no error: it leaves a launch that is to go on elsewhere
    """Ends a launch of verl after a checkpoint."""


@dataclass(frozen=True)
class Change:
    """One role elsewhere. places: of all roles, afterwards."""

    role: Role
    strategy: str
    section: Mapping[str, Any]
    places: Places

    @property
    def alike(self) -> tuple[str, str, int]:
        """What is the same in all processes, each of which has GPUs of its own."""
        return self.role, self.strategy, len(self.places.roles[self.role].devices)

    def is_nothing(self, before: Places) -> bool:
        """Whether all stays where it is."""
        return section_of(self.places.roles[self.role]) == section_of(before.roles[self.role])

    @property
    def words(self) -> str:
        """For people."""
        place = self.places.roles[self.role]
        where = ", ".join(map(device_label, place.devices))
        return f"{self.role} to {where}{' (a copy on each)' if place.copies else ''}"


def check_between_steps(run: LocalRun | None) -> None:
    """Raises ConfigError inside of a step: what it computed so far is where it was computed."""
    if run is not None and run.working:
        fix = "Call it from on_step_end, or between two calls of step()"
        raise config_error("in-a-step", "update_resource", None, "a step is under way", fix)


def check_checkpoints(change: Change, save_freq: int, *, under_way: bool) -> None:
    """Raises ConfigError where a launch of verl would have to be left and writes no checkpoint. under_way: whether one is."""
    if under_way and save_freq <= 0:
        why = "verl takes other GPUs only at a start, which goes on from a checkpoint, and this run writes none"
        fix = f"Set ppo_config['save_freq'], or write model_config={{{change.role!r}: {dict(change.section)}}} from the start"
        raise config_error("no-checkpoints", "update_resource", change.role, why, fix)


def read_change(component: Any, device_ids: Any, strategy: Any, *, runner: str, places: Places, lora: bool) -> Change:
    """From update_resource's arguments. Raises ConfigError with every fault, and for what the table of moves does not have."""
    if component not in ROLES:
        fix = f"Use one of {', '.join(ROLES)}"
        raise config_error("no-such-component", "component", component, "no such component", fix)
    role: Role = component
    if role == "ref" and lora:
        why = "with lora_rank the reference is the actor without its adapters"
        raise config_error("cannot-move", "component", role, why, "Move the actor")
    if role != "rollout" and role not in places.roles:
        raise config_error("cannot-move", "component", role, f"this run has no {role} model", f"Give {role}_model")
    faults = Faults()
    own = RoleConfig()
    with faults.gathering():
        own = _read_devices(role, device_ids)
    n = len(own.devices) if isinstance(own.devices, tuple) else 0
    named: Any = strategy or (
        "hf" if role == "rollout" else "device_map" if n > 1 or isinstance(device_ids, Mapping) else "none"
    )
    with faults.gathering():
        _check_strategy(runner, role, own, named)
        if isinstance(device_ids, Mapping) and named != "device_map":
            raise config_error("strategy", "strategy", named, "device_ids is a device_map", "Leave out the strategy")
    faults.check()
    move = MOVES[runner, role, named]
    if move.instead:
        notice("our-strategy", f"{role}.strategy", named, move.why, move.instead)
        named = move.instead
    if isinstance(device_ids, Mapping):
        section: dict[str, Any] = {"device_map": dict(device_ids)}
    elif own.device_type == "cpu":
        section = {"devices": ["cpu"]}
    else:
        section = {"copies_on" if named == "data_parallel" else "devices": list(own.devices or ())}  # type: ignore[arg-type]
    return Change(role, named, section, place_again(places, role, section))


def _check_strategy(runner: str, role: Role, own: RoleConfig, strategy: Any) -> None:
    """Raises ConfigError for a strategy that the role does not have, that does not go with its devices or cannot be moved to."""
    if strategy not in {name for names in STRATEGIES.values() for name in names}:
        fix = f"Use one of {', '.join(STRATEGIES[role])}"
        why = f"{'an' if role == 'actor' else 'a'} {role} does not have it"
        raise config_error("strategy", "strategy", strategy, why, fix)
    if found := tuple(role_faults(role, replace(own, strategy=strategy))):
        raise ConfigError(replace(f, where=f.where.replace("devices", "device_ids")) for f in found)
    move = MOVES[runner, role, strategy]
    if move.how == "no":
        raise config_error("cannot-move", f"{role}.strategy", strategy, move.why, move.fix)


def _read_devices(role: Role, given: Any) -> RoleConfig:
    """Where a role is to be. Raises ConfigError for what names no devices."""
    if isinstance(given, str) and given.strip() == "cpu":
        return RoleConfig(device_type="cpu")
    if isinstance(given, Mapping):
        devices = {parse_device(device, "device_ids") for device in given.values()}
        if "disk" in devices or not devices:
            raise config_error("device-ids", "device_ids", f"a map of {len(given)} names", "no devices", "Use GPUs")
        gpus = tuple(sorted(device for device in devices if isinstance(device, int)))
        return RoleConfig(devices=gpus) if gpus else RoleConfig(device_type="cpu")
    if isinstance(given, int) and not isinstance(given, bool):
        why = "a number by itself is how many in a resource config, and which one elsewhere"
        raise config_error("device-ids", "device_ids", given, why, f"Write [{given}] for GPU {given}")
    try:
        ids = parse_device_ids(given)
    except ValueError as error:
        raise config_error("device-ids", "device_ids", given, "they name no GPU", str(error)) from None
    if not isinstance(ids, tuple) or not ids:
        raise config_error("device-ids", "device_ids", given, "they name no GPU", 'Write ids such as [0, 1], or "cpu"')
    if len(set(ids)) != len(ids):
        raise config_error("device-ids", "device_ids", list(ids), "one is named twice", "Name each GPU once")
    try:
        return RoleConfig(devices=ids)
    except ConfigError as error:
        raise ConfigError(replace(fault, where="device_ids") for fault in error.findings) from None


def agreed(processes: Processes, read: Callable[[], Change]) -> Change:
    """This process's change, once all have asked for the same. Raises in all of them what one raises.

    One that nobody follows within a minute raises RunError, and the others lose it.
    """
    if processes.size == 1:
        return read()
    _meet(processes)
    changes = processes.gather(lambda: [read()])
    if len({change.alike for change in changes}) > 1:
        said = "; ".join(f"process {rank}: {change.words}" for rank, change in enumerate(changes))
        why = "each process has a whole run over GPUs of its own, and all move the same role to as many"
        raise config_error("not-alike", "update_resource", said, why, "Call it alike in all of them")
    return changes[processes.rank]


_meetings = 0


def _meet(processes: Processes) -> None:
    """Waits until all processes are here: what follows is collective, and would hang."""
    from torch.distributed.distributed_c10d import _get_default_store

    global _meetings  # counted alike in all processes
    _meetings += 1
    store, key = _get_default_store(), f"verl_shard/move/{_meetings}"
    store.add(key, 1)
    until = time.monotonic() + _PATIENCE_S
    while (here := store.add(key, 0)) < processes.size:
        if time.monotonic() > until:
            raise RunError(
                f"update_resource was called in {here} of {processes.size} processes. Each has its own models to move: "
                "call it in all of them, after the same step"
            )
        time.sleep(0.05)


def record(folder: Path, change: Change, before: Places, step: int, rank: int) -> None:
    """A line in the run's events."""
    then, now = (section_of(places.roles[change.role]) for places in (before, change.places))
    record_event(
        "moved", folder=folder, component=change.role, strategy=change.strategy, before=then, after=now, step=step,
        process=rank,
    )  # fmt: skip


def remember(run: RunFolder, processes: Processes, places: Places, role: str) -> None:
    """Has a resume with the same model_config begin where the role is now."""
    asked, now = section_of(places.asked[role]), section_of(places.roles[role])
    every = processes.gather(lambda: [{"asked": asked, "now": now}])
    if processes.first:
        run.update(moved={**run.info.get("moved", {}), role: every})


def moved_before(run: RunFolder, places: Places, processes: Processes) -> Places:
    """The places of a run that goes on, with roles where update_resource has put them: those of which model_config says what
    it said then. A machine without such GPUs, and another number of processes, begin as model_config says."""
    for role, every in run.info.get("moved", {}).items():
        if role not in places.roles or len(every) != processes.size:
            continue
        mine = every[processes.rank]
        if mine["asked"] != section_of(places.asked[role]):
            continue
        try:
            places = place_again(places, role, mine["now"])
        except ConfigError as error:
            notice("moved-before", f"{role}.devices", mine["now"], str(error), "what model_config says")
    return places


def can_leave(checkpoints: Path, *, since: int, seen: int, last: int) -> bool:
    """Whether a launch can be left for another: a whole checkpoint is not before `since`, and its step's metrics, which come
    after it, were seen. After the last step nothing is left to do elsewhere."""
    step = max(whole_checkpoints(checkpoints), default=0)
    return max(since, 1) <= step <= seen and step < last
