"""verl's FSDP engine, or ours, in this process and without Ray: actor, critic and reference of a made model, by phase.

As verl's SFT trainer does it: TrainingWorker with an engine of its registry, world 1. For `verl-shard bench stock`.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import fsdp
from verl.plugin.platform import set_platform
from verl.utils.device import get_device_name

from verl_shard.verl_plugin import hooks
from verl_shard.verl_plugin.local.group import Processes, worker_environment

Role = Literal["actor", "critic", "ref"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One configuration of verl that is run. Fields as verl names them.

    lengths: (prompt, response) tokens of every sequence of a batch, which is one mini-batch.
    """

    folder: Path
    strategy: Literal["fsdp", "fsdp2", "device_map"]
    lengths: Sequence[tuple[int, int]]
    micro_batch_size_per_gpu: int
    model_dtype: Literal["fp32", "bf16"] = "fp32"
    use_remove_padding: bool = False
    enable_gradient_checkpointing: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    use_torch_compile: bool = False
    attn_implementation: str = "sdpa"
    ref_offload: str = "none"
    """Of our engine's reference."""
    use_kl_loss: bool = True
    """Of the actor."""
    precision: str | None = None
    """Of our engine, in the place of model_dtype's."""
    logits: str = "responses"
    """Of our engine's actor and reference."""

    @property
    def token_budget(self) -> int:
        """Tokens in a micro-batch of the critic, which verl batches by tokens only."""
        return self.micro_batch_size_per_gpu * max(sum(pair) for pair in self.lengths)


def forget_engines() -> None:
    """Lets go of the engines of this process, which its rollout would find: their models may then be freed."""
    from verl_shard.verl_plugin.engine import ENGINES

    ENGINES.clear()


@contextmanager
def one_process(device: str) -> Iterator[None]:
    """A process group of this process alone, and verl's platform for `device` ("cuda" or "cpu"). The environment is that of
    a worker without Ray while it lasts."""
    if device == "cpu":
        from verl_shard.verl_plugin.platform_cpu import PlatformCPU

        set_platform(PlatformCPU())
    hooks.silence_absent_engines()
    logging.getLogger("verl").setLevel(logging.ERROR)
    import_early()
    with ExitStack() as stack:
        stack.enter_context(worker_environment(Processes(0, 1, 0)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="verl_shard_group_"))
        if device == "cpu":
            stack.enter_context(_on_cpu())
        backend = "cpu:gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        if device == "cuda":
            torch.cuda.set_device(0)
        ours = not torch.distributed.is_initialized()
        if ours:
            store = f"file://{Path(folder) / 'store'}"
            torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            if ours:
                torch.distributed.destroy_process_group()


def import_early() -> None:
    """An import that fails half-way may keep the frames that it was called from, and with them a model on the GPU."""
    for name in (
        "verl.models.transformers.monkey_patch",
        "verl.trainer.config",
        "verl.utils.checkpoint.fsdp_checkpoint_manager",
        "verl.utils.model",
        "verl.workers.config",
        "verl.workers.engine",
        "verl.workers.engine_workers",
        "verl.workers.utils.losses",
    ):
        importlib.import_module(name)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Lets verl's FSDP engine run on the CPU, so that all but the numbers can be tried before a GPU is paid for.

    verl registers it for cuda and npu; FSDP wants a GPU for its first broadcast, and pinned memory for a ref.
    """
    import torch.distributed.fsdp._init_utils as fsdp_init
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    classes = (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    )
    with ExitStack() as undo:
        for place, name, value in (
            (fsdp_init, "_check_module_states_for_sync_module_states", lambda _: None),
            (transformer_impl, "CPUOffloadPolicy", lambda pin_memory: fsdp.CPUOffloadPolicy(pin_memory=False)),
            (transformer_impl, "load_fsdp_model_to_gpu", lambda _: None),
        ):
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        for kind, cls in classes:
            EngineRegistry.register(model_type=kind, backend=["fsdp", "fsdp2"], device="cpu")(cls)
            for backend in ("fsdp", "fsdp2"):
                undo.callback(EngineRegistry._engines[kind][backend].pop, "cpu")
        yield


def save_model(config: Any, folder: Path) -> Path:
    """A causal language model with random weights in `folder`, in bf16, as people save one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return folder


