"""RoleConfig and ResourceConfig: what somebody asks for of each role; what is left blank is for the planner."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.device_ids import parse_device_ids
from verl_shard.config.validated import config_class

Role = Literal["actor", "critic", "ref", "reward", "rollout"]
ROLES: tuple[Role, ...] = ("actor", "critic", "ref", "reward", "rollout")
TRAINED: tuple[Role, ...] = ("actor", "critic")
PHASE_OF_PASS: dict[tuple[str, str], str] = {
    ("rollout", "generate"): "generate",
    ("reward", "forward"): "reward",
    ("actor", "forward"): "old_log_prob",
    ("ref", "forward"): "ref_log_prob",
    ("critic", "forward"): "values",
    ("critic", "train"): "update_critic",
    ("actor", "train"): "update_actor",
}
"""verl's name for the phase of a step in which a role's model runs a pass."""
Backend = Literal["device_map", "fsdp", "fsdp2"]
Offload = Literal["none", "stream", "cpu_offload", "cpu_offload_with_hook", "auto"]
Logits = Literal["responses", "full", "chunked", "fused"]
Count = Annotated[int, Field(ge=1, strict=True)]
# Strict: true is no number and 1 is not yes; YAML tells them apart.
Flag = Annotated[bool, Field(strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Size = Annotated[int, Field(strict=True)] | str


def _devices(value: Any) -> tuple[int, ...] | int | None:
    found = parse_device_ids(value)
    if isinstance(found, int) and found < 1:
        raise ValueError(f"a number is how many GPUs, and {found} of them is none: write [0] for GPU 0, or 1 or more")
    return found


Devices = Annotated[
    tuple[int, ...] | Count | None,
    BeforeValidator(_devices, json_schema_input_type=list[int | str] | Count | str | None),
]
Strategy = Literal["none", "device_map", "data_parallel", "fsdp", "fsdp2", "vllm", "sglang", "hf"]
_TRAINED_ONLY = ("optimizer", "gradient_checkpointing", "lora_rank", "optimizer_offload", "offload_policy", "in_flight")


@config_class
class VllmArgs:
    """Arguments of the vLLM engine by vLLM's names. None is verl's default."""

    tensor_parallel_size: Count | None = Field(default=None, description="GPUs that one engine spans.")
    gpu_memory_utilization: Share | None = Field(default=None, description="Share of a GPU that the engine takes.")
    enforce_eager: Flag | None = Field(default=None, description="Without CUDA graphs: less memory, slower.")
    max_model_len: Count | None = Field(default=None, description="Longest sequence, in tokens.")
    max_num_seqs: Count | None = Field(default=None, description="Sequences that are generated at once.")
    max_num_batched_tokens: Count | None = Field(default=None, description="Tokens of one forward of the engine.")
    enable_prefix_caching: Flag | None = Field(default=None, description="Prompts that begin alike are computed once.")
    enable_chunked_prefill: Flag | None = Field(default=None, description="Long prompts are computed in parts.")
    engine_kwargs: dict[str, Any] | None = Field(
        default=None, description="Any other argument of vLLM's engine, handed on without a check."
    )


@config_class
class RoleConfig:
    """One role. None is for the planner to choose. Raises ConfigError with every fault at once."""

    model: Any = Field(
        default=None, description="Folder, hub id, PretrainedConfig or module; the actor's where it is None."
    )
    task: Literal["causal-lm", "reward", "process-reward", "value"] | None = Field(
        default=None, description="By default what the role computes."
    )
    device_type: Literal["cuda", "cpu"] | None = Field(
        default=None, description="cpu keeps a scoring role off the GPUs."
    )
    devices: Devices = Field(default=None, description='GPU ids ([0, 1] or "0-3"), or how many (2).')
    strategy: Strategy | None = Field(default=None, description="How the role uses its devices.")
    vllm_args: VllmArgs | None = Field(default=None, description="Of strategy vllm: arguments of the engine.")
    precision: Literal["bf16-mixed", "bf16", "fp32"] | None = Field(
        default=None, description="bf16-mixed for trained roles and bf16 for scoring ones unless given."
    )
    optimizer: Literal["adamw", "adamw-fused", "sgd"] | None = Field(default=None, description="verl's is adamw.")
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager"] | None = Field(
        default=None, description="eager holds every score; the others do not."
    )
    gradient_checkpointing: Flag | None = Field(
        default=None, description="Saves most activation memory, for a third more compute."
    )
    micro_batch_size: Count | None = Field(
        default=None, description="Sequences in one forward (and backward) on a GPU."
    )
    in_flight: Count | None = Field(
        default=None, description="Micro-batches between the begin of their forward and their backward at a time."
    )
    lora_rank: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        default=None, description="Train adapters of this rank: saves the gradients and states of the weights."
    )
    logits: Logits | None = Field(
        default=None,
        description="responses (device_map) makes none of prompts; fused and chunked never hold tokens x vocabulary at once.",
    )
    offload: Offload | None = Field(
        default=None, description="Keep the weights of a scoring role in host memory; stream: of its blocks."
    )
    param_offload: Flag | None = Field(
        default=None, description="fsdp: weights are in host memory outside of the role's phases."
    )
    optimizer_offload: Flag | None = Field(default=None, description="fsdp: optimizer states too.")
    offload_policy: Flag | None = Field(
        default=None, description="fsdp2: weights, gradients and states stay on the host."
    )
    tensor_parallel_size: Count | None = Field(
        default=None, description="GPUs that one rollout engine spans (vllm, sglang)."
    )
    gpu_memory_utilization: Share | None = Field(
        default=None, description="Share of a GPU that the rollout engine takes (vllm, sglang)."
    )

    def __post_init__(self) -> None:
        if isinstance(self.model, bool | int | float | list | tuple | set | dict):
            why = "neither the name of a model nor a model"
            raise ConfigError(
                Finding("error", "not-a-model", "model", str(self.model), why, "Give a folder or a hub id")
            )
        self._take_from_vllm_args()
        if self.device_type == "cpu" and self.devices == ():
            object.__setattr__(self, "devices", None)
        if self.devices == ():
            why, fix = "no GPU is named", "Name some, leave it out, or write device_type: cpu"
            raise ConfigError(Finding("error", "no-device", "devices", "[]", why, fix))
        if self.device_type == "cpu" and self.devices is not None:
            given = str(list(self.devices) if isinstance(self.devices, tuple) else self.devices)
            why = "device_type is cpu"
            raise ConfigError(Finding("error", "device-conflict", "devices", given, why, "Leave out one of them"))
        if isinstance(self.devices, tuple) and len(set(self.devices)) != len(self.devices):
            twice = sorted({i for i in self.devices if self.devices.count(i) > 1})
            why = f"{', '.join(map(str, twice))} is named more than once"
            raise ConfigError(
                Finding("error", "device-twice", "devices", str(list(self.devices)), why, "Name each GPU once")
            )
        if isinstance(self.devices, tuple) and any(i < 0 for i in self.devices):
            raise ConfigError(
                Finding(
                    "error",
                    "device-id",
                    "devices",
                    str(list(self.devices)),
                    "ids count from 0",
                    "Give ids of 0 or more",
                )
            )

    def _take_from_vllm_args(self) -> None:
        """Two arguments have fields of their own here, which other engines have too."""
        inner = self.vllm_args
        if inner is None:
            return
        for name in ("tensor_parallel_size", "gpu_memory_utilization"):
            value, own = getattr(inner, name), getattr(self, name)
            if value is None:
                continue
            if own not in (None, value):
                raise ConfigError(
                    Finding("error", "key-twice", name, str(own), f"vllm_args says {value}", "Leave out one of them")
                )
            object.__setattr__(self, name, value)
        rest = replace(inner, tensor_parallel_size=None, gpu_memory_utilization=None)
        empty = all(getattr(rest, item.name) is None for item in fields(VllmArgs))
        object.__setattr__(self, "vllm_args", None if empty else rest)


def _nodes(value: Any) -> Any:
    return {"count": value} if isinstance(value, int) and not isinstance(value, bool) else value


@config_class
class Nodes:
    """The machines: GPU ids count over them. What is None is not said."""

    count: Count = Field(default=1, description="How many machines, all alike.")
    gpus: Count | None = Field(default=None, description="GPUs in each.")
    card: str | None = Field(default=None, description='Which, such as "a100-80g": to plan on another machine.')
    memory: Size | None = Field(default=None, description='Or the memory of each, such as "80GiB".')
    host_memory: Size | None = Field(default=None, description='RAM of each machine, such as "512GiB".')


@config_class
class ResourceConfig:
    """Roles with blanks. Raises ConfigError with every fault at once."""

    actor: RoleConfig
    critic: RoleConfig | None = None
    ref: RoleConfig | None = None
    reward: RoleConfig | None = None
    rollout: RoleConfig | None = None
    backend: Backend = Field(
        default="device_map",
        description="Who holds the weights: device_map is this package's engine; fsdp, fsdp2 verl's.",
    )
    colocation: Literal["shared", "separate"] | tuple[tuple[Role, ...], ...] | None = Field(
        default=None,
        description="Which components share GPUs: groups such as [[actor, ref], [reward]]; separate gives each its own. "
        "[shared: any GPU may be named by several]",
    )
    comm_backend: Literal["nccl", "gloo", "nixl", "mooncake"] | None = Field(
        default=None, description="How weights go to a rollout on GPUs of its own (verl's checkpoint_engine). [nccl]"
    )
    timeout_seconds: Count | None = Field(default=None, description="How long one process waits for another.")
    nodes: Annotated[Nodes | None, BeforeValidator(_nodes, json_schema_input_type=Nodes | Count | None)] = Field(
        default=None, description="The machines, or how many."
    )

    def __post_init__(self) -> None:
        faults = []
        for role in ("ref", "reward", "rollout"):
            own: RoleConfig | None = getattr(self, role)
            for name in _TRAINED_ONLY if own is not None else ():
                if getattr(own, name) not in (None, False, 0):
                    why = f"the {role} is not trained"
                    faults.append(
                        Finding("error", "no-effect", f"{role}.{name}", str(getattr(own, name)), why, "Leave it out")
                    )
        for role in TRAINED:
            own = getattr(self, role)
            if own is not None and own.offload not in (None, "none", "auto"):
                why = f"the {role} is trained, and weights kept in host memory are copied in for a forward only"
                fix = "Leave it out; gradient_checkpointing, a smaller micro_batch_size, lora_rank or more GPUs lower its memory"
                faults.append(
                    Finding("error", "offloaded-and-trainable", f"{role}.offload", str(own.offload), why, fix)
                )
            if own is not None and own.device_type == "cpu":
                why = f"{'an' if role == 'actor' else 'a'} {role} beside GPUs is trained on them"
                faults.append(Finding("error", "trained-on-cpu", f"{role}.device_type", "cpu", why, "Leave it out"))
        if faults:
            raise ConfigError(faults)

    @property
    def roles(self) -> dict[Role, RoleConfig]:
        """Those that there are, by name."""
        return {role: getattr(self, role) for role in ROLES if getattr(self, role) is not None}

    @property
    def model_config(self) -> dict[str, dict[str, Any]]:
        """By role, what PPOTrainer's `model_config` takes; strategies of verl alone become ours, which a notice says."""
        from verl_shard.config.resource_local import model_config_of

        return model_config_of(self)
