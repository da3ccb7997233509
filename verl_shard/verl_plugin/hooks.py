"""Every place where verl 0.9 is touched under its public surface, and the check that all of them are still there.

verl has no extension point for these. Whoever moves to another verl starts here: `missing()` names what is gone.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from verl_shard.memory.losses import entropy_of_logits, log_probs_of_labels

SUPPORTED = (Version("0.9.1"), Version("0.10"))
"""The first verl this plugin was run with, and the first it is not meant for."""

_NEEDED = {
    "verl.plugin.platform": ("PlatformBase", "PlatformRegistry"),
    "verl.utils.distributed": ("initialize_global_process_group_ray",),
    "verl.utils.logging_utils": ("configure_verl_logging",),
    "verl.workers.rollout.base": ("_ROLLOUT_REGISTRY", "BaseRollout"),
    "verl.workers.rollout.replica": ("RolloutReplicaRegistry", "RolloutReplica", "RolloutMode", "TokenOutput"),
}
_NEEDED_LATER = {
    "verl.workers.engine.base": ("EngineRegistry",),
    "verl.workers.engine.utils": ("prepare_micro_batches", "postprocess_batch_func", "detach_tree"),
    "verl.workers.utils.losses": ("no_padding_2_padding",),
    "verl.utils.torch_functional": ("logprobs_from_logits_v2", "entropy_from_logits"),
    "verl.workers.engine.fsdp.transformer_impl": ("FSDPEngine", "FSDPEngineWithLMHead", "FSDPEngineWithValueHead"),
    "verl.trainer.ppo.v1.replay_buffer": ("ReplayBuffer", "ReplayBufferAsync"),
    "verl.experimental.agent_loop.agent_loop": ("hydra", "_agent_loop_registry"),
    "verl.trainer.ppo.v1.agent_loop_tq": ("AgentLoopManagerTQ", "AgentLoopWorkerTQ"),
    "verl.trainer.ppo.v1.trainer_base": ("PPOTrainer",),
}

RESPONSE_LENGTHS = "verl_shard_response_lengths"
"""Key of a batch that brings along a Lengths."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sequence's prompt and response."""

    pairs: tuple[tuple[int, int], ...]


_ABSENT_ENGINES = ("torchtitan", "veomni", "automodel", "mindspeed", "megatron")


def missing(*, everything: bool = False) -> list[str]:
    """What this plugin needs of the installed verl and does not find, one line each.

    Without `everything`, only the modules that `import verl` loads anyway are looked into.
    """
    try:
        installed = Version(version("verl"))
    except PackageNotFoundError:
        return ["verl is not installed"]
    if not SUPPORTED[0] <= installed < SUPPORTED[1]:
        return [f"verl {installed} is installed; this plugin is for verl >={SUPPORTED[0]},<{SUPPORTED[1]}"]
    gone = []
    for module, names in {**_NEEDED, **(_NEEDED_LATER if everything else {})}.items():
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            gone.append(f"{module}: {error}")
            continue
        gone += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return gone


def silence_absent_engines() -> None:
    """verl warns of each engine that is not installed whenever its engines are imported; nobody here asked for those."""
    for name in _ABSENT_ENGINES:
        warnings.filterwarnings("ignore", message=f"{name} engine is not available", category=UserWarning)