class StockRole:
    """A role as verl makes it in a worker: engine, loss and batches' settings."""

    def __init__(self, role: Role, setup: Setup) -> None:
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import (
            ActorConfig,
            CriticConfig,
            FSDPEngineConfig,
            FSDPOptimizerConfig,
            HFModelConfig,
            TrainingWorkerConfig,
        )  # fmt: skip
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss, value_loss

        self.role, self.setup = role, setup
        kind = "value_model" if role == "critic" else "language_model"
        model = HFModelConfig(
            path=str(setup.folder), model_type=kind, load_tokenizer=False,
            override_config={"attn_implementation": setup.attn_implementation},
            enable_gradient_checkpointing=setup.enable_gradient_checkpointing,
            use_remove_padding=setup.use_remove_padding,
        )  # fmt: skip
        micro = setup.micro_batch_size_per_gpu
        engine: Any = _ours(role, setup) if setup.strategy == "device_map" else FSDPEngineConfig(
            strategy=setup.strategy, model_dtype=setup.model_dtype, forward_only=role == "ref",
            param_offload=setup.param_offload and role != "ref",
            optimizer_offload=setup.optimizer_offload and role != "ref",
            use_torch_compile=setup.use_torch_compile, use_no_sync_for_gradient_accumulation=False,
            use_dynamic_bsz=role == "critic",
            micro_batch_size_per_gpu=micro, infer_micro_batch_size_per_gpu=micro,
            max_token_len_per_gpu=setup.token_budget, infer_max_token_len_per_gpu=setup.token_budget,
        )  # fmt: skip
        optim = FSDPOptimizerConfig(lr=1e-6, total_training_steps=10, lr_warmup_steps=0, clip_grad=1.0)
        config = TrainingWorkerConfig(
            model_type=kind,
            model_config=model,
            engine_config=engine,
            optimizer_config=optim,
            checkpoint_config=CheckpointConfig(),
        )
        with _value_model_attention(setup.attn_implementation):
            self.worker: Any = TrainingWorker(config)
            self.worker.reset()
        strategy = "fsdp" if setup.strategy == "device_map" else setup.strategy  # the losses read other fields only
        if role == "actor":
            actor = ActorConfig(
                strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=micro, use_kl_loss=setup.use_kl_loss
            )
            self.worker.set_loss_fn(partial(ppo_loss, config=actor))
        elif role == "critic":
            critic = CriticConfig(strategy=strategy, ppo_micro_batch_size_per_gpu=micro)
            self.worker.set_loss_fn(partial(value_loss, config=critic))

    def score(self) -> None:
        """old_log_prob, ref_log_prob or values, as trainer_base.py asks for them."""
        self.worker.infer_batch(self._batch(calculate_entropy=self.role == "actor", compute_loss=False))

    def update(self, batch: Any = None) -> float:
        """update_actor or update_critic over one mini-batch; returns the norm of the gradients.

        A norm that is not finite would mean that verl skipped the optimizer's step.
        """
        from verl.utils import tensordict_utils as tu

        given = self.training_batch() if batch is None else batch
        norm = tu.get(self.worker.train_mini_batch(given), "metrics")["grad_norm"]
        return float(norm[0] if isinstance(norm, list) else norm)

    def training_batch(self, micro_batch_size: int | None = None, **values: float) -> Any:
        """A mini-batch for `update`. values: of tensors that are the same for all tokens of responses."""
        n = len(self.setup.lengths)
        sizes = {} if micro_batch_size is None else {"micro_batch_size_per_gpu": micro_batch_size}
        batch = self._batch(
            calculate_entropy=False, global_batch_size=n, mini_batch_size=n, epochs=1, seed=1,
            dataloader_kwargs={"shuffle": False}, **sizes,
        )  # fmt: skip
        for name, value in values.items():
            batch[name] = torch.full_like(batch[name], value)
        return batch

    def generate(self) -> None:
        """Responses to all prompts at once, as our rollout generates them on the actor's module."""
        from verl_shard.runtime.dispatch import input_device
        from verl_shard.verl_plugin.rollout.generate import Sampling, generate

        engine = self.worker.engine
        # No two alike: equal prompts are prefilled once.
        prompts = [[3 + i, *[3] * (prompt - 4 * (i % 2) - 1)] for i, (prompt, _) in enumerate(self.setup.lengths)]
        sampling = Sampling(max_new_tokens=max(response for _, response in self.setup.lengths), ignore_eos=True)
        with engine.eval_mode(), engine.autocast():
            generate(
                engine.module, prompts, list(range(len(prompts))), sampling, pad_token_id=0, eos_token_ids=[],
                device=input_device(engine.module),
            )  # fmt: skip

    def export_weights(self, bucket: int = 0) -> int:
        """Sends the weights through a bucket of so many bytes as the naive weight sync does; returns how many tensors."""
        engine = self.worker.engine
        weights, _ = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        buffer = torch.empty(bucket, dtype=torch.uint8, device=get_device_name())
        count = 0
        for _, weight in weights:
            n = min(weight.nbytes, bucket) // weight.element_size()
            buffer[: n * weight.element_size()].view(weight.dtype).copy_(weight.flatten()[:n])
            count += 1
        del weights, weight, buffer
        if engine.is_param_offload_enabled:
            engine.to("cpu", model=True, optimizer=False, grad=False)
        return count

    def _batch(self, **settings: Any) -> Any:
        from verl.utils import tensordict_utils as tu

        lengths = self.setup.lengths

        def rows(sizes: Sequence[int], make: Callable[[int], torch.Tensor]) -> torch.Tensor:
            return torch.nested.nested_tensor([make(size) for size in sizes], layout=torch.jagged)

        whole, prompts, responses = [sum(p) for p in lengths], [p for p, _ in lengths], [r for _, r in lengths]

        def ids(size: int) -> torch.Tensor:
            return torch.randint(3, 100, (size,))

        tensors = {
            "input_ids": rows(whole, ids), "position_ids": rows(whole, torch.arange), "prompts": rows(prompts, ids),
            "responses": rows(responses, ids),
            "loss_mask": rows(responses, lambda n: torch.ones(n, dtype=torch.long)),
            "response_mask": rows(responses, lambda n: torch.ones(n, dtype=torch.long)),
        }  # fmt: skip
        for name in ("old_log_probs", "ref_log_prob", "advantages", "values", "returns"):
            tensors[name] = rows(responses, lambda n: torch.full((n,), -1.0))
        batch = tu.get_tensordict(tensors)
        tu.assign_non_tensor(batch, temperature=1.0, pad_token_id=0, **settings)
        return batch


