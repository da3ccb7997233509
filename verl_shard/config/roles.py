"""RoleConfig and ResourceConfig: what somebody asks for of each role; what is left blank is for the planner."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.validated import config_class

Role = Literal["actor", "critic", "ref", "reward", "rollout"]
ROLES: tuple[Role, ...] = ("actor", "critic", "ref", "reward", "rollout")
TRAINED: tuple[Role, ...] = ("actor", "critic")
Backend = Literal["device_map", "fsdp", "fsdp2"]
Offload = Literal["none", "stream", "cpu_offload", "cpu_offload_with_hook", "auto"]
Logits = Literal["full", "chunked", "fused"]
Count = Annotated[int, Field(ge=1)]
_TRAINED_ONLY = ("optimizer", "gradient_checkpointing", "lora_rank", "optimizer_offload", "offload_policy", "in_flight")


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
    devices: tuple[int, ...] | Count | None = Field(default=None, description="GPU ids, or how many.")
    strategy: Literal["none", "device_map", "data_parallel", "fsdp", "fsdp2", "vllm", "sglang", "hf"] | None = Field(
        default=None, description="How the role uses its devices."
    )
    precision: Literal["bf16-mixed", "bf16", "fp32"] | None = Field(
        default=None, description="bf16-mixed for trained roles and bf16 for scoring ones unless given."
    )
    optimizer: Literal["adamw", "adamw-fused", "sgd"] | None = Field(default=None, description="verl's is adamw.")
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager"] | None = Field(
        default=None, description="eager holds every score; the others do not."
    )
    gradient_checkpointing: bool | None = Field(
        default=None, description="Saves most activation memory, for a third more compute."
    )
    micro_batch_size: Count | None = Field(
        default=None, description="Sequences in one forward (and backward) on a GPU."
    )
    in_flight: Count | None = Field(
        default=None, description="Micro-batches whose forwards are issued before a backward."
    )
    lora_rank: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Train adapters of this rank: saves the gradients and states of the weights."
    )
    logits: Logits | None = Field(
        default=None, description="fused or chunked log-probabilities never hold tokens x vocabulary at once."
    )
    offload: Offload | None = Field(default=None, description="Keep the weights of a scoring role in host memory.")
    param_offload: bool | None = Field(
        default=None, description="fsdp: weights are in host memory outside of the role's phases."
    )
    optimizer_offload: bool | None = Field(default=None, description="fsdp: optimizer states too.")
    offload_policy: bool | None = Field(
        default=None, description="fsdp2: weights, gradients and states stay on the host."
    )
    tensor_parallel_size: Count | None = Field(
        default=None, description="GPUs that one rollout engine spans (vllm, sglang)."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Share of a GPU that the rollout engine takes (vllm, sglang)."
    )

    def __post_init__(self) -> None:
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


@config_class
class ResourceConfig:
    """Roles with blanks. Raises ConfigError with every fault at once."""

    actor: RoleConfig
    critic: RoleConfig | None = None
    ref: RoleConfig | None = None
    reward: RoleConfig | None = None
    rollout: RoleConfig | None = None
    backend: Backend = "device_map"

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
                why = f"a {role} beside GPUs is trained on them"
                faults.append(Finding("error", "trained-on-cpu", f"{role}.device_type", "cpu", why, "Leave it out"))
        if faults:
            raise ConfigError(faults)

    @property
    def roles(self) -> dict[Role, RoleConfig]:
        """Those that there are, by name."""
        return {role: getattr(self, role) for role in ROLES if getattr(self, role) is not None}
