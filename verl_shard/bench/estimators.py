"""What other estimators say of a pass: the peak in bytes, or None where they have no figure for it.

Each is asked as its own documents ask it. Those that are packages are run as they are; one that is not installed is
left out, and said so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Asked:
    """What is estimated: a model by its configuration, and a pass of it. fields: of PassSpec."""

    config: Any
    phase: str
    fields: Mapping[str, Any]

    @cached_property
    def model(self) -> Any:
        """On meta, in bf16."""
        from verl_shard.bench.rivals import build_from

        return build_from(self.config, "AutoModelForCausalLM")

    @property
    def n_parameters(self) -> int:
        """Shared ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def mixed(self) -> bool:
        return self.phase == "train" and self.fields.get("precision", "bf16-mixed") == "bf16-mixed"


def accelerate(asked: Asked) -> int | None:
    """`accelerate estimate-memory`: four times the weights for training with Adam, the weights for inference."""
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(asked.model)
    if asked.phase != "train":
        return int(total)
    return int(total * (2 if asked.mixed else 1) * 4)


def deepspeed(asked: Asked) -> int | None:
    """DeepSpeed's estimate_zero2_model_states_mem_needs for one GPU and no offload: 2 + 18 bytes a parameter.

    Formula: deepspeed/runtime/zero/stage_1_and_2.py of 0.19.8. It says of itself that it leaves activations out.
    """
    return 20 * asked.n_parameters if asked.phase == "train" else None


def gpu_estimator(asked: Asked) -> int | None:
    """The package gpu-estimator: GPUEstimator().estimate(...).total_memory_gb, which it gives for training only."""
    if asked.phase != "train":
        return None
    estimate = importlib.import_module("gpu_estimator.estimator").GPUEstimator().estimate
    said = estimate(
        model_params=asked.n_parameters,
        batch_size=asked.fields["batch_size"],
        sequence_length=asked.fields["seq_len"],
        precision="fp32" if asked.mixed else "bf16",
        optimizer="sgd" if asked.fields.get("optimizer") == "sgd" else "adamw",
        gradient_checkpointing=bool(asked.fields.get("gradient_checkpointing")),
    )
    return int(said.total_memory_gb * GIB)


def hf_vram_calc(asked: Asked) -> int | None:
    """The package hf-vram-calc: its training memory; otherwise its inference memory, and the cache when generating."""
    package = importlib.import_module("hf_vram_calc")
    calculator = package.VRAMCalculator(package.ConfigManager())
    dtype = "fp32" if asked.mixed else "bf16"
    weights = calculator.calculate_model_memory(asked.n_parameters, dtype)
    if asked.phase == "train":
        return int(calculator.calculate_training_memory(weights) * GIB)
    needed = calculator.calculate_inference_memory(weights)
    if asked.phase == "generate":
        config, fields = asked.config, asked.fields
        shape = package.ModelConfig(
            model_name=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None),
        )
        length = fields["seq_len"] + fields.get("new_tokens", 0)
        needed += calculator.calculate_kv_cache_memory(shape, dtype, fields["batch_size"], length)
    return int(needed * GIB)


def mem_tracker(asked: Asked) -> int | None:
    """torch.distributed._tools.mem_tracker.MemTracker over two steps on tensors without memory: training only.

    On the CPU, where a build without CUDA can run it, with the optimizer that a GPU would choose.
    """
    if asked.phase != "train":
        return None
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import AutoModelForCausalLM

    fields = asked.fields
    with FakeTensorMode():
        model: Any = AutoModelForCausalLM.from_config(
            asked.config,
            dtype=torch.float32 if asked.mixed else torch.bfloat16,
            attn_implementation=fields.get("attn_implementation", "sdpa"),
        )
        model.train()
        if fields.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kind = fields.get("optimizer", "adamw")
        optimizer: torch.optim.Optimizer
        if kind == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), foreach=True)
        else:
            fused = kind == "adamw-fused"
            optimizer = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
        ids = torch.zeros(fields["batch_size"], fields["seq_len"], dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()  # of its modules; the peak stays
                with torch.autocast("cpu", torch.bfloat16) if asked.mixed else nullcontext():
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del loss
        peaks = tracker.get_tracker_snapshot("peak")
    return sum(int(sizes["Total"]) for sizes in peaks.values())


@dataclass(frozen=True)
class Estimator:
    """name: as people know it. package: what has to be importable, and how it is installed, where that is needed."""

    name: str
    of: Callable[[Asked], int | None]
    package: str | None = None
    distribution: str | None = None
    slow: bool = False
    """Takes many times what our own takes: asked only by name."""

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


ESTIMATORS = (
    Estimator("accelerate estimate-memory", accelerate),
    Estimator("DeepSpeed ZeRO formula", deepspeed),
    Estimator("gpu-estimator", gpu_estimator, "gpu_estimator", "gpu-estimator"),
    Estimator("hf-vram-calc", hf_vram_calc, "hf_vram_calc", "hf-vram-calc"),
    Estimator("torch MemTracker", mem_tracker, slow=True),
)


def to_ask(*, slow: bool) -> tuple[list[Estimator], list[Estimator]]:
    """Those that can be asked here, and those that are not installed."""
    wanted = [estimator for estimator in ESTIMATORS if slow or not estimator.slow]
    return [e for e in wanted if e.installed], [e for e in wanted if not e.installed]
