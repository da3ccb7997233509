"""verl's `device_map` engine: one transformers model over the GPUs of one process, data-parallel over processes.

It takes losses, LoRA, schedules and checkpoints from verl's FSDP engine, and differs in five things: the model is loaded by
`load_sharded` and never wrapped; it is never moved; labels travel to the GPU where the logits are, instead of the logits to
the labels, and over several GPUs several micro-batches are in flight (engine_batches.py); the module is there for the `hf`
rollout to generate on; and processes, each with a whole model over GPUs of its own, average their gradients in buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.py_functional import convert_to_regular_types
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_shard.common.errors import ConfigError
from verl_shard.common.seeds import derive_seed
from verl_shard.planning.plan_file import read_role
from verl_shard.runtime.dispatch import keep_outputs_in_place
from verl_shard.runtime.load import load_sharded
from verl_shard.runtime.memory_record import record_memory
from verl_shard.runtime.offload import several_calls
from verl_shard.runtime.packed import use_packed_sdpa
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.runtime.pipeline_links import Links
from verl_shard.runtime.relocate import move_model
from verl_shard.verl_plugin import hooks
from verl_shard.verl_plugin.config import not_as_planned, untrainable
from verl_shard.verl_plugin.engine_batches import MicroBatches
from verl_shard.verl_plugin.engine_copies import (
    Copies,
    Load,
    copies_asked,
    join_copies,
    lay_out_copies,
    load_copies,
    take_copies,
)
from verl_shard.verl_plugin.engine_inputs import on_host
from verl_shard.verl_plugin.engine_pieces import InPieces
from verl_shard.verl_plugin.gradients import GradientAverager, same_parameters

ENGINES: dict[str, DeviceMapEngine] = {}
"""The engines of this process by role; the rollout generates on the actor's."""

_DTYPES = {
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
}


def resolve_precision(precision: str | None, *, forward_only: bool, device: str) -> str:
    """The precision that is meant when none is set: fp32 on the CPU, else bf16-mixed for training and bf16 for scoring."""
    if precision is not None:
        return precision
    if device == "cpu":
        return "fp32"
    return "bf16" if forward_only else "bf16-mixed"


def _on_host_without_its_gpu(storage: Any, location: str) -> Any:
    """Where torch.load puts what was saved on a GPU that this process does not have: a run may go on with fewer GPUs.

    Beside other processes that is every GPU: those of the process that saved are not this one's.
    """
    gpu = location.removeprefix("cuda:")
    shared = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    away = location.startswith("cuda:") and gpu.isdecimal() and (shared or int(gpu) >= torch.cuda.device_count())
    return storage if away else None


# Asked before torch's own deserializer for CUDA (20), which would raise; load_state_dict then copies to the right GPU.
torch.serialization.register_package(19, lambda _: None, _on_host_without_its_gpu)


def _calls(data: TensorDict) -> int | None:
    """Forward passes that verl will make of a batch, one for each micro-batch; None where tokens decide it."""
    if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        return None
    micro = tu.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=None)
    return len(data) // micro if micro else None


