"""The phases of a PPO or GRPO step of stock verl, colocated (trainer mode "sync"): bytes on each GPU and on each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.roles import Role, RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.memory.constants import CUDA_CONTEXT, cublas_workspace
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.stock import terms
from verl_shard.memory.stock.host import host_parts, load_part
from verl_shard.memory.stock.micro_batch import Traces, record_micro_batch
from verl_shard.memory.stock.part import Part
from verl_shard.memory.stock.roles import StockRole, micro_batch_of
from verl_shard.memory.stock.timeline import Peak, peak_of
from verl_shard.memory.stock.units import ShardedBackend, units_of
from verl_shard.models.spec import ModelSpec

PHASES = (
    "init", "generate", "sleep", "reward", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor",
    "weight_sync",
)  # fmt: skip
_SHARDED: tuple[Role, ...] = ("actor", "critic", "ref")
OUTSIDE = ("rollout engine", "reward engine", "beside torch")
"""Parts that the trainer's own allocator does not hold."""


@dataclass(frozen=True)
class PhaseRow:
    """One phase in the steady state (from the second step on), on the fullest rank.

    parts: what is on the GPU at the fullest moment. host: what is in the memory of a node. A part of no bytes is left out.
    """

    phase: str
    role: str
    parts: tuple[Part, ...]
    host: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """On each GPU."""
        return sum(part.n_bytes for part in self.parts)

    @property
    def allocated(self) -> int:
        """Of these, what torch.cuda.max_memory_allocated of the trainer's process says."""
        return sum(part.n_bytes for part in self.parts if part.name not in OUTSIDE)

    @property
    def host_bytes(self) -> int:
        """On each node."""
        return sum(part.n_bytes for part in self.host)

    @property
    def measured(self) -> bool:
        """Whether terms of all parts were measured."""
        return all(part.measured for part in (*self.parts, *self.host))

    def part(self, name: str) -> int:
        """Bytes of the parts of a name on the GPU; 0 where there is none."""
        return sum(part.n_bytes for part in self.parts if part.name == name)


def stock_phases(
    models: Mapping[Role, tuple[ModelSpec, nn.Module]],
    roles: Mapping[Role, RoleConfig],
    workload: Workload,
    *,
    backend: ShardedBackend,
    n_ranks: int,
    ranks_per_node: int,
    card_memory: int,
    flash_attn: bool | None = None,
    temperature: float = 1.0,
    entropy_loss: bool = False,
    compiled: bool = True,
    traces: Traces | None = None,
) -> list[PhaseRow]:
    """Every phase of a step with these roles, in order.

    models: for each sharded role what `read_model` gives; a ref without an entry has the actor's. The dtype they were
        read in does not matter: precision of the role decides.
        A reward has one too, for what its server keeps on the host.
    roles: actor, and critic, ref, reward (a colocated server), rollout where there are some; a critic's
        micro_batch_size None is verl's own budget of 32768 tokens, and a number stands for
        +critic.ppo_infer_max_token_len_per_gpu = micro_batch_size x sequence length.
    n_ranks: GPUs, one rank each, which are one shard group (fsdp_size=-1). card_memory: bytes of a card.
    flash_attn: whether flash-attn is installed, whose cross-entropy verl takes; by default where a role's
        attn_implementation is flash_attention_2 or blank. temperature: of the rollout.
    entropy_loss: actor.entropy_coeff != 0 or calculate_entropy. compiled: fsdp_config.use_torch_compile.
    traces: recordings to keep between calls; a change of sharding, offloads or ranks alone needs no new one.

    logits: "chunked" is entropy_from_logits_with_chunking, "fused" use_fused_kernels with the torch backend.
    Raises ConfigError with every fault: what verl would ignore or refuse, or a model that cannot be traced.
    """
    _check(models, roles, backend, n_ranks)
    if flash_attn is None:
        flash_attn = has_flash_attn(roles)
    settings = {
        "flash_attn": flash_attn, "temperature": temperature, "entropy_loss": entropy_loss, "compiled": compiled,
    }  # fmt: skip
    apart = {"ref"} if roles["actor"].lora_rank else set()  # the actor without its adapters is the reference
    kept = Traces() if traces is None else traces
    made = {
        role: _role(role, models, own, backend, n_ranks, kept)
        for role, own in roles.items()
        if role in _SHARDED and role not in apart
    }
    n_reward = models["reward"][0].n_params if "reward" in models else 0
    step = _Step(made, roles, workload, n_reward, n_ranks, min(ranks_per_node, n_ranks), card_memory, settings, kept)
    return step.rows()


