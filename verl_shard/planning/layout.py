"""Where each role's blocks are, and what it holds there between its phases and at the peak of each: the device_map backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import TRAINED, Role, RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.mapping.build import cut_into, map_of_runs
from verl_shard.mapping.costs import Cost, inference_cost, peak_cost
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.mapping.partition import ByStage, RunCost
from verl_shard.memory.constants import CUBLAS_LT, CUDA_CONTEXT, cublas_workspace
from verl_shard.memory.estimate import of_blocks
from verl_shard.memory.in_flight import Stage
from verl_shard.memory.recorder import ROUND
from verl_shard.memory.recording import OPTIMIZER, PRODUCT_WITH_BIAS, WEIGHTS
from verl_shard.memory.trace import Trace
from verl_shard.models.spec import ModelSpec
from verl_shard.planning.models import PHASES, PHASES_OF, ROLE_OF, Models, pass_of
from verl_shard.planning.settings import Settings

Run = tuple[int, int]
SWEEPS = 4


def limit_of(card: Card) -> int:
    """What torch may allocate on a card: its memory without the driver's context."""
    return card.memory - CUDA_CONTEXT.n_bytes


@dataclass(frozen=True)
class PhaseBytes:
    """One phase on the GPUs. peaks: what torch would say it allocated at most; others: of that, what other roles hold."""

    phase: str
    role: Role
    peaks: Mapping[int, int]
    others: Mapping[int, int]

    @property
    def fullest(self) -> int:
        """The GPU with the largest peak."""
        return max(self.peaks, key=lambda gpu: self.peaks[gpu])


@dataclass(frozen=True)
class Placed:
    """A role on its GPUs. runs: for each GPU the Blocks first to end - 1 that it holds."""

    role: Role
    spec: ModelSpec
    cost: Cost
    runs: Mapping[int, Run]
    resident: Mapping[int, int]
    """Bytes on each GPU between the role's phases: weights, and optimizer states of a trained role."""

    @property
    def stages(self) -> list[int]:
        """Of each Block the number of its GPU, in the order in which the model runs through them."""
        return [number for number, (first, end) in enumerate(self.runs.values()) for _ in range(first, end)]

    def stage_of(self, gpu: int) -> Stage:
        """The GPU's place in the pipeline of a role's micro-batches in flight."""
        return Stage(list(self.runs).index(gpu), len(self.runs))

    @property
    def device_map(self) -> DeviceMap:
        """The same as a map of names."""
        purpose = "training" if self.role in TRAINED else "inference"
        return map_of_runs(self.spec, self.cost, list(self.runs.values()), list(self.runs), purpose)


