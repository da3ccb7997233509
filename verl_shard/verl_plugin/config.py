"""verl's configuration classes for the device_map engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from verl.workers.config import ActorConfig, CriticConfig, FSDPEngineConfig
from verl.workers.config.engine import EngineConfig

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.roles import Offload

PRECISIONS = ("bf16-mixed", "bf16", "fp32")
ROLES = ("actor", "critic", "ref")
OFFLOADS = get_args(Offload)
ALLOCATORS = ("auto", "off")
LOGITS = ("responses", "full")

# What FSDPEngineConfig brings and this engine does not read; each with what to write instead.
_UNUSED = {
    "param_offload": "this engine keeps its weights where the device_map puts them",
    "optimizer_offload": "this engine keeps optimizer states beside their weights",
    "offload_policy": "that is FSDP2's; this engine keeps its weights where the device_map puts them",
    "fsdp_size": "set trainer.n_gpus_per_node, the number of processes; each takes its own GPUs",
    "reshard_after_forward": "this engine shards by layer and gathers nothing",
    "forward_prefetch": "this engine shards by layer and gathers nothing",
    "use_orig_params": "this engine always has the model's own parameters",
    "wrap_policy": "this engine wraps nothing",
    "model_dtype": "set precision",
    "mixed_precision": "set precision",
    "dtype": "set precision",
    "ulysses_sequence_parallel_size": "this engine has no sequence parallelism; leave it at 1",
    "use_no_sync_for_gradient_accumulation": "this engine communicates once for every optimizer step anyway",
}


@dataclass
class DeviceMapEngineConfig(FSDPEngineConfig):
    """One transformers model over the GPUs of one process.

    role: which role this engine plays: "actor", "critic" or "ref"; it names the entry of `plan`.
    device_map: "balanced", or a map from module name to GPU id (or "cpu"), as transformers takes it.
    plan: a plan.yaml; when given, the role's device_map and precision are taken from it.
    precision: "bf16-mixed" (fp32 weights, bf16 autocast), "bf16" (half the weights' memory; pure bf16 training
        loses small updates) or "fp32". By default bf16-mixed for trainable roles and bf16 for scoring roles on CUDA,
        fp32 on the CPU.
    strict: raise instead of falling back when the attention asked for cannot run.
    copies_on: of a ref, GPU ids: a whole copy of it on each, over which a batch is divided; instead of a device_map.
    max_memory: bytes for each GPU id, or text such as "80GiB"; a balanced map stays under it.
    offload: of a ref, where its weights are between forwards: "stream" keeps its blocks in pinned host memory and copies
        each in while others compute, which frees all but a few blocks' memory and costs no time where a micro-batch
        computes for longer than its weights take over the link; "cpu_offload" and "cpu_offload_with_hook" are
        accelerate's, many times slower; "auto" streams where the GPU has no room; "none".
    in_flight: over several GPUs, micro-batches between the begin of their forward and their backward at a time: as many as
        there are GPUs keep all of them at work. "auto": the plan's; else up to one for each GPU, as memory holds them.
    logits: "responses": of the tokens that responses are read from; "full": of prompts too, as verl's engines make them,
        which costs tokens of prompts x vocabulary in memory, and the head's part of the time for them. It changes nothing
        that training reads: outputs for the tokens of prompts are 0 where they would be log-probabilities. Other losses
        than verl's PPO have all of them.
    allocator: "auto": on GPUs, batches are worked on in smaller pieces while the memory that they need is not free; "off":
        only after it ran out.
    """

    strategy: str = "device_map"
    role: str = "actor"
    device_map: Any = "balanced"
    plan: str | None = None
    precision: str | None = None
    strict: bool = False
    copies_on: Any = None
    max_memory: dict[Any, Any] | None = None
    offload: str = "none"
    in_flight: Any = "auto"
    logits: str = "responses"
    allocator: Any = "auto"
    use_torch_compile: bool = False

    def __post_init__(self) -> None:
        # FSDPEngineConfig's own check knows only FSDP's strategies.
        EngineConfig.__post_init__(self)
        if faults := list(self._faults()):
            raise ConfigError(faults)

    def _faults(self) -> list[Finding]:
        where = f"{self.role}.device_map"
        faults = []

        def fault(code: str, key: str, given: object, why: str, fix: str) -> None:
            faults.append(Finding("error", code, f"{where}.{key}", str(given), why, fix))

        if self.role not in ROLES:
            fault("unknown-role", "role", self.role, "no such role", f"Use one of {', '.join(ROLES)}")
        if self.precision not in (None, *PRECISIONS):
            fault("unknown-precision", "precision", self.precision, "no such precision",
                  f"Use one of {', '.join(PRECISIONS)}, or null for the default")  # fmt: skip
        if self.plan is not None and not Path(self.plan).is_file():
            fault("no-plan", "plan", self.plan, "there is no such file", "Name a plan.yaml, or null")
        if not isinstance(self.device_map, Mapping) and self.device_map not in ("balanced", "auto", "cpu"):
            fault("unknown-device-map", "device_map", self.device_map, "not a device_map",
                  'Use "balanced", or a map from module name to GPU id')  # fmt: skip
        if isinstance(self.device_map, Mapping) and not self.forward_only:
            faults += untrainable(self.device_map, f"{where}.device_map")
        if self.copies_on is not None:
            faults += _faults_of_copies(self, f"{where}.copies_on")
        if self.offload not in OFFLOADS:
            fault("unknown-offload", "offload", self.offload, "no such way", f"Use one of {', '.join(OFFLOADS)}")
        elif self.offload != "none" and self.role != "ref":
            fault("offloaded-and-trainable", "offload", self.offload,
                  f"the {self.role} is trained, and weights kept in host memory are copied in for a forward only",
                  "Leave it out; it is for the ref")  # fmt: skip
        if self.in_flight != "auto" and (type(self.in_flight) is not int or self.in_flight < 1):
            fault(
                "in-flight", "in_flight", self.in_flight, "not a number of micro-batches", 'Give 1 or more, or "auto"'
            )
        if self.logits not in LOGITS:
            fault("unknown-logits", "logits", self.logits, "no such choice",
                  f"Use one of {', '.join(LOGITS)}; fused is actor_rollout_ref.model.use_fused_kernels=true")  # fmt: skip
        if self.allocator not in (*ALLOCATORS, False):  # which is how YAML reads off
            fix = f"Use one of {', '.join(ALLOCATORS)}"
            fault("unknown-allocator", "allocator", self.allocator, "no such choice", fix)
        for item in fields(FSDPEngineConfig):
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if item.name in _UNUSED and getattr(self, item.name) != default:
                fault("unused-key", item.name, getattr(self, item.name), "the device_map engine does not read it",
                      _UNUSED[item.name][0].upper() + _UNUSED[item.name][1:])  # fmt: skip
        if self.qat.get("enable"):
            fault("unused-key", "qat.enable", True, "the device_map engine has no quantisation-aware training",
                  "Set it to false")  # fmt: skip
        return faults


def _faults_of_copies(config: DeviceMapEngineConfig, where: str) -> Iterator[Finding]:
    given = config.copies_on
    plain = isinstance(given, Sequence) and not isinstance(given, str)
    ids = list(given) if plain else []
    said = [
        (config.role != "ref" or not config.forward_only, f"the {config.role} is trained, and copies of it would drift apart",
         "Leave it out; set trainer.n_gpus_per_node, the number of processes, each with a whole model"),
        (not ids or any(type(gpu) is not int or gpu < 0 for gpu in ids), "not a list of GPU ids", "Write [2, 4]"),
        (len(set(map(str, ids))) < len(ids), "a GPU is named twice", "Name each once"),
        (config.device_map not in ("balanced", "auto"), "device_map says where one copy is, and copies_on where several are",
         "Give one of both"),
        (config.plan is not None, "the plan says where the ref is", "Leave it out"),
    ]  # fmt: skip
    shown = str(ids) if plain else str(given)
    yield from (Finding("error", "copies", where, shown, why, fix) for wrong, why, fix in said if wrong)


def not_as_planned(settings: Mapping[str, Any], role: str, engine: Any, model: Any, optimizer: Any) -> list[Finding]:
    """Findings where a plan's `settings` of a role are not what the run was configured with: its memory would differ.

    engine, model, optimizer: verl's configurations of the role.
    """
    trained = not engine.forward_only
    fused = bool((getattr(optimizer, "override_optimizer_config", None) or {}).get("fused"))
    micro = engine.micro_batch_size_per_gpu if trained else engine.infer_micro_batch_size_per_gpu
    part = "critic" if role == "critic" else f"actor_rollout_ref.{role}"
    about = "critic.model" if role == "critic" else "actor_rollout_ref.model"
    size_key = f"{part}.ppo_micro_batch_size_per_gpu" if trained else f"{part}.log_prob_micro_batch_size_per_gpu"
    run: dict[str, tuple[Any, Any, str]] = {
        "micro_batch_size": (settings.get("micro_batch_size"), micro, f"{size_key}={settings.get('micro_batch_size')}"),
        "logits": (
            settings.get("logits") == "fused", bool(model.use_fused_kernels),
            f"{about}.use_fused_kernels={str(settings.get('logits') == 'fused').lower()}",
        ),
    }  # fmt: skip
    if trained:
        wanted = bool(settings.get("gradient_checkpointing"))
        run["gradient_checkpointing"] = (
            wanted, bool(model.enable_gradient_checkpointing),
            f"{about}.enable_gradient_checkpointing={str(wanted).lower()}",
        )  # fmt: skip
        run["lora_rank"] = (
            settings.get("lora_rank") or 0, model.lora_rank or 0, f"{about}.lora_rank={settings.get('lora_rank')}"
        )  # fmt: skip
        run["optimizer"] = (
            settings.get("optimizer") == "adamw-fused", fused,
            f"+{part}.optim.override_optimizer_config.fused={str(settings.get('optimizer') == 'adamw-fused').lower()}",
        )  # fmt: skip
    found = []
    for name, (planned, there, fix) in run.items():
        # Logits that are fused where the plan has them whole take less: verl has one key for actor and reference.
        less = name == "logits" and there
        if name in settings and planned != there and there is not None and not less:
            why = f"the plan has {settings[name]}, and the run is configured otherwise"
            found.append(
                Finding("error", "not-as-planned", f"{role}.{name}", str(there), why, f"Set {fix}, or plan again")
            )
    planned, there = settings.get("logits"), getattr(engine, "logits", "responses")
    if planned == "responses" and there == "full":
        why = "the plan has logits of responses only, and the run is configured otherwise"
        fix = f"Leave out {role}.device_map.logits: it is the plan's"
        found.append(Finding("error", "not-as-planned", f"{role}.logits", there, why, fix))
    planned, there = settings.get("offload"), engine.offload
    if planned is not None and there not in ("none", planned):
        why = f"the plan has {planned}, and the run is configured otherwise"
        fix = f"Leave out {role}.device_map.offload: it is the plan's"
        found.append(Finding("error", "not-as-planned", f"{role}.offload", there, why, fix))
    return found


def untrainable(device_map: Mapping[str, Any], where: str) -> list[Finding]:
    """Findings for modules of a trainable role that accelerate would offload.

    accelerate moves offloaded weights in and out around each forward, so autograd never reaches the copy that stays:
    such layers are silently not trained (accelerate#3785). A model that is wholly on the CPU trains there.
    """
    away = {name: device for name, device in device_map.items() if str(device) in ("cpu", "disk")}
    if not away or (len(away) == len(device_map) and "disk" not in away.values()):
        return []
    names = ", ".join(f"{name} -> {device}" for name, device in list(away.items())[:4])
    more = f" and {len(away) - 4} more" if len(away) > 4 else ""
    return [
        Finding(
            "error", "offloaded-and-trainable", where, names + more,
            "weights offloaded to the host or disk are not trained (accelerate copies them in for the forward only)",
            "Put these modules on GPUs, or use LoRA or fewer micro-batch tokens so that the model fits",
        )
    ]  # fmt: skip


@dataclass
class DeviceMapActorConfig(ActorConfig):
    """Actor or reference policy on the device_map engine."""

    strategy: str = "device_map"
    grad_clip: float = 1.0
    device_map: DeviceMapEngineConfig = field(default_factory=DeviceMapEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False
    ulysses_sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.device_map


@dataclass
class DeviceMapCriticConfig(CriticConfig):
    """Critic on the device_map engine."""

    _mutable_fields = CriticConfig._mutable_fields | {"forward_micro_batch_size", "forward_micro_batch_size_per_gpu"}

    strategy: str = "device_map"
    grad_clip: float = 1.0
    device_map: DeviceMapEngineConfig = field(default_factory=lambda: DeviceMapEngineConfig(role="critic"))
    forward_micro_batch_size: int | None = None
    forward_micro_batch_size_per_gpu: int | None = None
    ulysses_sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.device_map
