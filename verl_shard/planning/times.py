"""How long a pass, a step of the optimizer and a generation take: pure functions of a Trace and of Rates.

The model: an operation takes the GPU the longer of FLOPs / rate and bytes / bandwidth (the roofline: Williams, Waterman
and Patterson, CACM 2009), and `kernel_s` for its start and its end. The host launches operations one after the other,
each in `forward_s`, `backward_s` ... seconds, ahead of the GPU, which can work on no operation before it is launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import GRADIENTS, KV_CACHE, WEIGHTS
from verl_shard.memory.trace import Trace
from verl_shard.memory.work import (
    ATTENTION,
    BACKWARD,
    CASTS,
    DECODE,
    FORWARD,
    MOVES,
    OPTIMIZER,
    PHASES,
    RECOMPUTE,
    Work,
)
from verl_shard.models.decoding import FEWEST_STEPS
from verl_shard.planning.rates import Rates

Stages = Sequence[tuple[int, int]]
"""The Blocks first..end-1 that each GPU of a device_map holds, in order of execution."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of something, and of what they are made; these overlap, and do not add up to it.

    compute_s, memory_s: of the GPUs, in operations that arithmetic or memory bounds; compute_s of the CPU where a role is
    there. host_s: of the host, launching on GPUs.
    copy_s: between GPUs. idle_s: in which a pipeline's slowest stage waits for the others.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    host_s: float = 0.0
    copy_s: float = 0.0
    idle_s: float = 0.0

    @property
    def bound(self) -> Literal["compute", "memory", "launches"]:
        """What takes the most: what a faster card, more bandwidth or a faster host would shorten."""
        if self.host_s > self.compute_s + self.memory_s + self.copy_s + self.idle_s:
            return "launches"
        return "compute" if self.compute_s >= self.memory_s else "memory"

    def __add__(self, other: PassTime) -> PassTime:
        """One after the other."""
        return PassTime(*(mine + theirs for mine, theirs in zip(self._parts, other._parts, strict=True)))

    def __mul__(self, times: float) -> PassTime:
        """So many times in a row."""
        return PassTime(*(times * part for part in self._parts))

    @property
    def _parts(self) -> tuple[float, ...]:
        return (self.seconds, self.compute_s, self.memory_s, self.host_s, self.copy_s, self.idle_s)


def pass_seconds(
    traced: Trace,
    wanted: PassSpec,
    rates: Rates,
    *,
    stages: Stages | None = None,
    n_micro: int = 1,
    pipelined: bool = False,
) -> PassTime:
    """Forwards of `n_micro` micro-batches, and when training their backwards, without the optimizer's step.

    traced: of one micro-batch of `wanted`, phase "train" or "forward". stages: None is one GPU.
    One micro-batch after the other, as a device_map runs them: the sum over micro-batches, stages and phases of what
    each takes; the end of each is the later of (the end before + its GPU seconds) and of the host's launching it.
    pipelined: (n_micro + stages - 1) x the slowest stage (GPipe, Huang et al. 2019, section 2.3), and no less than one
    host needs to launch all of it. Tensors that cross from stage to stage take bytes / link_bandwidth.
    From the second micro-batch on gradients are added up: their bytes three times over the memory bandwidth.
    """
    assert wanted.phase != "generate", "generate_seconds is for generation"
    used = stages or ((0, traced.n_blocks),)
    costs = _Costs(traced.recording.work, traced.n_blocks, rates)
    passes = [(FORWARD,), (RECOMPUTE, BACKWARD)] if wanted.phase == "train" else [(FORWARD,)]
    forward = [[costs.part(phases, stage) for stage in used] for phases in passes]
    hop_s = _crossing_bytes(traced, used) / rates.link_bandwidth
    adding = [0.0] * len(used)
    if wanted.phase == "train":
        gradients = _held(traced, GRADIENTS)
        adding = [3 * float(gradients[first:end].sum()) / rates.memory_bandwidth for first, end in used]
    if pipelined and len(used) > 1:
        return _pipeline(forward, adding, hop_s, n_micro)
    one = [part for index, parts in enumerate(forward) for part in (reversed(parts) if index else parts)]
    more = _Part(0.0, sum(adding), 0.0)
    in_order = [*one, *([more, *one] * (n_micro - 1))]
    return _in_turn(in_order, hop_s * n_micro)