def has_flash_attn(roles: Mapping[Role, RoleConfig]) -> bool:
    """Whether flash-attn is taken to be installed: a sharded role's attention is its own, or blank, which is that."""
    return any(roles[r].attn_implementation in (None, "flash_attention_2") for r in _SHARDED if r in roles)


def _check(
    models: Mapping[Role, tuple[ModelSpec, nn.Module]],
    roles: Mapping[Role, RoleConfig],
    backend: ShardedBackend,
    n_ranks: int,
) -> None:
    faults: list[Finding] = []

    def fault(code: str, where: str, given: object, why: str, fix: str) -> None:
        faults.append(Finding("error", code, where, str(given), why, fix))

    if "actor" not in roles:
        fault("no-actor", "roles", ", ".join(roles), "a step trains an actor", "Give one")
    for role in _SHARDED:
        own = roles.get(role)
        if own is None:
            continue
        if role not in models and not (role == "ref" and "actor" in models):
            fault("no-model", f"{role}.model", None, "there is no model for it", "Give one")
        if role != "critic" and own.micro_batch_size is None:
            fault("blank", f"{role}.micro_batch_size", None, "it is blank, and verl has no default", "Give a number")
        if own.offload_policy and backend == "fsdp":
            why = "verl ignores it with strategy=fsdp"
            fault("no-effect", f"{role}.offload_policy", True, why, 'Use backend="fsdp2", or leave it out')
        if own.offload_policy and (own.param_offload or own.optimizer_offload):
            why = "offload_policy switches param_offload and optimizer_offload off"
            fault("no-effect", f"{role}.param_offload", True, why, "Leave one of them out")
    rollout = roles.get("rollout")
    parallel = (rollout.tensor_parallel_size or 1) if rollout is not None else 1
    if n_ranks % parallel:
        why = f"{n_ranks} GPUs are not divided by it"
        fault("not-divided", "rollout.tensor_parallel_size", parallel, why, f"Give a divisor of {n_ranks}")
    if faults:
        raise ConfigError(faults)


def _role(
    role: Role,
    models: Mapping[Role, tuple[ModelSpec, nn.Module]],
    own: RoleConfig,
    backend: ShardedBackend,
    n_ranks: int,
    traces: Traces,
) -> StockRole:
    spec, module = models[role] if role in models else models["actor"]
    tied = getattr(getattr(module, "config", None), "tie_word_embeddings", None)
    if own.lora_rank:
        checkpointing = own.gradient_checkpointing is not False
        adapters = PassSpec(lora_rank=own.lora_rank, precision="bf16", gradient_checkpointing=checkpointing)
        spec, module = traces.adapted(spec, module, adapters)
    return StockRole(role, spec, module, own, units_of(spec, backend, tied=tied), backend, n_ranks)


