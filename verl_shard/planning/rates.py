"""Rates: what a GPU and its host reach on real models, of which times are made. Given, or measured by `bench rates`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.common.files import write_whole
from verl_shard.common.notices import notice
from verl_shard.config.cards import Card

SCHEMA = "verl_shard/bench-rates/1"

# Fitted to 37 passes of Qwen2 0.5B, Qwen3 0.6B and Llama 3.1 8B on an H200 (torch 2.11, transformers 5.17,
# docs/results/h200_times.json): the median error of their times is 4 %, the largest 35 % (a small model whose recomputed
# forward the host launches). Whole steps are not among them. Shares are of the data sheet's figures.
PRODUCT_SHARE = 0.738
"""Of a card's FLOP/s that products of matrices reach."""
ATTENTION_SHARE = 0.844
"""Of the same that fused attention reaches when it is counted whole, though it is causal and does half."""
MEMORY_SHARE = 0.647
"""Of a card's memory bandwidth that element-wise operations reach."""
KERNEL_S = 6.6e-6
"""Seconds of the GPU for each kernel beside its work: its start, and its last blocks, which do not fill the GPU."""
GRAPH_KERNEL_S = 2.9e-6
"""The same for each kernel of a CUDA graph, which start without the host. From docs/results/h200_elastic_rates.json: Qwen2 0.5B
made 16 x 128 tokens in 0.676 s, of which 0.215 s are the prompts, two graphs and the choice of tokens, and 0.54 ms of each
further token are bytes. Checked by others: 0.68 s is predicted for another run of it, which took 0.67 and 0.79
(docs/results/h200_elastic.json), and 2.6 s for 64 requests of Qwen2 7B, which took 2.8 (h200_generate.json)."""
FORWARD_S = 19.7e-6
"""Seconds of the host for each operation of a forward: Python, the modules and what they call."""
BACKWARD_S = 28.2e-6
"""The same in a backward and in the optimizer's step."""
RECOMPUTE_S = 55.4e-6
"""The same in a forward that gradient checkpointing repeats, in autograd's thread and under its hooks."""
DECODE_S = 17.9e-6
"""The same for one token of transformers' `generate`, cache and all."""
TOKEN_S = 0.62e-3
"""Seconds of the host for each token of `generate` beside the model: masks, the choice of the token, stopping."""
CPU_FLOPS = 2.39e12
"""FLOP/s of a model that scores on the host's CPU in bf16, its element-wise operations in it. From the same run: with 16 cores
beside an H200 a Qwen2 0.5B scored 16 x 512 tokens, 6.223e12 FLOPs, in 2.607 s. On another such host it took 2.64 s, where 2.60
are predicted; on a third 3.43 in the one step that was timed by phases, and what whole steps leave for it is 2.70
(docs/results/h200_elastic.json). It is not scaled with the number of cores: a plan
does not know the host's, and nobody has measured another."""
_CPU_REACHED = "as 16 cores beside an H200 reached"
_LATER = {"cpu_flops": (CPU_FLOPS, _CPU_REACHED), "graph_kernel_s": (GRAPH_KERNEL_S, "as an H200 took")}
"""What files of before do not have, what is used then, and where that is from."""