def cpu_seconds(traced: Trace, rates: Rates, *, n_micro: int = 1) -> PassTime:
    """Forwards of `n_micro` micro-batches on the host's CPU, one after the other: their FLOPs / cpu_flops.

    traced: of one micro-batch, phase "forward". Nothing is launched on a GPU, and reading the weights is no part of its own:
    a token takes 2 FLOPs for each of their 2 bytes, so that at 2e12 FLOP/s and 1e11 bytes/s some twenty tokens in a
    micro-batch already take longer to compute than the weights to read.
    """
    work = traced.recording.work
    seconds = n_micro * float(work.flops[work.phases == FORWARD].sum()) / rates.cpu_flops
    return PassTime(seconds=seconds, compute_s=seconds)


def optimizer_seconds(traced: Trace, rates: Rates, *, stages: Stages | None = None) -> PassTime:
    """A step of the optimizer: bytes that its operations read and write over the memory bandwidth.

    traced: of phase "train". AdamW on lists of tensors moves the weights' bytes 21 times (torch/optim/adamw.py), fused
    7 times. GPUs work at the same time; the host launches for all.
    """
    costs = _Costs(traced.recording.work, traced.n_blocks, rates)
    parts = [costs.part((OPTIMIZER,), stage) for stage in stages or ((0, traced.n_blocks),)]
    slowest = max(parts, key=lambda part: part.gpu_s)
    return _in_turn([_Part(slowest.compute_s, slowest.memory_s, sum(part.host_s for part in parts))])


def generate_seconds(
    traced: Trace,
    wanted: PassSpec,
    rates: Rates,
    *,
    stages: Stages | None = None,
    new_tokens: int | None = None,
    graph_steps: int = 0,
) -> PassTime:
    """`new_tokens` tokens for each sequence of one batch, by transformers' `generate`, or by the hf rollout.

    traced: of `wanted`, phase "generate". new_tokens: no more than wanted.new_tokens, which is the default.
    The prompt is a forward. Each further token takes token_s and the longer of the host's launches x decode_s and the
    GPU's time, in which every weight is read and the cache three times moved: DynamicCache copies it to append a token
    (read, written), and attention reads it. The cache grows by a token each time; its part of the time is that at full
    length, in proportion. GPUs of a device_map work one after the other.
    graph_steps: tokens that one CUDA graph of the hf rollout is for, 0 without. The host then launches a token at once, but
    for what making a graph takes (models.decoding), and nothing is copied to append a token: all columns of the cache are
    read once.
    """
    assert wanted.phase == "generate", "pass_seconds is for the other phases"
    used = stages or ((0, traced.n_blocks),)
    work = traced.recording.work
    costs = _Costs(work, traced.n_blocks, rates)
    prompt = _in_turn(
        [costs.part((FORWARD,), stage) for stage in used], _crossing_bytes(traced, used) / rates.link_bandwidth
    )
    made = wanted.new_tokens if new_tokens is None else new_tokens
    assert made <= wanted.new_tokens, "the trace ends at wanted.new_tokens"
    n = made - 1
    if n < 1:
        return prompt + PassTime(seconds=rates.token_s, host_s=rates.token_s)
    decoding = _decoding(traced, wanted, rates, costs, by_graph=bool(graph_steps))
    shares = np.arange(wanted.seq_len + 1, wanted.seq_len + n + 1) / wanted.length
    memory_s = decoding.memory_s - decoding.growing_s * (1 - shares)
    host_s = np.full(n, decoding.host_s)
    for at in range(0, n, graph_steps) if graph_steps else ():
        if min(graph_steps, n - at) >= FEWEST_STEPS:
            host_s[at : at + graph_steps] = 0
            host_s[at] = 3 * decoding.host_s
    seconds = np.maximum(decoding.compute_s + memory_s, host_s)
    decode = PassTime(float(seconds.sum()), n * decoding.compute_s, float(memory_s.sum()), float(host_s.sum()))
    tokens_s = made * rates.token_s
    return prompt + decode + PassTime(seconds=tokens_s, host_s=tokens_s)