def register_rollout(name: str, adapter: str, replica: Callable[[], type]) -> None:
    """Makes a rollout known by name; verl's table of adapters is private and has no register function."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base._ROLLOUT_REGISTRY[(name, "async")] = adapter
    RolloutReplicaRegistry.register(name, replica)


def before_training_workers(prepare: Callable[[], None]) -> None:
    """Runs `prepare` in each training worker before it looks for its engine, and gives a CPU worker a process group.

    The group: verl asks for "cpu:gloo,cpu:gloo", which torch refuses. The moment: engines cannot be registered lazily, and
    importing them in every process would cost each several seconds.
    """
    from verl.utils import distributed
    from verl.utils.device import get_device_name

    original = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        prepare()
        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        original(timeout_second=timeout_second, backend=backend)

    distributed.initialize_global_process_group_ray = initialize


def before_trainer(prepare: Callable[[Any], None]) -> None:
    """Runs `prepare(config)` when verl's V1 trainer is made, before it reads its configuration.

    A config group cannot do this: verl's own defaults come after `model_engine` and win. `configure_verl_logging` is the
    first thing the trainer's process calls, and the trainer's module is imported only after it.
    """
    from verl.utils import logging_utils

    original = logging_utils.configure_verl_logging

    def configure(*args: Any, **kwargs: Any) -> Any:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        if not hasattr(PPOTrainer.__init__, "verl_shard"):
            initialize = PPOTrainer.__init__

            def init(self: Any, config: Any) -> None:
                prepare(config)
                initialize(self, config)

            init.verl_shard = True  # type: ignore[attr-defined]
            PPOTrainer.__init__ = init
        return original(*args, **kwargs)

    logging_utils.configure_verl_logging = configure


def class_behind(actor_class: Any) -> type:
    """The plain class of a Ray actor class, which cannot itself be subclassed into another actor."""
    plain: type = actor_class.__ray_metadata__.modified_class
    return plain


def make_agent_loops_directly() -> None:
    """verl makes an agent loop for each request, through Hydra: 8 ms of merging where only a class is called.

    A registered entry that is more than a `_target_` still goes through Hydra.
    """
    from types import SimpleNamespace

    import hydra
    from verl.experimental.agent_loop import agent_loop

    locate = functools.cache(hydra.utils.get_class)

    def instantiate(config: Mapping[str, Any], **kwargs: Any) -> Any:
        if set(config) == {"_target_"}:
            return locate(config["_target_"])(**kwargs)
        return hydra.utils.instantiate(config=config, **kwargs)

    agent_loop.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))


def group_options(refill_fn: Any, *, sync: bool) -> dict[str, Any]:
    """The arguments on group filtering that verl gives its own sampler and withholds from a custom one.

    refill_fn: the trainer's bound method, the only way from a sampler to its trainer.
    Mirrors PPOTrainer._build_replay_buffer.
    """
    trainer = refill_fn.__self__
    config = trainer.config
    metric = trainer._resolve_filter_groups_metric()
    refill = bool(config.trainer.v1.sampler.get("sync_refill_failed_groups", False))
    options: dict[str, Any] = {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
    if sync:
        batch = config.data.train_batch_size
        exact = metric is not None or refill
        options["train_batch_size"] = batch
        options["gen_batch_size"] = 1 if exact else (config.data.get("gen_batch_size", None) or batch)
        options["max_inflight_gen_batches"] = (
            config.algorithm.filter_groups.get("max_inflight_gen_batches", 1) if metric is not None else 1
        )
    return options


def attention_of(hf_config: Any) -> str:
    """The attention that verl put into a model's config ("flash_attention_2" unless it was told otherwise)."""
    return getattr(hf_config, "_attn_implementation", None) or "sdpa"


def patch_fused_kernels(module: Any, model_config: Any) -> None:
    """verl's fused linear-cross-entropy forward, which makes no tokens x vocabulary logits."""
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    options = model_config.fused_kernel_options or {}
    apply_monkey_patch(
        model=module,
        use_remove_padding=False,
        ulysses_sp_size=1,
        use_fused_kernels=True,
        fused_kernels_backend=options.get("impl_backend", None),
    )


def losses_in_chunks(engine: Any) -> None:
    """Has verl's engines in this process use `log_probs_of_labels` and `entropy_of_logits`; with flash-attn they use its
    kernel for log-probabilities as before. engine: it holds on to the entropy that there was when it was made."""
    from verl.utils import torch_functional

    if engine.compute_entropy_from_logits is torch_functional.entropy_from_logits:
        engine.compute_entropy_from_logits = entropy_of_logits
    torch_functional.logprobs_from_logits_v2 = log_probs_of_labels
    torch_functional.entropy_from_logits = entropy_of_logits


def responses_by_lengths() -> None:
    """Has verl's losses cut responses out of packed values by lengths that the batch brings along (RESPONSE_LENGTHS), in
    Python's numbers. verl reads them from the GPU, several times for each sequence, while the GPU has nothing to do."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils import losses

    verls = losses.no_padding_2_padding
    if hasattr(verls, "by_lengths"):
        return

    @functools.wraps(verls)
    def by_lengths(tensor: Any, data: Any) -> Any:
        lengths = tu.get_non_tensor_data(data=data, key=RESPONSE_LENGTHS, default=None)
        if lengths is None:
            return verls(tensor, data)
        longest = tu.get_non_tensor_data(data=data, key="max_response_len", default=-1)
        return responses_of(tensor.values() if tensor.is_nested else tensor, lengths.pairs, longest)

    by_lengths.by_lengths = True  # type: ignore[attr-defined]
    losses.no_padding_2_padding = by_lengths


def responses_of(values: Any, pairs: Sequence[tuple[int, int]], longest: int = -1) -> Any:
    """What no_padding_2_padding of verl gives: (sequences, longest response, ...) of values (tokens, ...), which belong to
    the token before them, with zeros behind. pairs: tokens of each sequence's prompt and response."""
    import torch
    from torch.nn import functional

    assert sum(map(sum, pairs)) == values.shape[0], "values are of these sequences"
    assert all(prompt > 0 for prompt, _ in pairs), "the first token of a response has one before it"
    longest = max(response for _, response in pairs) if longest < 0 else longest
    rows, end = [], 0
    for prompt, response in pairs:
        end += prompt + response
        behind = (0, 0) * (values.ndim - 1) + (0, longest - response)
        rows.append(functional.pad(values[end - response - 1 : end - 1], behind))
    return torch.stack(rows)


def output_device(output: Any) -> Any:
    """The device of a forward's result: its logits, or with fused kernels its log-probabilities."""
    result = getattr(output, "logits", None)
    return (output.log_probs if result is None else result).device
