"""The micro-batches of a mini-batch on our engine: as many in flight as keep a pipeline at work, losses and outputs as verl's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

from verl_shard.common.errors import ConfigError
from verl_shard.memory.cached import cached_trace
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import Trace
from verl_shard.models.meta import positions_of
from verl_shard.models.read import read_model
from verl_shard.runtime.any_shape import of_any_shape
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.runtime.pipeline_hooks import RootHook
from verl_shard.runtime.pipeline_order import issue, outside_autocast
from verl_shard.runtime.pipeline_window import Window
from verl_shard.runtime.whole_rows import whole_rows
from verl_shard.verl_plugin import engine_logits, hooks
from verl_shard.verl_plugin.engine_inputs import (
    Prepared,
    Reading,
    on_host,
    prepare,
    response_lengths,
    sent,
    sent_kept,
    sent_values,
    without_padding,
)
from verl_shard.verl_plugin.engine_split import micro_batches

_log = logging.getLogger(__name__)

_STEP = 256
"""Traces are made for lengths that are multiples of it, so that a few serve all batches."""

LossFunction = Callable[..., Any]
IN_FLIGHT = "verl_shard_in_flight"
"""Key of a batch that is to be worked on with fewer micro-batches in flight than the engine would have."""


@dataclass
class Passed:
    """A micro-batch and the model's output, which `take` lets go of: logits are copied without their padding, and need not be
    there twice."""

    prepared: Prepared
    output: Any

    def take(self) -> Any:
        """The output, which is then the caller's alone."""
        output, self.output = self.output, None
        return output