@dataclass
class Layouts:
    """Places roles and says what each phase takes; what was worked out once is kept."""

    models: Models
    workload: Workload
    inventory: Inventory
    _placed: dict[Any, dict[Role, Placed]] = field(default_factory=dict)
    _cuts: dict[Any, Placed] = field(default_factory=dict)
    _reserved: dict[Any, int] = field(default_factory=dict)
    _peaks: dict[Any, Mapping[int, int]] = field(default_factory=dict)

    def place(self, settings: Settings, devices: Mapping[Role, tuple[int, ...]]) -> dict[Role, Placed]:
        """Every role that holds weights of its own, over its `devices`.

        Each is cut into the room that the others leave, trained roles first, over and over until that changes nothing
        (at most SWEEPS times): every cut is the best beside the others, all together need not be the best there is.
        Raises ConfigError.
        """
        apart = ("rollout", *(["ref"] if settings.ref_in_actor else []))
        own = {role: c for role, c in settings.roles.items() if role not in apart and c.device_type != "cpu"}
        order = sorted(own, key=lambda role: role not in TRAINED)
        key = (tuple((role, _choices(own[role]), devices[role]) for role in order), settings.ref_in_actor)
        if key in self._placed:
            return self._placed[key]
        room = self._room
        placed = {role: self._cut(role, own[role], devices[role], room) for role in order}
        shared = sum(len(set(devices[role])) for role in order) > len({gpu for role in order for gpu in devices[role]})
        for _ in range(SWEEPS if shared else 0):
            before = {role: held.runs for role, held in placed.items()}
            for role in order:
                left = list(room)
                for name, held in placed.items():
                    for gpu, size in held.resident.items() if name != role else ():
                        left[gpu] -= size
                placed[role] = self._cut(role, own[role], devices[role], left)
            if before == {role: held.runs for role, held in placed.items()}:
                break
        self._placed[key] = placed
        return placed

    @cached_property
    def _room(self) -> list[int]:
        return [limit_of(gpu.card) for gpu in self.inventory.gpus]

    def _cut(self, role: Role, own: RoleConfig, devices: tuple[int, ...], room: Sequence[int]) -> Placed:
        mine = tuple(room[gpu] for gpu in devices)
        key = (role, _choices(own), devices, mine)
        if key in self._cuts:
            return self._cuts[key]
        wanted = pass_of(PHASES_OF[role][-1], own, self.workload)
        if role in TRAINED:
            traced = self.models.trace(own, wanted)
            spec, _ = self.models.adapted(own, wanted)
            cost = replace(peak_cost(traced, wanted), of=self._highest(role, own, traced))
            held = traced.kinds[0, :, [WEIGHTS, OPTIMIZER]].sum(axis=0)
        else:
            spec, module = self.models.read(own, wanted.weight_dtype)
            cost = inference_cost(spec, module, None)
            held = _allocated(spec)
            if own.offload == "stream":  # its blocks pass through one GPU, the one with most room
                devices = (max(devices, key=lambda gpu: (room[gpu], -gpu)),)
                mine, held = (room[devices[0]],), np.where(travels(spec), 0, held)
        runs = dict(zip(devices, cut_into(spec, cost, mine), strict=True))
        used = {gpu: run for gpu, run in runs.items() if run[0] < run[1]}
        resident = {gpu: int(held[i:j].sum()) for gpu, (i, j) in used.items()}
        self._cuts[key] = Placed(role, spec, cost, used, resident)
        return self._cuts[key]

    def _highest(self, role: Role, own: RoleConfig, update: Trace) -> RunCost | ByStage:
        """For Blocks i..j-1 the largest peak of all phases that run on a trained role's module, with its states; of its update
        by the place in the pipeline."""
        states = np.concatenate([[0], update.kinds[0, :, OPTIMIZER].cumsum()])
        kept = states[None, :] - states[:-1, None]
        least = np.zeros_like(kept)
        for phase in PHASES_OF[role][:-1]:
            scored = self.models.trace(own, pass_of(phase, own, self.workload)).peaks
            least = np.maximum(least, np.where(scored > 0, scored + kept, 0))
        if update.in_flight == 1:
            in_turn: np.ndarray = np.maximum(least, update.peaks)
            return in_turn.item
        highest: dict[int, np.ndarray] = {}

        def at(stage: Stage) -> RunCost:
            peaks = update.peaks_at(stage)  # one array for all places that hold as much, which the Trace keeps
            if id(peaks) not in highest:
                highest[id(peaks)] = np.maximum(least, peaks)
            return highest[id(peaks)].item

        return ByStage(at)

    def phases(self, settings: Settings, placed: Mapping[Role, Placed]) -> list[PhaseBytes]:
        """Each phase of the step in the steady state, on every GPU; of a role on the CPU, what others keep there."""
        return [self._phase(phase, settings, placed) for phase in PHASES if ROLE_OF[phase] in settings.roles]

    def n_blocks(self, role: Role, own: RoleConfig) -> int:
        """Of the role's model: more GPUs than that cannot be used."""
        wanted = pass_of(PHASES_OF[role][-1], own, self.workload)
        return len(self.models.read(own, wanted.weight_dtype)[0].blocks)

    def alone(self, role: Role, own: RoleConfig, n: int) -> Placed:
        """A role on n GPUs that it has to itself, the first ones."""
        return self._cut(role, own, tuple(range(n)), self._room)

    def peak_alone(self, phase: str, settings: Settings, held: Placed) -> int:
        """The largest bytes of a phase on the GPUs of `held`, without what other roles keep there."""
        return max(self._active(phase, holder_of(phase, settings)[1], held).values())

    def _phase(self, phase: str, settings: Settings, placed: Mapping[Role, Placed]) -> PhaseBytes:
        role = ROLE_OF[phase]
        holder, own = holder_of(phase, settings)
        active = self._active(phase, own, placed[holder]) if holder in placed else {}
        others = dict.fromkeys(range(len(self.inventory)), 0)  # of a thousand GPUs most are not touched
        for name, other in placed.items():
            for gpu, size in other.resident.items() if name != holder else ():
                others[gpu] += size
        peaks = dict(others)
        for gpu, size in active.items():
            peaks[gpu] += size
        return PhaseBytes(phase, role, peaks, others)

    def _active(self, phase: str, own: RoleConfig, held: Placed) -> Mapping[int, int]:
        """Bytes of the role's own GPUs at the peak of a phase: the traced pass, and states that it does not touch."""
        key = (phase, _choices(own), tuple(held.runs.items()))
        if key not in self._peaks:
            wanted = pass_of(phase, own, self.workload)
            traced = self.models.trace(own, wanted)
            workspace = _workspaces(traced)
            self._peaks[key] = {
                gpu: traced.peak(*run, held.stage_of(gpu))
                + workspace
                + self.untouched(phase, traced, held, gpu)
                - bytes_away(own, traced, held.spec)
                for gpu, run in held.runs.items()
            }
        return self._peaks[key]

    def untouched(self, phase: str, traced: Trace, held: Placed, gpu: int) -> int:
        """Bytes of the optimizer's states while a trained role scores or generates."""
        if phase.startswith("update"):
            return 0
        i, j = held.runs[gpu]
        weights = int(traced.kinds[0, i:j, WEIGHTS].sum())
        return max(held.resident[gpu] - weights, 0)

    def reserved(self, phase: str, gpu: int, settings: Settings, placed: Mapping[Role, Placed]) -> int:
        """What torch's allocator takes from the driver for a phase on one GPU, other roles' bytes included."""
        holder, own = holder_of(phase, settings)
        held = placed.get(holder)
        others = sum(other.resident.get(gpu, 0) for name, other in placed.items() if name != holder)
        if held is None or gpu not in held.runs:
            return others
        key = (phase, _choices(own), gpu, tuple(held.runs.items()))
        if key not in self._reserved:
            wanted = pass_of(phase, own, self.workload)
            traced = self.models.trace(own, wanted)
            spec, _ = self.models.adapted(own, wanted)
            stages = held.stages if wanted.phase == "train" else None
            made = of_blocks(spec, traced, wanted, phase, range(*held.runs[gpu]), stages)
            self._reserved[key] = made.reserved + self.untouched(phase, traced, held, gpu)
            self._reserved[key] -= bytes_away(own, traced, held.spec)
        return others + self._reserved[key]