@dataclass(frozen=True)
class Rates:
    """What is reached, not what data sheets promise.

    name: whose they are. source: where they are from.
    bf16_flops, fp32_flops: FLOP/s of products. attention_flops: of fused attention, its two products counted whole.
    memory_bandwidth, host_bandwidth, link_bandwidth: bytes/s of the GPU's own memory, from and to pinned host memory, and
    to another GPU of the machine.
    kernel_s, graph_kernel_s: seconds of the GPU for each kernel beside its work, launched by the host or by a CUDA graph.
    forward_s, backward_s, recompute_s, decode_s: seconds of the host for each operation in a forward, in a backward or
    an optimizer's step, in a forward that checkpointing repeats, and in generation. token_s: for each token beside these.
    cpu_flops: FLOP/s of a whole forward on the host's CPU, in 16 bits; other precisions are counted alike.
    Raises ConfigError for what is no positive number; the times may be zero.
    """

    name: str
    bf16_flops: float
    fp32_flops: float
    attention_flops: float
    memory_bandwidth: float
    host_bandwidth: float
    link_bandwidth: float
    kernel_s: float = KERNEL_S
    forward_s: float = FORWARD_S
    backward_s: float = BACKWARD_S
    recompute_s: float = RECOMPUTE_S
    decode_s: float = DECODE_S
    token_s: float = TOKEN_S
    cpu_flops: float = CPU_FLOPS
    graph_kernel_s: float = GRAPH_KERNEL_S
    source: str = "given"

    def __post_init__(self) -> None:
        faults = [fault for field in NUMBERS if (fault := _fault(field, getattr(self, field))) is not None]
        if faults:
            raise ConfigError(faults)

    @property
    def cpu_source(self) -> str:
        """Where the rate of the CPU is from; the default's is another than the GPU's."""
        other = f"{_CPU_REACHED}; verl-shard bench rates measures another host"
        return other if self.cpu_flops == CPU_FLOPS else self.source

    @classmethod
    def of(cls, card: Card) -> Rates:
        """Of a card by its data sheet, with the shares that an H200 reached; the host is the one that had it."""
        return cls(
            name=card.name,
            bf16_flops=PRODUCT_SHARE * card.bf16_flops,
            fp32_flops=PRODUCT_SHARE * card.fp32_flops,
            attention_flops=ATTENTION_SHARE * card.bf16_flops,
            memory_bandwidth=MEMORY_SHARE * card.memory_bandwidth,
            host_bandwidth=card.host_bandwidth,
            link_bandwidth=card.link_bandwidth,
            source=f"{card.source}; shares as an H200 reached them",
        )

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """What `verl-shard bench rates --out` wrote; a notice says what a file of before does not have.

        Raises ConfigError when the file is no such thing.
        """
        where = f"rates {path}"
        fix = "Make one with verl-shard bench rates --out FILE"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise config_error("bad-rates", where, None, f"it cannot be read ({error})", fix) from error
        schema = content.get("schema") if isinstance(content, dict) else type(content).__name__
        if schema != SCHEMA:
            raise config_error("bad-rates", where, schema, f"its schema is not {SCHEMA}", fix)
        given = content.get("rates")
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or (known - set(_LATER)) - set(given) or set(given) - known:
            missing = sorted(known - set(given or ()))
            unknown = sorted(set(given or ()) - known)
            why = f"missing are {', '.join(missing) or 'none'}, unknown are {', '.join(unknown) or 'none'}"
            raise config_error("bad-rates", where, None, why, fix)
        try:
            made = cls(**given)
        except ConfigError as error:
            raise ConfigError([replace(fault, where=f"{where}: {fault.where}") for fault in error.findings]) from None
        for name in sorted(set(_LATER) - set(given)):
            value, reached = _LATER[name]
            why = "the file is of before this was measured, and verl-shard bench rates --out makes a new one"
            notice("rate-not-measured", f"{where}: {name}", None, why, f"{value:.3g}, {reached},")
        return made

    def save(self, path: Path, machine: Mapping[str, Any]) -> None:
        """Writes JSON that `load` reads; machine: what they were measured on."""
        record = {"schema": SCHEMA, "machine": dict(machine), "rates": asdict(self)}
        write_whole(path, json.dumps(record, indent=1) + "\n")


NUMBERS = tuple(field.name for field in fields(Rates) if field.name not in ("name", "source"))
"""The fields of Rates that are numbers."""


def _fault(name: str, value: object) -> Finding | None:
    zero = name.endswith("_s")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number and (value >= 0 if zero else value > 0):  # type: ignore[operator]
        return None
    why = "seconds of zero or more are needed" if zero else "a number above zero is needed"
    return Finding("error", "bad-rate", name, repr(value), why, "Measure it with verl-shard bench rates")
