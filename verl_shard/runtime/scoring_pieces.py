"""Scoring where memory is short: fewer texts in one forward pass. The scores are the same, and in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_shard.common.notices import record_event
from verl_shard.memory.passes import PassSpec
from verl_shard.runtime.allocator import ResourceAllocator
from verl_shard.runtime.ladder import Ladder, Pieces, is_out_of_memory
from verl_shard.runtime.offload import is_offloaded
from verl_shard.runtime.oom_report import estimated, on_gpus, report_out_of_memory
from verl_shard.runtime.pass_memory import PassMemory

PHASE = "reward"
Rows = list[list[float]]


class ScoringPieces:
    """The batches of one copy of a scoring model. Remedies that are taken stay so for later batches.

    task, path: of the model. device: where its inputs go, for messages.
    """

    def __init__(self, model: Any, task: str, path: str, device: torch.device) -> None:
        self._model, self._task, self._path, self._device = model, task, path, device
        self.ladder = Ladder(PHASE)
        # Weights that are streamed come and go with each call, so that what is free says nothing of it.
        self.allocator = None if is_offloaded(model) else ResourceAllocator(self.ladder, self._needed)
        self._memory: PassMemory | None = None
        self._shape = (0, 0)

    def run(
        self,
        forward: Callable[[Sequence[int]], Rows],
        batch: Sequence[int],
        *,
        lengths: Sequence[int],
        most: int,
        named: Callable[[int], str],
    ) -> Rows:
        """What forward gives for the rows of a batch, in their order, in one call or, where memory is short, in several.

        lengths: tokens of each row. most: rows in a batch at most. named: a row, for messages.
        Raises DoesNotFitError that names the row which does not fit alone, its length and what it is estimated to take.
        """
        asked = Pieces(1, most, wording="batches of {}")
        self._shape = len(batch), max(lengths)
        if self.allocator is not None:
            self.allocator.before(asked)
        made: Rows = []

        def attempt(pieces: Pieces) -> None:
            try:
                while len(made) < len(batch):
                    made.extend(forward(batch[len(made) : len(made) + pieces.size]))
            except Exception as error:
                if is_out_of_memory(error):
                    record_event("out-of-memory", **report_out_of_memory(error, self._model, PHASE).to_dict())
                raise

        def too_large(said: str) -> str:
            at = len(made)
            which = named(batch[at])
            return (
                f"{PHASE}: {said}. {which[0].upper()}{which[1:]} alone does not fit beside "
                f'{self._path} on {self._device}. {self._estimate(lengths[at])} Give offload="stream", or shorten responses.'
            )

        # What was scored before memory ran out is kept.
        self.ladder.work(attempt, asked, too_large=too_large, below=lambda: len(batch) - len(made), draws=False)
        return made

    @property
    def _precision(self) -> str:
        return "bf16" if self._model.dtype in (torch.bfloat16, torch.float16) else "fp32"

    def _estimate(self, tokens: int) -> str:
        return estimated(
            self._model.config, tokens, phase="forward", task=self._task, precision=self._precision,
            device_map=on_gpus(self._model),
        )  # fmt: skip

    def _needed(self, pieces: Pieces) -> dict[Any, int] | None:
        """Bytes by device of the largest forward pass of the batch."""
        if self._memory is None:
            precision: Any = self._precision
            wanted = PassSpec(phase="forward", precision=precision, padded=True)
            placed = getattr(self._model, "hf_device_map", {})
            self._memory = PassMemory(self._model.config, self._task, wanted, placed)
        n, longest = self._shape
        return self._memory.of(min(pieces.size, n), longest)