@dataclass(frozen=True)
class _Decoding:
    """Seconds of one token at full length. growing_s: the part of memory_s that is in proportion to the length."""

    compute_s: float
    memory_s: float
    host_s: float
    growing_s: float


def _decoding(traced: Trace, wanted: PassSpec, rates: Rates, costs: _Costs, *, by_graph: bool) -> _Decoding:
    whole = costs.part((DECODE,), (0, traced.n_blocks))
    work = traced.recording.work.of(DECODE, 0, traced.n_blocks)
    cache_s = float(_cache_bytes(traced).sum()) / rates.memory_bandwidth
    # Stand-ins say what they compute and not what they read: the cache, and the weights of experts.
    stand_ins = (work.flops > 0) & (work.n_bytes == 0)
    uncounted = cache_s if (stand_ins & (work.kinds == ATTENTION)).any() else 0.0
    experts = np.unique(work.blocks[stand_ins & (work.kinds != ATTENTION)])
    unread = np.maximum(_held(traced, WEIGHTS) / rates.memory_bandwidth - costs.gpu_s(DECODE), 0.0)[experts]
    full = whole.memory_s + uncounted + float(unread.sum())
    if not by_graph:
        return _Decoding(whole.compute_s, full, whole.host_s, min(3 * cache_s, full))
    copies = _copies_of_cache(traced, work)
    copied_s = float(work.n_bytes[copies].sum()) / rates.memory_bandwidth
    n_left = len(work.kinds) - int(copies.sum())
    kernels_s = len(work.kinds) * rates.kernel_s - n_left * rates.graph_kernel_s
    casts_s = cache_s if wanted.used_precision == "bf16-mixed" else 0.0
    return _Decoding(whole.compute_s, full - copied_s - kernels_s + casts_s, whole.host_s, 0.0)


def _copies_of_cache(traced: Trace, work: Work) -> np.ndarray:
    """Which operations copy all keys or all values of a Block: to append a token, for heads that share them, to cast them.

    They move what those take, or more, and a whole multiple of half of it: keys in 32 bits are cast to 16. Activations of
    one token may do so where a cache is very short, and are small then.
    """
    halves = np.zeros(traced.n_blocks)
    for block, sizes in _last_caches(traced):
        halves[block] = sizes.min() / 2
    half = halves[work.blocks]
    moves = (work.kinds == MOVES) | (work.kinds == CASTS)
    return np.asarray(moves & (half > 0) & (work.n_bytes >= 2 * half) & (work.n_bytes % np.maximum(half, 1) == 0))


def host_copy_seconds(n_bytes: float, rates: Rates) -> float:
    """Between pinned host memory and a GPU, one way: bytes / host_bandwidth."""
    return n_bytes / rates.host_bandwidth


def link_copy_seconds(n_bytes: float, rates: Rates) -> float:
    """From a GPU to another of the machine: bytes / link_bandwidth."""
    return n_bytes / rates.link_bandwidth


@dataclass(frozen=True)
class _Part:
    """Seconds of operations that run in a row on one GPU."""

    compute_s: float
    memory_s: float
    host_s: float

    @property
    def gpu_s(self) -> float:
        return self.compute_s + self.memory_s

    def __mul__(self, times: float) -> _Part:
        return _Part(self.compute_s * times, self.memory_s * times, self.host_s * times)


