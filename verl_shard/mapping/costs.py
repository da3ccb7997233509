"""What a GPU that holds a run of pieces has to hold: weights and buffers and KV cache, or the traced peak of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

from torch import nn
from transformers import PretrainedConfig

from verl_shard.common.choices import Purpose
from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.mapping.partition import ByStage, Run, RunCost
from verl_shard.memory.in_flight import Stage
from verl_shard.memory.passes import PassSpec, pass_spec
from verl_shard.models.dtypes import parse_dtype
from verl_shard.models.spec import ModelSpec

if TYPE_CHECKING:
    from verl_shard.memory.trace import Trace

PURPOSES = get_args(Purpose)

_IN_INFERENCE = ("batch_size", "seq_len")


@dataclass(frozen=True)
class Cost:
    """The bytes of pieces i..j-1 on one GPU, and what they are."""

    of: RunCost | ByStage
    """By the GPU's place in the pipeline where it has more or fewer of the micro-batches in flight."""
    cache: Sequence[int]
    """Bytes of KV cache of each piece, in `of` already; zeros when none is counted."""
    time: RunCost | None
    """What the time of pieces i..j-1 goes by, where several splits cost the same."""
    what: str
    """In words: "weights and buffers"."""
    wanted: PassSpec | None = None
    """The pass that is counted, if one is."""

    def loads(self, runs: Sequence[Run]) -> list[float]:
        """Bytes of each run of a split; none of an empty one, which is no stage either."""
        used = [run for run in runs if run[0] < run[1]]
        costs = iter([self.at(Stage(number, len(used)))(*run) for number, run in enumerate(used)])
        return [next(costs) if i < j else 0 for i, j in runs]

    def at(self, stage: Stage) -> RunCost:
        """Of runs at that place."""
        return self.of.at(stage) if isinstance(self.of, ByStage) else self.of

    def least(self, piece: int) -> float:
        """Of that piece alone, wherever in a pipeline of any length it is."""
        after = len(self.cache) - piece - 1
        return min(self.at(Stage(a, a + 1 + b))(piece, piece + 1) for a in range(piece + 1) for b in range(after + 1))


def read_pass(purpose: str, given: Mapping[str, Any]) -> PassSpec | None:
    """The pass that the keywords describe; None when inference counts weights and buffers alone.

    Raises ConfigError for an unknown purpose, an unknown keyword, one that has no effect on inference, and a value that
    is none.
    """
    if purpose not in PURPOSES:
        choices = " or ".join(f'"{name}"' for name in PURPOSES)
        raise config_error("unknown-purpose", "purpose", purpose, "not a purpose", f"Use {choices}")
    if purpose == "training":
        return pass_spec(dict(given), phase="train")
    if idle := [name for name in given if name not in _IN_INFERENCE]:
        pass_spec(dict(given), phase="train")  # unknown names and values first
        why = 'it changes nothing of weights, buffers and KV cache, which purpose="inference" counts'
        fix = 'Leave it out, or use purpose="training"'
        raise ConfigError([Finding("error", "no-effect", name, repr(given[name]), why, fix) for name in idle])
    if not given:
        return None
    if "seq_len" not in given:
        fix = "Give seq_len too: the tokens of a sequence, prompt and response"
        raise config_error("no-length", "batch_size", given["batch_size"], "the KV cache also needs a length", fix)
    return pass_spec(dict(given), phase="generate")


def inference_cost(spec: ModelSpec, module: nn.Module | None, wanted: PassSpec | None) -> Cost:
    """Weights, buffers and, for a `wanted` pass, the KV cache: a sum over pieces."""
    sizes = [block.n_bytes for block in spec.blocks]
    cache = [0] * len(sizes)
    what = "weights and buffers"
    if wanted is not None:
        cache = _cache(spec, module, wanted)
        what += f" and KV cache ({wanted.batch_size} x {wanted.seq_len} tokens)"
    total = list(accumulate((size + held for size, held in zip(sizes, cache, strict=True)), initial=0))
    return Cost(lambda i, j: total[j] - total[i], cache, None, what, wanted)


def training_cost(spec: ModelSpec, module: nn.Module | None, wanted: PassSpec) -> Cost:
    """The peak of a training step in the steady state, which is no sum: pieces peak at different times."""
    from verl_shard.memory.trace import trace

    if wanted.lora_rank:
        fix = "Wrap the model with peft's get_peft_model and give that"
        raise config_error("no-effect", "lora_rank", wanted.lora_rank, "a map names the modules of a given model", fix)
    if module is None:
        fix = "Give the id, folder, configuration or module that it was read from"
        raise config_error("nothing-to-trace", "model", spec.name, "a ModelSpec has no module to run", fix)
    return peak_cost(trace(spec, module, wanted), wanted)


def peak_cost(made: Trace, wanted: PassSpec) -> Cost:
    """The peak of a traced pass, and its FLOPs where several splits have the same. Of several micro-batches in flight each
    GPU has those that its place in the pipeline says."""
    flops = list(accumulate((forward + backward for forward, backward in made.flops), initial=0))
    what = f"peak of training ({wanted.words})"
    of: RunCost | ByStage = made.peaks.item
    if made.in_flight > 1:
        of = ByStage(lambda stage: made.peaks_at(stage).item)
    return Cost(of, [0] * made.n_blocks, lambda i, j: flops[j] - flops[i], what, wanted)


def check_dtype(purpose: str, dtype: object, wanted: PassSpec | None) -> None:
    """Raises ConfigError for a dtype beside a precision, which sets it."""
    if purpose != "training" or dtype is None or wanted is None:
        return
    if parse_dtype(dtype) != wanted.weight_dtype:  # type: ignore[arg-type]
        why = f"training at precision={wanted.used_precision!r} holds weights in {wanted.weight_dtype}"
        fix = 'Leave dtype out and set precision to "bf16-mixed", "bf16" or "fp32"'
        raise config_error("dtype-and-precision", "dtype", dtype, why, fix)


def _cache(spec: ModelSpec, module: nn.Module | None, wanted: PassSpec) -> list[int]:
    from verl_shard.memory.kv_cache import kv_cache_bytes

    if module is None:
        fix = "Give the id, folder, configuration or module that it was read from"
        raise config_error("no-kv-cache", "model", spec.name, "a ModelSpec does not say what is cached", fix)
    config = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig):
        fix = "Leave out batch_size and seq_len, which then counts weights and buffers"
        raise config_error("no-kv-cache", "model", spec.name, "only transformers models say what they cache", fix)
    itemsize = 4 if spec.dtype == "float32" else 2
    layers = kv_cache_bytes(config, batch_size=wanted.batch_size, seq_len=wanted.seq_len, itemsize=itemsize)
    names = [name for block in spec.blocks if block.kind == "block" for name in block.names]
    if len(layers) != len(names):
        why = f"its cache has {len(layers)} layers and the model {len(names)} blocks"
        fix = "Leave out batch_size and seq_len, which then counts weights and buffers"
        raise config_error("no-kv-cache", "model", spec.name, why, fix)
    by_name = dict(zip(names, layers, strict=True))
    return [sum(by_name.get(name, 0) for name in block.names) for block in spec.blocks]