@dataclass(frozen=True)
class _Step:
    """Makes the rows."""

    made: Mapping[Role, StockRole]
    roles: Mapping[Role, RoleConfig]
    workload: Workload
    n_reward: int
    n_ranks: int
    on_node: int
    card: int
    settings: Mapping[str, Any]
    traces: Traces

    def rows(self) -> list[PhaseRow]:
        makers: dict[str, tuple[Role, Callable[[], list[Part]]]] = {
            "init": ("rollout", self._init),
            "generate": ("rollout", self._generate),
            "sleep": ("rollout", self._sleep),
            "reward": ("reward", self._reward),
            "old_log_prob": ("actor", lambda: self._score("actor", "old_log_prob")),
            "ref_log_prob": ("ref", self._ref),
            "values": ("critic", lambda: self._score("critic", "values")),
            "update_critic": ("critic", lambda: self._update("critic", "update_critic")),
            "update_actor": ("actor", lambda: self._update("actor", "update_actor")),
            "weight_sync": ("actor", self._weight_sync),
        }
        there = {"init": True, "sleep": "rollout" in self.roles, "weight_sync": "rollout" in self.roles}
        host = host_parts(self.made, self.roles, self.n_reward, self.on_node)
        load = load_part(self.made, self.on_node)
        found = []
        for phase, (role, make) in makers.items():
            own = there.get(phase, role in self.roles)
            if phase == "ref_log_prob":
                own = own or (bool(self.roles["actor"].lora_rank) and self.workload.kl != "none")
            if own:
                stale = Part("not given back", self._stale(phase), "formula", self._one)
                parts = tuple(part for part in (*make(), stale) if part.n_bytes)
                held = (*host, load) if phase == "init" else host
                found.append(PhaseRow(phase, role, parts, held))
        return found

    def _stale(self, phase: str) -> int:
        """On one GPU fsdp gives bf16 weights that it moves to the host not back: nothing is cast and nothing resharded, so
        that the modules' parameters stay views of what was on the GPU. Found on an H200 (docs/results/h200_stock.json);
        fp32 weights and several ranks have other storages to view."""
        if phase in ("init", "generate", "sleep"):
            return 0
        left = [role for role in self.made.values() if role.views_stay and role.own.param_offload]
        scored = "ref" in self.made and self.made["ref"].views_stay and phase in ("ref_log_prob", "values")
        return sum(role.weights for role in left) + (self.made["ref"].weights if scored else 0)

    # Parts that several phases have

    @property
    def _one(self) -> bool:
        """One rank: what `verl-shard bench stock` measures."""
        return self.n_ranks == 1

    def _others(self, but: Role | None, left: Iterable[Role] = ()) -> list[Part]:
        """What the other sharded roles hold, and roots that stayed gathered."""
        idle = sum(role.idle for name, role in self.made.items() if name != but)
        roots = sum(self.made[name].root_left for name in left if name in self.made)
        return [
            Part("other roles", idle, "formula", self._one),
            Part("roots left gathered", roots, "formula", False),
        ]

    def _beside(self) -> list[Part]:
        """What is on the card outside of the trainer's allocator while no engine is awake."""
        workspace = Part("cuBLAS workspaces", 2 * cublas_workspace().n_bytes, "formula", True)
        if "rollout" in self.roles or "reward" in self.roles:
            return [workspace, Part("beside torch", terms.BESIDE_TORCH.n_bytes, "formula", False)]
        return [workspace, Part("beside torch", CUDA_CONTEXT.n_bytes, "formula", True)]

    def _engine(self, role: Role) -> int:
        share = self.roles[role].gpu_memory_utilization if role in self.roles else None
        return terms.rollout_engine(share, self.card) if share is not None else 0

    def _kept_roots(self) -> tuple[Role, ...]:
        """Roots that stay from one step to the next: nothing of a ref is ever resharded by a backward."""
        return ("ref",)

    # Phases

    def _init(self) -> list[Part]:
        """Critic, then ref and actor, then the engines: vLLM starts beside the weights that are not offloaded."""
        resident = sum(role.weights * role.weights_stay for role in self.made.values())
        engines = max(self._engine("rollout"), self._engine("reward"))
        return [
            Part("weights", resident, "formula", self._one),
            Part("rollout engine", engines, "formula", False),
            *self._beside(),
        ]

    def _generate(self) -> list[Part]:
        return [
            Part("rollout engine", self._engine("rollout"), "formula", False),
            *self._others(None, self._kept_roots()),
            *self._beside(),
        ]

    def _sleep(self) -> list[Part]:
        return [*self._others(None, self._kept_roots()), *self._beside()]

    def _reward(self) -> list[Part]:
        return [Part("reward engine", self._engine("reward"), "formula", False), *self._sleep()]

    def _ref(self) -> list[Part]:
        return self._score("ref" if "ref" in self.made else "actor", "ref_log_prob")

    def _score(self, name: Role, phase: str) -> list[Part]:
        role = self.made[name]
        micro, _ = micro_batch_of(role, phase, self.workload, **self.settings)
        peak = peak_of(record_micro_batch(role.spec, role.module, micro, self.traces), role.units, role.sharding)
        left: dict[str, tuple[Role, ...]] = {
            "old_log_prob": ("ref",), "ref_log_prob": ("actor",), "values": ("actor", "ref"),
        }  # fmt: skip
        return [
            Part("weights", 0 if role.on_host else role.weights, "formula", self._one),
            Part("optimizer", role.states * role.states_stay, "formula", self._one),
            *self._traced(peak),
            *self._others(name, left[phase] if name != "actor" or phase == "old_log_prob" else ()),
            *self._beside(),
        ]

    def _update(self, name: Role, phase: str) -> list[Part]:
        """The fullest of the first micro-batch, a later one, and the optimizer's step; offloads change none of them."""
        role = self.made[name]
        micro, several = micro_batch_of(role, phase, self.workload, **self.settings)
        recording = record_micro_batch(role.spec, role.module, micro, self.traces)
        peaks = [peak_of(recording, role.units, role.sharding, later=later) for later in {False, several}]
        fullest = max(peaks, key=lambda peak: peak.n_bytes)
        at_step = 0 if role.on_host else role.gradients + role.temporaries
        if at_step > fullest.n_bytes:
            moment = [
                Part("gradients", role.gradients, "formula", self._one),
                Part("foreach", role.temporaries, "formula", self._one),
            ]
        else:
            moment = self._traced(fullest)
        left: tuple[Role, ...] = ("actor", "ref") if name == "critic" else ("ref",)
        return [
            Part("weights", 0 if role.on_host else role.weights, "formula", self._one),
            Part("optimizer", 0 if role.on_host else role.states, "formula", self._one),
            *moment,
            *self._others(name, left),
            *self._beside(),
        ]

    def _traced(self, peak: Peak) -> list[Part]:
        return [Part(name, size, "trace", self._one) for name, size in peak.parts.items()]

    def _weight_sync(self) -> list[Part]:
        """The engine's weights are mapped first; fsdp brings its shard back for state_dict, fsdp2 a tensor at a time."""
        role = self.made["actor"]
        rollout = self.roles["rollout"]
        root = role.units.units[role.units.root].n_params
        if role.backend == "fsdp":
            shard, export = role.weights, terms.exported_fsdp(
                role.units.n_params, role.aliases, role.ranks, role.held, root=root, layer=role.largest_layer
            )  # fmt: skip
        else:
            shard = role.weights if role.weights_stay else role.held * terms.shard(role.largest_tensor, role.ranks)
            export = terms.exported_fsdp2(role.largest_tensor, role.ranks, role.held)
        engine = terms.engine_weights(role.units.n_params, rollout.tensor_parallel_size or 1)
        return [
            Part("rollout engine", engine, "formula", False),
            Part("weights", shard, "formula", self._one),
            Part("optimizer", role.states * role.states_stay, "formula", self._one),
            Part("export", export, "formula", self._one),
            Part("weight bucket", terms.BUCKET.n_bytes, "formula", False),
            *self._others("actor", self._kept_roots()),
            *self._beside(),
        ]