def _ours(role: Role, setup: Setup) -> Any:
    """The configuration of our engine on one device; the reference in bf16, as it is by default."""
    import verl_shard.verl_plugin.engine  # noqa: F401 - registers it
    from verl_shard.verl_plugin.config import DeviceMapEngineConfig

    precision = "bf16" if role == "ref" or setup.model_dtype == "bf16" else "bf16-mixed"
    micro = setup.micro_batch_size_per_gpu
    return DeviceMapEngineConfig(
        role=role, device_map="cpu" if get_device_name() == "cpu" else {"": 0}, precision=setup.precision or precision,
        forward_only=role == "ref", use_dynamic_bsz=False, micro_batch_size_per_gpu=micro,
        infer_micro_batch_size_per_gpu=micro, offload=setup.ref_offload if role == "ref" else "none",
        logits=setup.logits,
    )  # fmt: skip


@contextmanager
def _value_model_attention(implementation: str) -> Iterator[None]:
    """verl's loader of value models asks for flash_attention_2 whatever is set; without flash-attn nothing else loads."""
    from transformers import AutoModelForTokenClassification
    from verl.utils import model as module

    original = module.load_valuehead_model

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation=implementation,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip

    module.load_valuehead_model = load
    try:
        yield
    finally:
        module.load_valuehead_model = original
