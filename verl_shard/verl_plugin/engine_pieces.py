"""A mini-batch on our engine: in smaller pieces where memory is short, and again when it ran out; by all processes alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_shard.common.notices import record_event
from verl_shard.config.roles import PHASE_OF_PASS
from verl_shard.memory.passes import PassSpec
from verl_shard.planning.plan_file import planned_peak
from verl_shard.runtime.allocator import ResourceAllocator
from verl_shard.runtime.ladder import Ladder, Pieces, is_out_of_memory
from verl_shard.runtime.oom_report import estimated, on_gpus, report_out_of_memory
from verl_shard.runtime.pass_memory import PassMemory
from verl_shard.verl_plugin.engine_batches import IN_FLIGHT
from verl_shard.verl_plugin.engine_inputs import Reading


class InPieces:
    """What one engine does in one phase, over the run: which live remedies are taken stays so for later batches."""

    def __init__(self, engine: Any, *, forward_only: bool) -> None:
        self._engine, self._forward_only = engine, forward_only
        role = engine.engine_config.role
        self.phase = PHASE_OF_PASS.get((role, "forward" if forward_only else "train"), role)
        self.ladder = Ladder(self.phase)
        on = engine.engine_config.allocator == "auto"
        self.allocator = ResourceAllocator(self.ladder, self._needed, agree=self._agree) if on else None
        self._memory: PassMemory | None = None
        self._placed: tuple[Any, ...] | None = None
        self._lengths: list[int] = []
        self._packed = False
        self._logits = 1.0

    def run(
        self,
        run: Callable[[TensorDict], Any],
        data: TensorDict,
        at: Callable[[], Mapping[str, Any]],
        *,
        logits: float = 1.0,
    ) -> Any:
        """What run(data) gives. verl's keys in data say how it is cut, and are set anew after memory ran out.

        logits: of the tokens of a sequence, the share whose logits are made at most.
        at: the rows of the batch that were worked on last and their tokens, as {"rows": ..., "tokens": ...}.
        """
        asked = self.asked(data)
        self._lengths = sorted(data["input_ids"].offsets().diff().tolist(), reverse=True)
        self._packed = bool(tu.get_non_tensor_data(data=data, key="use_remove_padding", default=True))
        self._logits = logits
        if self.allocator is not None:
            self.allocator.before(asked)

        def attempt(pieces: Pieces) -> Any:
            watching = nullcontext() if self.allocator is None else self.allocator.watching(pieces)
            try:
                with watching:
                    return run(self.cut(data, pieces, asked))
            except Exception as error:
                if is_out_of_memory(error):
                    self._report(error)
                raise

        return self.ladder.work(
            attempt,
            asked,
            undo=self._undo,
            too_large=lambda said: self._too_large(said, at()),
            settle=self._catch_up,
            agree=self._agree,
            below=lambda: sum(self._lengths) if asked.total is None else None,
        )

    def asked(self, data: TensorDict) -> Pieces:
        """How verl asks for a batch to be cut."""
        in_flight = self._engine.in_flight(forward_only=self._forward_only)
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            longest = int(data["input_ids"].offsets().diff().max())
            return Pieces(in_flight, max(int(data["max_token_len_per_gpu"]), longest), smallest=longest)
        group = tu.get_non_tensor_data(data=data, key="force_group_size", default=1)
        return Pieces(in_flight, int(data["micro_batch_size_per_gpu"]), total=len(data) // group)

    def cut(self, data: TensorDict, pieces: Pieces, asked: Pieces) -> TensorDict:
        """The batch, to be cut into these pieces; as it was given when no remedy is taken."""
        if pieces == asked:
            return data
        size = "max_token_len_per_gpu" if pieces.total is None else "micro_batch_size_per_gpu"
        return tu.assign_non_tensor(data.copy(), **{size: pieces.size, IN_FLIGHT: pieces.in_flight})

    def _undo(self) -> None:
        """Gradients of the mini-batch are gone; those of earlier ones were used up by their optimizer's step."""
        if not self._forward_only:
            self._engine.module.zero_grad(set_to_none=True)
            if self._engine.averager is not None:
                self._engine.averager.again()

    def _catch_up(self) -> None:
        averager = self._engine.averager
        if averager is not None and not self._forward_only:
            averager.catch_up()

    def _agree(self, state: int) -> int:
        engine = self._engine
        if engine.get_data_parallel_size() == 1:
            return state
        worst = torch.tensor([state], device=get_device_id())
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX, group=engine.get_data_parallel_group())
        return int(worst)

    def _report(self, error: Exception) -> None:
        engine = self._engine
        planned = planned_peak(engine.engine_config.plan, self.phase) if engine.engine_config.plan else None
        report = report_out_of_memory(error, engine.module, self.phase, planned=planned)
        record_event("out-of-memory", **report.to_dict())

    def _too_large(self, said: str, at: Mapping[str, Any]) -> str:
        """The message when one sequence alone does not fit."""
        rows, tokens = at.get("rows", ()), at.get("tokens", ())
        which = ", ".join(f"{row} ({n} tokens)" for row, n in zip(rows, tokens, strict=False)) or "unknown"
        return (
            f"{self.phase}: {said}. Sequence {which} of the batch alone does not fit. {self._estimate(max(tokens, default=1))}"
            " Shorten responses (data.max_response_length), or take a remedy that verl-shard plan names."
        )

    def _estimate(self, tokens: int) -> str:
        """What one sequence needs, in words."""
        engine = self._engine
        checkpointing = engine.model_config.enable_gradient_checkpointing
        return estimated(
            engine.model_config.hf_config,
            tokens,
            task=_task(engine),
            phase="forward" if self._forward_only else "train",
            precision=engine.precision,
            device_map=on_gpus(engine.module),
            **({} if self._forward_only else {"gradient_checkpointing": checkpointing}),
        )

    def _needed(self, pieces: Pieces) -> dict[Any, int] | None:
        """Bytes that the batch takes in such pieces, by device."""
        placed = dict(getattr(self._engine.module, "hf_device_map", {}))
        now = placed, self._packed, self._logits
        if self._memory is None or self._placed != now:
            self._placed = now
            self._memory = _memory_of(
                self._engine,
                forward_only=self._forward_only,
                padded=not self._packed,
                placed=placed,
                logits=self._logits,
            )
        lengths, longest = self._lengths, self._lengths[0]
        if pieces.total is None:
            tokens = min(pieces.size, sum(lengths))
        else:
            size = pieces.size * (len(lengths) // pieces.total)
            tokens = sum(lengths[:size]) if self._packed else size * longest
        return self._memory.of(math.ceil(tokens / longest), longest, in_flight=pieces.in_flight)


def _task(engine: Any) -> str:
    return "value" if engine.model_config.model_type == "value_model" else "causal-lm"


def _memory_of(
    engine: Any, *, forward_only: bool, padded: bool, placed: Mapping[str, Any], logits: float
) -> PassMemory:
    """The passes of an engine's phase, as verl_shard plan has them (planning/models.py)."""
    model, task = engine.model_config, _task(engine)
    masked = padded and not Reading.of(engine.module).causal
    fields: dict[str, Any] = {"precision": engine.precision, "lora_rank": model.lora_rank or 0, "padded": masked}
    used = getattr(engine.module.config, "_attn_implementation", None)
    fields["attn_implementation"] = used if used in ("eager", "flash_attention_2") else "sdpa"
    if task == "causal-lm":
        fields["loss"] = "verl-fused" if model.use_fused_kernels else "verl-ppo"
    elif not forward_only:
        fields["loss"] = "value"
    if forward_only:
        wanted = PassSpec(phase="forward", trainable=not engine.engine_config.forward_only, **fields)
    else:
        # Of the optimizer's step nothing is asked, and plain SGD is traced fastest.
        checkpointing = bool(model.enable_gradient_checkpointing)
        wanted = PassSpec(
            phase="train", accumulating=True, gradient_checkpointing=checkpointing, optimizer="sgd", **fields
        )
    return PassMemory(model.hf_config, task, wanted, placed, logits=logits)
