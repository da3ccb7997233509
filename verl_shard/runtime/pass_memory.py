"""What a pass of a model takes beyond what is there before it, for batches of any size, from a few traces."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_shard.common.errors import ShardError
from verl_shard.memory.cached import cached_lora, cached_trace, description_of
from verl_shard.memory.in_flight import Stage
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import KV_CACHE, LOGITS
from verl_shard.memory.trace import Trace
from verl_shard.models.devices import parse_device
from verl_shard.models.meta import positions_of
from verl_shard.models.read import read_model

_log = logging.getLogger(__name__)

SHORTEST, TIMES = 256, 4
"""In tokens. Traces are made for lengths of so many tokens, and of 4, 16, ... times as many, so that a run needs few: all
but a mask grows with the tokens, and not with their square."""
MOST_TRACED = 4
"""Lengths that are traced, twice each; a trace takes about a second. Further ones are read from a longer one."""


class PassMemory:
    """Bytes by device of one pass. Of one length all that a pass allocates grows with the number of sequences, by as much
    for each: two traces give it for any number, and for lengths between.

    config, task: of the model, as for read_model. wanted: the pass; its batch_size and seq_len are not looked at.
    device_map: where the model is, by names of its modules (of those behind adapters).
    logits: of the tokens of a sequence, the share whose logits are made.
    """

    def __init__(
        self, config: Any, task: str, wanted: PassSpec, device_map: Mapping[str, Any], *, logits: float = 1.0
    ) -> None:
        self._config, self._task, self._wanted = config, task, wanted
        self._logits = logits
        self._map = {name: parse_device(device) for name, device in device_map.items()}
        self._model: tuple[Any, Any, Any] | None = None
        self._devices: list[Any] = []
        self._lines: dict[int, tuple[int, dict[Any, _Line]]] = {}
        self._failed = False

    def of(self, rows: int, length: int, *, in_flight: int = 1) -> dict[Any, int] | None:
        """Of `rows` sequences of `length` tokens in each micro-batch; None where the model cannot be traced.

        in_flight: micro-batches at a time; in training each device has those of its place in the pipeline.
        """
        lines = self._lines_for(rows, length)
        if lines is None:
            return None
        return {device: line.at(rows * length, in_flight) for device, line in lines.items()}

    def of_generation(self, rows: int, length: int, new_tokens: int, at_once: int) -> dict[Any, int] | None:
        """Of `rows` responses of new_tokens to prompts of `length` tokens, of which at_once are computed together."""
        lines = self._lines_for(min(rows, at_once), length)
        if lines is None:
            return None
        # A cache that is laid out anew is there twice of one layer at a time.
        caches = rows * (length + new_tokens) * (1 + 1 / len(self._devices))
        prompts = min(rows, at_once) * length
        return {device: line.at(prompts, 1) + int(caches * line.cached) for device, line in lines.items()}

    def _lines_for(self, rows: int, length: int) -> dict[Any, _Line] | None:
        if self._failed:
            return None
        try:
            return self._line(rows, length)
        except (ShardError, ValueError, RuntimeError) as error:
            _log.info("its passes are not traced, so that nothing is estimated: %s", error)
            self._failed = True
            return None

    def _line(self, rows: int, length: int) -> dict[Any, _Line]:
        self._read()
        assert self._model is not None
        bucket = SHORTEST
        while bucket < length:
            bucket *= TIMES
        positions = positions_of(self._model[1])
        bucket = min(bucket, positions) if positions is not None and positions >= length else bucket
        longer = sorted(known for known in self._lines if known >= bucket)
        if len(self._lines) >= MOST_TRACED and longer:
            bucket = longer[0]
        most, lines = self._lines.get(bucket, (0, {}))
        if rows > most:
            # Two rows at least: one gives no line. Beyond what was traced it goes on as it is.
            most = most or max(2, rows)
            lines = lines or self._between(self._trace(1, bucket), self._trace(most, bucket), most, bucket)
            self._lines[bucket] = (most, lines)
        return lines

    def _read(self) -> None:
        if self._model is not None:
            return
        wanted = self._wanted
        spec, module = read_model(self._config, task=self._task, dtype=wanted.weight_dtype)
        placed = self._map
        if wanted.lora_rank:
            spec, module = cached_lora(spec, module, wanted, description_of(module))
            placed = {f"base_model.model.{name}" if name else name: device for name, device in placed.items()}
        self._devices = list(spec.devices_of(placed))
        self._model = spec, module, description_of(module)

    def _trace(self, rows: int, length: int) -> Trace:
        assert self._model is not None
        spec, module, described = self._model
        keep = math.ceil(length * self._logits) if self._logits < 1 else None
        wanted = replace(self._wanted, batch_size=rows, seq_len=length, logits_to_keep=keep)
        return cached_trace(spec, module, wanted, described)

    def _between(self, one: Trace, more: Trace, rows: int, length: int) -> dict[Any, _Line]:
        found = {}
        order = list(dict.fromkeys(self._devices))
        trained = self._wanted.phase == "train"
        for number, device in enumerate(order):
            blocks = [i for i, at in enumerate(self._devices) if at == device]
            first, second = _above(one, blocks), _above(more, blocks)
            slope = (second - first) / ((rows - 1) * length)
            if trained:  # of what waits; weights that are cast are there once, however many wait
                kept = (more.kept(blocks) - one.kept(blocks)) / ((rows - 1) * length)
            else:
                kept = int(one.kinds[:, blocks, LOGITS].sum(axis=1).max()) / length
            cached = float(one.kinds[:, blocks, KV_CACHE].max(axis=0).sum()) / length
            sent = (more.sent(blocks) - one.sent(blocks)) / ((rows - 1) * length) if trained else 0.0
            stage = Stage(number, len(order)) if trained else None
            found[device] = _Line(first - slope * length, slope, kept, cached, stage, sent)
        return found


@dataclass(frozen=True)
class _Line:
    """base + tokens * slope. By token: kept: what a further micro-batch here keeps; cached: keys and values.

    stage: the device's place in the pipeline, which says how many of those in flight are here; None where all of them are,
    as when outputs are kept until they are read. sent: of what is kept by token, what comes before its micro-batch does.
    """

    base: float
    slope: float
    kept: float
    cached: float
    stage: Stage | None
    sent: float

    def at(self, tokens: int, in_flight: int) -> int:
        here, coming = in_flight, 0
        if self.stage is not None:
            here, coming = self.stage.kept(in_flight), self.stage.coming(in_flight)
        by_token = self.slope + (here - 1) * self.kept + coming * self.sent
        return max(0, int(self.base + by_token * tokens))


def _above(trace: Trace, blocks: list[int]) -> int:
    """The peak of a pass on a device with these blocks, above what is there when it begins. The optimizer's step is
    left out: how a mini-batch is cut changes nothing of it."""
    start, end = min(trace.phases.values()), trace.phases.get("optimizer", len(trace.live))
    held: np.ndarray = trace.live[:, blocks].sum(axis=1)
    return int(held[start:end].max() - held[start - 1])
