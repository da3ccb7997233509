"""Plan: every blank of a configuration filled, with what each phase takes, what it lacks and what would mend it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_shard.common.errors import config_error
from verl_shard.common.files import write_whole
from verl_shard.config.inventory import Inventory
from verl_shard.config.workload import Workload
from verl_shard.memory.passes import PassSpec, Precision
from verl_shard.models.dtypes import dtype_name
from verl_shard.planning.plan_file import SCHEMA


@dataclass(frozen=True)
class PlannedRole:
    """What a role does and where.

    settings: of its RoleConfig, all that has a value. chosen: those that the planner chose.
    device_map and loads (bytes by GPU): of a role that holds weights of its own, on the device_map backend.
    """

    model: str
    n_params: int
    devices: tuple[int, ...]
    precision: Precision
    settings: Mapping[str, Any]
    chosen: tuple[str, ...]
    device_map: Mapping[str, Any] | None = None
    loads: Mapping[int, int] | None = None


@dataclass(frozen=True)
class PlannedPhase:
    """A phase of the step. peaks: bytes by GPU that torch allocates at most. reserved: on the fullest GPU, what its
    allocator takes from the driver. parts: what the fullest GPU's peak is made of. unmeasured: parts that nobody measured.
    Of a role on the CPU, peaks are what the others hold.
    """

    phase: str
    role: str
    peaks: Mapping[int, int]
    reserved: int
    seconds: float
    bound_by: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()

    @property
    def fullest(self) -> int:
        """The GPU with the largest peak."""
        return max(self.peaks, key=lambda gpu: self.peaks[gpu])


@dataclass(frozen=True)
class RemedyRow:
    """A remedy for a role, and what it did when it was taken after those in the rows before it.

    name: of the remedy in planning/remedies.py. role: whose setting it is.
    setting: what to write, "actor.micro_batch_size=2"; several settings with ", " between them.
    phase: the phase that was most over its limit when this was taken (the fullest where none was), or "host".
    saved: bytes on the fullest GPU of `phase`, of "host" on its fullest node; 0 where it saves nothing there, and below 0
        where that phase then takes more.
    seconds: how much longer a step takes; below 0 where it gets faster.
    price: what it costs beside memory, in words.
    same_result: the run computes the same but for rounding; without, it learns differently.
    taken: the plan has it, in a field that was left blank; otherwise it is for whoever set the field to decide.
    elsewhere: where it saves nothing in `phase`, the phase in which it saves most, of those over their limits if it helps any;
        None where it saves in `phase`, or nowhere. saved_elsewhere: bytes on the fullest GPU of that phase, 0 without one.
    """

    name: str
    role: str
    setting: str
    phase: str
    saved: int
    seconds: float
    price: str
    same_result: bool
    taken: bool
    elsewhere: str | None = None
    saved_elsewhere: int = 0


@dataclass(frozen=True)
class Advice:
    """Whether to keep something of a role in host memory: a step with it beside a step without it.

    role: whose it is. what: the setting that has it there, in words. on: whether it should be there. why: in words.
    phase: the phase whose fullest GPU it relieves most. saved: bytes there; 0 or less where it relieves none.
    seconds: how much longer a step takes with it; 0 where its copies are hidden.
    """

    role: str
    what: str
    on: bool
    why: str
    phase: str
    saved: int
    seconds: float


@dataclass(frozen=True)
class Check:
    """One of the checks that people are told to make by hand. level: ok, warning or fault."""

    level: str
    what: str
    says: str


@dataclass(frozen=True)
class Plan:
    """What build_plan makes: every role and phase of a step on every GPU, and whether it fits.

    phases: of a step, in their order. limits: bytes by GPU id that torch may allocate. fits: whether no phase is above them.
    step_seconds: of a whole step, estimated. remedies: what makes it fit, or made it. advice: on offloading.
    checks: what was looked at beside memory. host: bytes of RAM by node, at most; host_parts: what they are.
    """

    backend: str
    inventory: Inventory
    workload: Workload
    roles: Mapping[str, PlannedRole]
    phases: tuple[PlannedPhase, ...]
    limits: Mapping[int, int]
    fits: bool
    step_seconds: float
    remedies: tuple[RemedyRow, ...] = ()
    advice: tuple[Advice, ...] = ()
    checks: tuple[Check, ...] = ()
    host: Mapping[int, int] = field(default_factory=dict)
    host_parts: Mapping[str, int] = field(default_factory=dict)
    fits_with: str = ""
    """In words, what it would fit with when it does not."""
    placements: tuple[str, ...] = ()
    """In words, the next best placements that were looked at."""

    @property
    def faults(self) -> tuple[Check, ...]:
        """The checks for which the step cannot run, whether it fits or not."""
        return tuple(check for check in self.checks if check.level == "fault")

    @property
    def model_config(self) -> dict[str, dict[str, Any]]:
        """By role, the keywords of the articles' `model_config`: device_map or copies_on, dtype, attn_implementation."""
        made: dict[str, dict[str, Any]] = {}
        for role, own in self.roles.items():
            if own.device_map is not None:
                made[role] = {"device_map": dict(own.device_map)}
            elif own.settings.get("strategy") == "data_parallel":
                made[role] = {"copies_on": list(own.devices)}
            else:
                continue
            made[role]["dtype"] = dtype_name(PassSpec(precision=own.precision).weight_dtype)
            made[role]["attn_implementation"] = own.settings["attn_implementation"]
        return made

    def free_beside(self, role: str) -> dict[int, int] | None:
        """Bytes that stay free on each GPU of a trained role at the peak of its update; None of other roles, and of those
        without a device map.

        The engine fills them with more micro-batches in flight. What torch's allocator takes is more than it gives out:
        here by as much on each GPU as on the fullest.
        """
        own, row = self.roles[role], next((p for p in self.phases if p.phase == f"update_{role}"), None)
        if own.device_map is None or own.loads is None or row is None:
            return None
        given, taken = row.peaks[row.fullest], max(row.reserved, row.peaks[row.fullest])
        return {gpu: max(0, self.limits[gpu] - -(-row.peaks[gpu] * taken // given)) for gpu in own.loads}

    def report(self, width: int = 100) -> str:
        """Tables for people: memory by step phase and GPU, the verdict, remedies, offload advice, roles."""
        from verl_shard.planning.report import report

        return report(self, width)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of the memory of each phase as a PNG. Raises MissingExtraError without matplotlib."""
        from verl_shard.planning.picture import draw

        draw(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes: plain values, opening with the schema. A trained role's "free" is for the engine."""
        plain: dict[str, Any] = _plain({**asdict(self), "inventory": self.inventory.to_dict()})
        for role, entry in plain["roles"].items():
            if (free := self.free_beside(role)) is not None:
                entry["free"] = free
        return {"schema": SCHEMA, **plain}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as YAML, whole or not at all; the device_map engine reads its roles' maps from it."""
        write_whole(Path(path), yaml.safe_dump(self.to_dict(), sort_keys=False, width=120))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that `save` wrote. Raises ConfigError for a file that is missing or no such plan."""
        try:
            record = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            why = f"it cannot be read ({error})"
            raise config_error("not-a-plan", str(path), None, why, "Give what Plan.save wrote") from error
        return cls.from_dict(record, str(path))

    @classmethod
    def from_dict(cls, record: Any, where: str = "plan") -> Plan:
        """The plan that `to_dict` gave. Raises ConfigError for anything else."""
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            raise config_error(
                "not-a-plan", where, schema, f'its "schema" is not "{SCHEMA}"', "Give what Plan.save wrote"
            )
        try:
            given = {name: value for name, value in record.items() if name != "schema"}
            given["inventory"] = Inventory.from_dict(given["inventory"])
            given["workload"] = Workload(**given["workload"])
            given["roles"] = {role: _role(own) for role, own in given["roles"].items()}
            given["phases"] = tuple(
                PlannedPhase(**{**row, "unmeasured": tuple(row["unmeasured"])}) for row in given["phases"]
            )
            for name, kind in (("remedies", RemedyRow), ("advice", Advice), ("checks", Check)):
                given[name] = tuple(kind(**row) for row in given[name])
            given["placements"] = tuple(given["placements"])
            return cls(**given)
        except (KeyError, TypeError, AttributeError) as error:
            why = f"a field is missing or wrong ({error})"
            raise config_error("not-a-plan", where, None, why, "Give what Plan.save wrote") from error


def _role(own: Mapping[str, Any]) -> PlannedRole:
    fields = {name: value for name, value in own.items() if name != "free"}  # follows from the rest of the plan
    return PlannedRole(**{**fields, "devices": tuple(own["devices"]), "chosen": tuple(own["chosen"])})


def _plain(value: Any) -> Any:
    """YAML knows no tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