class DeviceMapEngine(FSDPEngine):
    """What the language-model and the value-model engine share."""

    step = 0
    """The global step being worked on, told by the rollout's weight update; for the memory record."""
    logits = "responses"
    averager: GradientAverager | None = None
    pieces: Mapping[str, InPieces] = {}
    """By pass, "forward" and "train": what is done in smaller pieces after memory ran out."""
    copies: Copies | None = None
    """Of a reference that has several; the module is the first one's."""
    _load: Load
    _made_batches: MicroBatches | None = None
    _planned: Mapping[str, Any] = {}

    def initialize(self) -> None:
        """Builds model, optimizer and schedule, and makes the module known to this process's rollout."""
        hooks.losses_in_chunks(self)
        hooks.responses_by_lengths()
        super().initialize()
        if self.get_data_parallel_size() > 1 and not self.engine_config.forward_only:
            same_parameters(self.module, self.get_data_parallel_group())
            self.averager = GradientAverager(self.module, self.get_data_parallel_group())
        self.pieces = self._in_pieces()
        if asked := copies_asked(self._planned, self.engine_config):
            self.copies = load_copies(self, self._load, asked)
        ENGINES[self.engine_config.role] = self

    def _in_pieces(self) -> Mapping[str, InPieces]:
        phases = ("forward",) if self.engine_config.forward_only else ("forward", "train")
        return {phase: InPieces(self, forward_only=phase == "forward") for phase in phases}

    def move(self, where: Mapping[str, Any] | Sequence[Any], *, links: Links | None = None) -> None:
        """Lays the model over the devices of another map between two steps, its optimizer's states with it, as if it had
        been there from the start. where: the map; or, of a reference, the devices that are to have a whole copy each.
        links: for tests. Raises as move_model, before anything moves."""
        self._made_batches = None  # they hold on to the module, which may go
        if not isinstance(where, Mapping):
            copies = lay_out_copies(self, self._load, where, links)
            take_copies(self, copies, copies.each[0].module)
            self._planned = {**self._planned, "device_map": None, "copies_on": list(where), "free": None}
            return
        if self.copies is not None:
            take_copies(self, None, join_copies(self, self._load, where, links))
        else:
            base = getattr(self.module, "get_base_model", lambda: self.module)()
            move_model(base, where, optimizer=self.optimizer, links=links)
            keep_outputs_in_place(base)
        # Buckets have one device each, and a plan's limits, traces and remedies were those of the old GPUs.
        if self.averager is not None:
            self.averager = GradientAverager(self.module, self.get_data_parallel_group())
        self._planned = {**self._planned, "device_map": dict(where), "copies_on": None, "free": None}
        self.pieces = self._in_pieces()

    def _build_module(self) -> torch.nn.Module:
        engine, model = self.engine_config, self.model_config
        planned = read_role(engine.plan, engine.role) if engine.plan else {}
        self._planned, settings = planned, planned.get("settings") or {}
        if faults := not_as_planned(settings, engine.role, engine, model, self.optimizer_config):
            raise ConfigError(faults)
        device_map = convert_to_regular_types(planned.get("device_map", engine.device_map))
        copies = copies_asked(planned, engine)
        if device_map == "auto":
            device_map = "balanced"
        trainable_map = isinstance(device_map, Mapping) and not engine.forward_only
        if trainable_map and (faults := untrainable(device_map, f"{engine.role}.device_map.device_map")):
            raise ConfigError(faults)
        precision = resolve_precision(
            planned.get("precision", engine.precision), forward_only=engine.forward_only, device=get_device_name()
        )
        self.precision = precision
        # What was asked for in the configuration is in the plan too, or refused above.
        self.logits = settings.get("logits") or engine.logits
        weights_dtype, self._autocast_dtype = _DTYPES[precision]
        value_model = model.model_type == "value_model"
        # verl has one model entry for actor and reference; a plan may name another reference.
        path, config = planned.get("model", model.local_path), None if "model" in planned else model.hf_config
        if value_model:
            # As verl sets them: one value per token, and a deterministic head.
            model.hf_config.num_labels = 1
            for name in ("classifier_dropout", "hidden_dropout", "summary_dropout_prob"):
                setattr(model.hf_config, name, 0.0)
        attention = planned.get("attn_implementation") or hooks.attention_of(model.hf_config)

        def load(where: Any) -> torch.nn.Module:
            # A value head has no weights in the folder: without a seed it would differ from launch to launch.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(engine.seed, engine.role, "new weights"))
                module: torch.nn.Module = load_sharded(
                    path,
                    "cpu" if get_device_name() == "cpu" else where,
                    task="value" if value_model else "causal-lm",
                    dtype=weights_dtype,
                    attn_implementation=attention,
                    gradient_checkpointing=model.enable_gradient_checkpointing and not engine.forward_only,
                    max_memory=convert_to_regular_types(engine.max_memory),
                    strict=engine.strict,
                    config=config,
                    trust_remote_code=model.trust_remote_code,
                    autocast_dtype=self._autocast_dtype,
                    offload=settings.get("offload") or engine.offload,
                    embeddings_on_host=settings.get("embeddings_on_host", False),
                    pin_limit=settings.get("pin_limit"),
                )
            if model.use_fused_kernels:
                hooks.patch_fused_kernels(module, model)
            if model.use_remove_padding:
                use_packed_sdpa(module)
            keep_outputs_in_place(module)
            return module

        self._load = load
        return load(device_map if copies is None else {"": copies[0]})

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: with the last one gradients are averaged over processes.

        verl's losses are sums over this process's samples, divided by the counts of all processes and multiplied by their
        number: their average is the gradient of the whole mini-batch.
        """
        if self.averager is None or not is_last_micro_batch:
            yield
            return
        with self.averager.averaging():
            yield

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.scaler = None
        return module

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing: the device_map says where each block lives, and moving the whole would undo it."""

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """(name, detached parameter) pairs on their own devices; the hf rollout shares the module and reads none."""
        return ((name, value.detach()) for name, value in self.module.state_dict().items()), None

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        phase = "forward" if forward_only else "train"
        step = ENGINES.get("actor", self).step
        pieces = self.pieces[phase]

        share = 1.0 if self.copies is not None else self._batches().share_of_logits(data, loss_function)

        def run(cut: TensorDict) -> Any:
            with several_calls(self.module, each=_calls(cut)):
                return self._batches().run(cut, loss_function, forward_only=forward_only, logits=share)

        with record_memory(self.engine_config.role, phase, step) as record:
            if self.copies is not None:
                made = self.copies.run(data, loss_function)
                record["in_flight"] = 1
                if self.copies.remedies:
                    record["remedies"] = self.copies.remedies
                return made
            output = pieces.run(run, data, lambda: self._batches().at, logits=share)
            record["in_flight"] = self._batches().most
            if pieces.ladder.taken:
                record["remedies"] = pieces.ladder.taken
            return output

    def in_flight(self, *, forward_only: bool) -> int:
        """Micro-batches in flight at most, before memory is looked at."""
        return self._batches().window_of(forward_only=forward_only).most

    def _batches(self) -> MicroBatches:
        """Made anew where the module was laid out anew, or adapted."""
        if self._made_batches is None or self._made_batches.pipe is not pipeline_of(self.module):
            settings = self._planned.get("settings") or {}
            planned = settings.get("in_flight") or 1
            in_flight = self.engine_config.in_flight
            in_flight = planned if in_flight == "auto" and planned > 1 else in_flight
            self._made_batches = MicroBatches(self, in_flight=in_flight, free=self._planned.get("free"))
        return self._made_batches

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast under which this engine runs forwards; generation uses the same."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """One micro-batch alone, as verl's engines have it; forward_backward_batch keeps several in flight."""
        del forward_only
        batches = self._batches()
        loss, made = batches.finish(batches.forward(on_host(micro_batch), loss_function), loss_function)
        made["loss"] = float(made["loss"])
        return torch.ones(()) if loss is None else loss, made

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Writes verl's checkpoint layout, as of one process whatever their number; the model stays where it is."""
        with self._as_one_process():
            self.checkpoint_manager.save_checkpoint(
                local_path=local_path, hdfs_path=hdfs_path, global_step=global_step, max_ckpt_to_keep=max_ckpt_to_keep
            )

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """Restores weights, optimizer, schedule and random state; every key must match. All processes read the same."""
        with self._as_one_process():
            self.checkpoint_manager.rank = 0
            self.checkpoint_manager.load_checkpoint(
                local_path=local_path, hdfs_path=hdfs_path, del_local_after_load=del_local_after_load
            )

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """verl's manager names files by process and their number. All hold the same here, so the first alone writes.

        The others go through it too, and write nothing: it has barriers.
        """
        manager = self.checkpoint_manager
        before = (manager.rank, manager.world_size, manager.checkpoint_save_contents)
        manager.world_size = 1
        if manager.rank != 0:
            manager.checkpoint_save_contents = []
        try:
            yield
        finally:
            manager.rank, manager.world_size, manager.checkpoint_save_contents = before


@EngineRegistry.register(model_type="language_model", backend="device_map", device=["cpu", "cuda"])
class DeviceMapEngineWithLMHead(DeviceMapEngine, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend="device_map", device=["cpu", "cuda"])
class DeviceMapEngineWithValueHead(DeviceMapEngine, FSDPEngineWithValueHead):
    """Critic: one value per token from a token-classification head."""