class MicroBatches:
    """Runs mini-batches on an engine's model. Kept from one to the next: what the model needs to be told."""

    def __init__(self, engine: Any, *, in_flight: Any = "auto", free: Mapping[Any, int] | None = None) -> None:
        """in_flight: a number, or "auto". free: bytes that a plan leaves on each GPU beside the role's own peak."""
        self._engine = engine
        self.in_flight = in_flight
        self._free = free
        self.pipe = pipeline_of(engine.module)
        self._reading = Reading.of(engine.module)
        self._traced: tuple[int, float, Trace | None] = (0, 0.0, None)
        self.most = 1
        """The most that were in flight in the last mini-batch."""
        self.at: dict[str, Any] = {}
        """The micro-batch worked on last: "rows" of the mini-batch, and their "tokens"."""

    def run(
        self, data: TensorDict, loss_function: LossFunction | None, *, forward_only: bool, logits: float = 1.0
    ) -> Any:
        """FSDPEngine.forward_backward_batch of verl 0.9, whose forwards go on while losses are computed.

        logits: see share_of_logits; of these rows at least.
        """
        engine, data = self._engine, on_host(data)
        tu.assign_non_tensor(
            data, sp_size=1, dp_size=engine.get_data_parallel_size(), batch_num_tokens=self._tokens(data)
        )
        keep_output = forward_only or tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
        batches = micro_batches(data, engine.get_data_parallel_group())
        made: list[dict[str, Any]] = []

        failed: list[dict[str, Any]] = []

        @contextmanager
        def at(number: int) -> Iterator[None]:
            """Which one fails, the first that does: a backward may run beside a later forward."""
            here = {"rows": batches.rows[number], "tokens": batches.tokens[number]}
            if not failed:
                self.at = here
            try:
                yield
            except Exception:
                failed.append(here)
                self.at = failed[0]
                raise

        def forward(number: int) -> Passed:
            with at(number):
                return self.forward(batches[number], loss_function)

        def finish(number: int, passed: Passed) -> torch.Tensor | None:
            with at(number):
                loss, output = self.finish(passed, loss_function)
            if not keep_output:  # as verl: of a whole mini-batch they would fill the GPU
                del output["model_output"]
            made.append(output)
            return loss

        def backward(number: int, loss: torch.Tensor) -> None:
            last = number == len(batches) - 1
            with at(number), engine._gradient_sync_context(is_last_micro_batch=last), outside_autocast():
                torch.autograd.backward(loss)

        # Weights are cast once for all that are in flight, not once for each.
        around = nullcontext() if self.pipe is None else engine.autocast()
        with torch.set_grad_enabled(not forward_only), around, of_any_shape():
            self.most = issue(
                self.pipe,
                len(batches),
                forward,
                finish,
                window=self._window(batches.tokens, data, logits, forward_only=forward_only),
                backward=None if forward_only else backward,
                last_apart=engine.averager is not None,  # gradients are averaged as soon as it has made them
            )
        for output in made:  # only now: each of these waits for a GPU
            output["loss"] = float(output["loss"])
        return postprocess_batch_func(output_lst=made, indices=batches.indices, data=data)

    def forward(self, micro_batch: TensorDict, loss_function: LossFunction | None) -> Passed:
        """A micro-batch, which is on the host, and the model's output."""
        engine = self._engine
        device = input_device(engine.module) if self.pipe is None else None
        responses = self._only_responses(micro_batch, loss_function)
        prepared = prepare(engine, micro_batch, self._reading, device, responses=responses)
        whole = prepared.inputs.keys().isdisjoint(("position_ids", "attention_mask"))
        with engine.autocast(), whole_rows(whole):
            return Passed(prepared, engine.module(**prepared.inputs, use_cache=False))

    def finish(self, passed: Passed, loss_function: LossFunction | None) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """The loss of a forward, and what verl's engines return with it, the loss still a tensor.

        What the loss needs goes to the device where the logits are: they are the largest tensor of the pass (tokens x
        vocabulary), and labels the smallest.
        """
        engine, prepared, output = self._engine, passed.prepared, passed.take()
        where = hooks.output_device(output)
        data, output_args = sent(prepared.data, where), sent_values(prepared.output_args, where)
        if loss_function is not None and (lengths := response_lengths(prepared.data)):
            data = data.copy() if data is prepared.data else data
            tu.assign_non_tensor(data, **{hooks.RESPONSE_LENGTHS: lengths})
        was_packed = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        packed = data if was_packed is True else tu.assign_non_tensor(data.copy(), use_remove_padding=True)
        kept = None if prepared.kept is None else sent_kept(prepared.kept, where)
        if kept is not None:
            output = engine_logits.read(output, kept)
            output_args, packed = engine_logits.as_if_all(kept, output_args, packed)
        elif not was_packed:
            rows = None if prepared.rows is None else sent_values({"rows": prepared.rows}, where)["rows"]
            output = without_padding(output, rows)
        with engine.autocast():
            model_output = engine.prepare_model_outputs(
                output=output, output_args=output_args, micro_batch=packed, logits_processor_func=loss_function
            )
            if kept is not None:
                model_output = engine_logits.spread(kept, model_output, data["input_ids"].offsets())
            loss, metrics = None, {}
            if loss_function is not None:
                group = engine.get_data_parallel_group()
                loss, metrics = loss_function(model_output=model_output, data=data, dp_group=group)
        value = 1.0 if loss is None else loss.detach()
        return loss, {"model_output": detach_tree(model_output), "loss": value, "metrics": metrics}

    def _only_responses(self, data: TensorDict, loss_function: LossFunction | None) -> bool:
        asked = self._engine.logits == "responses" and self._reading.keeps
        return asked and engine_logits.only_responses(data, loss_function)

    def share_of_logits(self, data: TensorDict, loss_function: LossFunction | None) -> float:
        """Of the tokens of a sequence, the share whose logits are made at most, in quarters: memory is traced for each."""
        lengths = response_lengths(on_host(data)) if self._only_responses(data, loss_function) else None
        if lengths is None:
            return 1.0
        packed = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        return math.ceil(4 * engine_logits.largest_share(lengths.pairs, packed=packed)) / 4

    def _tokens(self, data: TensorDict) -> int:
        """Tokens that count, of all processes."""
        engine, count = self._engine, data["loss_mask"].sum()
        if engine.get_data_parallel_size() > 1:
            count = count.to(get_device_id())
            torch.distributed.all_reduce(count, group=engine.get_data_parallel_group())
        return int(count)

    def window_of(self, *, forward_only: bool) -> Window:
        """Before memory is looked at: as many as are asked for."""
        return Window(self.pipe, self.in_flight, forward_only=forward_only)

    def _window(self, tokens: list[list[int]], data: TensorDict, logits: float, *, forward_only: bool) -> Window:
        pipe, free = self.pipe, self._free
        fewer = tu.get_non_tensor_data(data=data, key=IN_FLIGHT, default=None)
        if pipe is None or fewer is not None:
            return Window(pipe, "auto" if pipe is None else fewer)
        if forward_only or self.in_flight != "auto":
            return self.window_of(forward_only=forward_only)
        if free is None:
            return Window(pipe, "auto", meant_for_others=self._unmade(pipe))
        packed = tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True)
        trace = self._trace(tokens, packed, logits)
        return Window(pipe, "auto", limits=free, beside_one=True, trace=trace, model=self._engine.module)

    def _unmade(self, pipe: RootHook) -> dict[Any, int]:
        """Bytes by device of gradients and of AdamW's states, where they are not there yet."""
        optimizer = self._engine.optimizer
        made: dict[Any, int] = {}
        for param in self._engine.module.parameters():
            if param.requires_grad:
                missing = (param.grad is None) + 2 * (param not in optimizer.state)
                device = pipe.links.of(param)
                made[device] = made.get(device, 0) + missing * param.nbytes
        return made

    def _trace(self, tokens: list[list[int]], packed: bool, logits: float) -> Trace | None:
        """Of the largest micro-batch so far; None where it is not known, and what they keep is counted as they run.

        tokens: of each row of each micro-batch. logits: see share_of_logits.
        """
        module = self._engine.module
        shapes = [(1, sum(lengths)) if packed else (len(lengths), max(lengths)) for lengths in tokens]
        rows, longest = max(shapes, key=lambda shape: shape[0] * shape[1])
        if rows * longest <= self._traced[0] and logits <= self._traced[1]:
            return self._traced[2]
        logits = max(logits, self._traced[1])
        positions = positions_of(module)
        if packed and positions and longest > positions:  # of all sequences of a row, each of which has them anew
            rows, longest = -(-longest // positions), positions
        traced = rows * longest
        longest = min(-(-longest // _STEP) * _STEP, positions or longest + _STEP)
        made = None
        if not hasattr(module, "get_base_model"):  # adapters are not in what is traced
            model = self._engine.model_config
            task = "value" if model.model_type == "value_model" else "causal-lm"
            fused = bool(getattr(model, "use_fused_kernels", False))
            wanted = PassSpec(
                batch_size=rows, seq_len=longest, precision=self._engine.precision, accumulating=True,
                gradient_checkpointing=module.is_gradient_checkpointing,
                loss="value" if task == "value" else "verl-fused" if fused else "verl-ppo",
                logits_to_keep=math.ceil(logits * longest) if logits < 1 and not fused else None,
            )  # fmt: skip
            try:  # of its configuration: a module that is laid out is not copied
                made = cached_trace(*read_model(module.config, task=task, dtype=wanted.weight_dtype), wanted)
            except ConfigError as error:
                _log.info("%s is not traced, so that what its micro-batches keep is counted: %s", module, error)
        self._traced = (traced, logits, made)
        return made
