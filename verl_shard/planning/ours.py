"""The device_map backend: every role over its GPUs in one process, traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from verl_shard.common.units import format_bytes
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import TRAINED, Role
from verl_shard.config.workload import Workload
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import KINDS
from verl_shard.planning.copies import CopiedLayouts, as_run, copied_roles, copies_seconds, has_copies
from verl_shard.planning.layout import PhaseBytes, Placed, bytes_away, holder_of, limit_of
from verl_shard.planning.models import Models, pass_of
from verl_shard.planning.placed_apart import in_words, placement_of
from verl_shard.planning.placement import STAGES, PlacementSearch
from verl_shard.planning.plan import Check, PlannedPhase
from verl_shard.planning.rates import Rates
from verl_shard.planning.search import Evaluation
from verl_shard.planning.settings import Settings
from verl_shard.planning.step_time import StepTimes
from verl_shard.planning.times import PassTime


@dataclass
class OurEngine:
    """See Engine."""

    workload: Workload
    inventory: Inventory
    models: Models
    rates: Rates | None = None
    side_by_side: bool = False
    """Whether roles on GPUs of their own work at the same time; otherwise one phase follows the other everywhere."""
    layouts: CopiedLayouts = field(init=False)
    times: StepTimes = field(init=False)
    searched: dict[tuple[object, ...], PlacementSearch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.models = replace(self.models, one_device=len(self.inventory) == 1)
        self.layouts = CopiedLayouts(self.models, self.workload, self.inventory)
        card = self.inventory.gpus[0].card
        self.times = StepTimes(self.models, self.workload, self.rates or Rates.of(card))

    def completed(self, settings: Settings) -> Settings:
        return settings

    def can_run(self, settings: Settings) -> bool:
        return True

    def evaluate(self, settings: Settings) -> Evaluation:
        placed = self._placed(settings)
        rows = self.layouts.phases(self._as_run(settings), placed)
        return Evaluation(
            bytes={(row.phase, gpu): size for row in rows for gpu, size in row.peaks.items() if size},
            limits=self._limits,
            seconds=self._step_seconds(rows, settings, placed),
            host=dict.fromkeys(range(len(self.inventory.nodes)), sum(self.host_parts(settings).values())),
            host_limits={n: node.host_memory for n, node in enumerate(self.inventory.nodes)},
        )

    def phases(self, settings: Settings) -> tuple[PlannedPhase, ...]:
        placed, run = self._placed(settings), self._as_run(settings)
        made = []
        for row in self.layouts.phases(run, placed):
            time = self._time(row, settings, placed)
            made.append(
                PlannedPhase(
                    phase=row.phase,
                    role=row.role,
                    peaks=dict(row.peaks),
                    reserved=max(self.layouts.reserved(row.phase, row.fullest, run, placed), row.peaks[row.fullest]),
                    seconds=time.seconds,
                    bound_by=time.bound,
                    parts=self._parts(row, run, placed),
                )
            )
        return tuple(made)

    def _parts(self, row: PhaseBytes, settings: Settings, placed: Mapping[Role, Placed]) -> dict[str, int]:
        """What the fullest GPU holds then, by kind, and what other roles hold there."""
        holder, own = holder_of(row.phase, settings)
        gpu = row.fullest
        parts = {"other roles": row.others[gpu]} if row.others[gpu] else {}
        held = placed.get(holder)
        if held is not None and gpu in held.runs:
            traced = self.models.trace(own, pass_of(row.phase, own, self.workload))
            kinds = traced.kinds_at_peak(range(*held.runs[gpu]), held.stage_of(gpu))
            parts |= {name: size for name, size in zip(KINDS, kinds, strict=True) if size}
            if away := bytes_away(own, traced, held.spec):
                parts["weights"] -= away
            if states := self.layouts.untouched(row.phase, traced, held, gpu):
                parts["optimizer"] = states
        rest = row.peaks[gpu] - sum(parts.values())
        return parts | ({"workspaces and copies": rest} if rest > 0 else {})

    def checks(self, settings: Settings) -> list[Check]:
        rows = self.phases(settings)
        fullest = max(rows, key=lambda row: max(row.peaks.values()))
        parts = sorted(fullest.parts.items(), key=lambda item: -item[1])
        said = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        largest = parts[0][0]
        only = "" if largest in ("weights", "other roles") else ", so that weights in host memory would not decide"
        found = [
            Check("ok", "what fills the fullest GPU", f"{fullest.phase}: {said}; most is {largest}{only}"),
            Check("ok", "shards", "one process has all GPUs, so that no shard size has to divide a world size"),
            Check("ok", "second copy of the weights", self._second_copies(settings)),
        ]
        n = self.workload.mini_batch_sequences
        sizes = {role: own.micro_batch_size or 1 for role, own in settings.roles.items() if role in TRAINED}
        micro = ", ".join(f"{role} {n} = {n // size} x {size}" for role, size in sizes.items())
        found.append(Check("ok", "batch keys", f"sequences of a mini-batch in micro-batches: {micro}"))
        host = sum(self.host_parts(settings).values())
        there = self.inventory.nodes[0].host_memory
        level = "ok" if there is None or host <= there else "fault"
        of = "not given" if there is None else format_bytes(there)
        found.append(Check(level, "host memory", f"{format_bytes(host)} of weights are kept there; the host's is {of}"))
        on_cpu = [row for row in rows if holder_of(row.phase, settings)[1].device_type == "cpu"]
        if on_cpu:
            rates = self.times.rates
            took = ", ".join(f"{row.phase} {row.seconds:.2f} s" for row in on_cpu)
            said = f"{took} at {rates.cpu_flops / 1e12:.3g} TFLOP/s ({rates.cpu_source})"
            found.append(Check("ok", "time on the CPU", said))
        return found

    def _second_copies(self, settings: Settings) -> str:
        said = "generation is on the actor's own module"
        copied = {role: self.devices_of(settings, role) for role in copied_roles(settings)}
        if not copied:
            return f"none: {said}"
        each = ", ".join(f"{role} has one on each of {len(gpus)} GPUs, as asked" for role, gpus in copied.items())
        return f"{each}; {said}"

    def host_parts(self, settings: Settings) -> dict[str, int]:
        """Blocks of roles that are streamed and weights of those on the CPU, in the memory of the one process's node."""
        parts = {}
        for role, own in settings.roles.items():
            apart = role == "rollout" or (role == "ref" and settings.ref_in_actor)
            if not apart and (own.offload == "stream" or own.device_type == "cpu"):
                wanted = pass_of({"ref": "ref_log_prob", "reward": "reward"}[role], own, self.workload)
                copies = len(self.devices_of(settings, role)) if has_copies(own) else 1
                blocks = self.models.read(own, wanted.weight_dtype)[0].blocks
                here = [block for block in blocks if own.device_type == "cpu" or block.kind == "block"]
                parts[f"{role} weights"] = copies * sum(block.weight_bytes for block in here)
        return parts

    def devices_of(self, settings: Settings, role: Role) -> tuple[int, ...]:
        if settings.roles[role].device_type == "cpu":
            return ()
        if role == "rollout" or (role == "ref" and settings.ref_in_actor):
            role = "actor"
        asked = settings.roles[role].devices
        if self.side_by_side:
            return placement_of(self, settings).best.set_of(role).gpus
        if asked is None:
            return tuple(range(len(self.inventory)))
        return tuple(range(asked)) if isinstance(asked, int) else asked

    def map_of(self, settings: Settings, role: Role) -> DeviceMap | None:
        held = self._placed(settings).get(role)
        return None if held is None or has_copies(settings.roles[role]) else held.device_map

    def model_of(self, settings: Settings, role: Role) -> tuple[str, int]:
        own = settings.roles[role]
        spec, _ = self.models.read(own, PassSpec(precision=own.precision).weight_dtype)
        return spec.name, spec.n_params

    def other_placements(self, settings: Settings) -> tuple[str, ...]:
        if not self.side_by_side:
            return ()
        found = placement_of(self, settings)
        return tuple(in_words(other) for other in found.runners_up)

    def over(self, inventory: Inventory) -> OurEngine:
        return replace(self, inventory=inventory)

    @property
    def _limits(self) -> dict[int, int]:
        return {gpu.id: limit_of(gpu.card) for gpu in self.inventory.gpus}

    def _as_run(self, settings: Settings) -> Settings:
        """With the batches that roles with copies work in."""
        for role, own in copied_roles(settings).items():
            made = as_run(own, len(self.devices_of(settings, role)), self.workload)
            settings = replace(settings, roles={**settings.roles, role: made})
        return settings

    def _placed(self, settings: Settings) -> dict[Role, Placed]:
        return self.layouts.place(settings, {role: self.devices_of(settings, role) for role in settings.roles})

    def _step_seconds(self, rows: list[PhaseBytes], settings: Settings, placed: Mapping[Role, Placed]) -> float:
        """The sum over phases, as the trainer scores on the CPU too before it goes on; with roles side by side, over stages,
        of the set of GPUs that takes longest, or of what is on the CPU."""
        seconds = {row.phase: self._time(row, settings, placed).seconds for row in rows}
        if not self.side_by_side:
            return sum(seconds.values())
        total = 0.0
        for phases in STAGES.values():
            by_gpus: dict[tuple[int, ...], float] = {}
            for phase in phases:
                if phase in seconds:
                    at = self.devices_of(settings, holder_of(phase, settings)[0])
                    by_gpus[at] = by_gpus.get(at, 0.0) + seconds[phase]
            total += max(by_gpus.values(), default=0.0)
        return total

    def _time(self, row: PhaseBytes, settings: Settings, placed: Mapping[Role, Placed]) -> PassTime:
        return self._of_held(row.phase, settings, placed.get(holder_of(row.phase, settings)[0]))

    def seconds_of(self, phase: str, settings: Settings, held: Placed | None) -> float:
        """Of a phase on the GPUs of `held`, None of a role on the CPU."""
        return self._of_held(phase, settings, held).seconds

    def _of_held(self, phase: str, settings: Settings, held: Placed | None) -> PassTime:
        own = holder_of(phase, settings)[1]
        if held is None:
            return self.times.of(phase, own, [])
        if has_copies(own):
            own = as_run(own, len(held.runs), self.workload)
            return copies_seconds(self.times, phase, own, held, self.workload)
        return self.times.of(phase, own, list(held.runs.values()), streamed=own.offload == "stream")