class _Costs:
    """Seconds by phase and Block. Casts cost the host nothing: autocast makes them while Python waits for another."""

    def __init__(self, work: Work, n_blocks: int, rates: Rates) -> None:
        speeds = np.array([np.inf, np.inf, rates.bf16_flops, rates.fp32_flops, rates.attention_flops])
        by_flops = work.flops / speeds[work.kinds]
        by_bytes = work.n_bytes / rates.memory_bandwidth
        launch_s = dict.fromkeys(range(len(PHASES)), rates.backward_s)
        launch_s.update({FORWARD: rates.forward_s, RECOMPUTE: rates.recompute_s, DECODE: rates.decode_s})
        at = work.phases.astype(np.int64) * n_blocks + work.blocks

        def summed(seconds: np.ndarray) -> np.ndarray:
            return np.bincount(at, seconds, len(PHASES) * n_blocks).reshape(len(PHASES), n_blocks)

        computes = by_flops > by_bytes
        self._compute = summed(np.where(computes, by_flops, 0.0))
        self._memory = summed(np.where(computes, 0.0, by_bytes) + rates.kernel_s)
        per_phase = np.array([launch_s[phase] for phase in range(len(PHASES))])
        self._host = summed((work.kinds != CASTS) * per_phase[work.phases])

    def gpu_s(self, phase: int) -> np.ndarray:
        """(blocks,)"""
        return np.asarray(self._compute[phase] + self._memory[phase])

    def part(self, phases: Iterable[int], stage: tuple[int, int]) -> _Part:
        first, end = stage
        picked = list(phases)
        return _Part(*(float(t[picked, first:end].sum()) for t in (self._compute, self._memory, self._host)))


def _in_turn(parts: Sequence[_Part], copy_s: float = 0.0) -> PassTime:
    """One after the other: none ends before its launches, nor before the one before it and its own GPU seconds."""
    ended = launched = 0.0
    for part in parts:
        launched += part.host_s
        ended = max(ended + part.gpu_s, launched)
    compute_s, memory_s = sum(part.compute_s for part in parts), sum(part.memory_s for part in parts)
    return PassTime(ended + copy_s, compute_s, memory_s, launched, copy_s)


def _pipeline(passes: Sequence[Sequence[_Part]], adding: Sequence[float], hop_s: float, n_micro: int) -> PassTime:
    """All micro-batches through stages that work at the same time."""
    n_stages = len(adding)
    of_stage = [[parts[k] for parts in passes] for k in range(n_stages)]
    gpu = [sum(part.gpu_s for part in parts) + adding[k] for k, parts in enumerate(of_stage)]
    slowest = max(range(n_stages), key=lambda k: gpu[k])
    host_s = n_micro * sum(part.host_s for parts in of_stage for part in parts)
    idle_s = (n_stages - 1) * gpu[slowest]
    return PassTime(
        seconds=max(n_micro * gpu[slowest] + idle_s, host_s) + hop_s,
        compute_s=n_micro * sum(part.compute_s for part in of_stage[slowest]),
        memory_s=n_micro * (sum(part.memory_s for part in of_stage[slowest]) + adding[slowest]),
        host_s=host_s,
        copy_s=hop_s,
        idle_s=idle_s,
    )


def _crossing_bytes(traced: Trace, stages: Stages) -> int:
    """Bytes that are copied to a stage which reads them and did not make them, once for each such stage."""
    stage_of = {block: k for k, (first, end) in enumerate(stages) for block in range(first, end)}
    total = 0
    for crossing in traced.crossings if len(stages) > 1 else ():
        readers = {stage_of[block] for block, _ in crossing.users} - {stage_of[crossing.owner]}
        total += crossing.size * len(readers)
    return total


def _held(traced: Trace, kind: int) -> np.ndarray:
    """(blocks,): bytes of the storages of one kind."""
    recording = traced.recording
    mine = recording.kinds == kind
    return np.bincount(recording.owners[mine], recording.sizes[mine], traced.n_blocks)


def _cache_bytes(traced: Trace) -> np.ndarray:
    """(blocks,): bytes of the key-value cache after the last token."""
    held = np.zeros(traced.n_blocks)
    for block, sizes in _last_caches(traced):
        held[block] = sizes.sum()
    return held


def _last_caches(traced: Trace) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks, and bytes of the storages that are their cache after the last token: of those that ever were, the last third,
    as a cache is there after the prompt, before the last token and after it."""
    recording = traced.recording
    numbers = np.flatnonzero(recording.kinds == KV_CACHE)
    for block in sorted(set(recording.owners[numbers].tolist())):
        own = numbers[recording.owners[numbers] == block]
        yield block, recording.sizes[own[-(len(own) // 3) :]]