def _allocated(spec: ModelSpec) -> np.ndarray:
    """Bytes of each Block as the allocator gives them out: a tensor takes a multiple of ROUND."""
    held = np.zeros(len(spec.blocks), dtype=np.int64)
    for tensor in spec.tensors:
        if not tensor.is_alias:
            held[tensor.block] += -(-tensor.n_bytes // ROUND) * ROUND
    return held


def _workspaces(traced: Trace) -> int:
    """What libraries keep once a step was trained: cuBLAS of the main thread and of autograd's, and cuBLASLt's of the main
    one when a product has a bias. They stay through all later phases."""
    biased = bool((traced.recording.of_product == PRODUCT_WITH_BIAS).any())
    return 2 * cublas_workspace().n_bytes + (CUBLAS_LT.n_bytes if biased else 0)


def travels(spec: ModelSpec) -> np.ndarray:
    """(blocks,), bool: which Blocks of a streamed model are on the host. Its embedding and its head stay on the GPU."""
    return np.array([block.kind == "block" for block in spec.blocks])


def bytes_away(own: RoleConfig, traced: Trace, spec: ModelSpec) -> int:
    """Bytes of weights that are not on the GPU when blocks are streamed through it: all blocks but those of `stream_buffers`."""
    if own.offload != "stream" or not travels(spec).any():
        return 0
    blocks = traced.kinds[0, travels(spec), WEIGHTS]
    return max(int(blocks.sum() - buffers_of(spec) * blocks.max()), 0)


def buffers_of(spec: ModelSpec) -> int:
    """The `stream_buffers` of a model; 1 for one without blocks, which offload_model refuses."""
    sizes = np.array([block.weight_bytes for block in spec.blocks])
    blocks, around = sizes[travels(spec)], sizes[~travels(spec)]
    head = int(around.max()) if spec.task == "causal-lm" and len(around) else 0
    return stream_buffers(len(blocks), int(blocks.max()), head) if len(blocks) else 1


def stream_buffers(n_blocks: int, block: int, head: int) -> int:
    """Blocks of a streamed model that are on the GPU at a time: one that computes and two that are copied.

    While a language-model head computes, no block does, and copies stop once all buffers are full: so there is one more for
    each block's worth of weights in the head, and one for the loss. At most half of the blocks.
    """
    more = -(-head // block) + 1 if head else 0
    return max(min(3 + more, n_blocks // 2), min(2, n_blocks))


def holder_of(phase: str, settings: Settings) -> tuple[Role, RoleConfig]:
    """The role whose module runs a phase, and with which settings: generation and, with LoRA, the reference are the actor's."""
    role = ROLE_OF[phase]
    own = settings.roles[role]
    if role == "rollout":
        actor = settings.roles["actor"]
        return "actor", replace(actor, micro_batch_size=own.micro_batch_size)
    if role == "ref" and settings.ref_in_actor:
        # The adapters stay in memory, switched off; the weights are the actor's, at its precision.
        return "actor", replace(settings.roles["actor"], micro_batch_size=own.micro_batch_size)
    return role, own


def _choices(own: RoleConfig) -> tuple[Any, ...]:
    """What of a configuration decides its memory, hashable."""
    model = own.model if isinstance(own.model, str) else id(own.model)
    return (
        model, own.task, own.precision, own.optimizer, own.attn_implementation, own.gradient_checkpointing,
        own.micro_batch_size, own.in_flight, own.lora_rank, own.logits, own.offload,
    )  # fmt: skip
