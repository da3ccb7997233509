"""Attention with padding and without it: what each implementation takes, and how far its numbers are from fp32's."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.attention_shapes import LENGTHS as SHAPES
from verl_shard.bench.attention_shapes import measure_shapes, shapes_table
from verl_shard.bench.maps import zoo
from verl_shard.bench.rates import need_gpu
from verl_shard.bench.record import machine, tell
from verl_shard.common.errors import config_error
from verl_shard.common.seeds import derive_seed
from verl_shard.common.tables import out, table

SCHEMA = "verl_shard/bench-attention/1"
MODELS = ("qwen2-0.5b", "qwen2-7b")
"""With heads of 64 and of 128."""
SEQUENCES, SHORTEST, LONGEST = 16, 128, 1024
TOLERANCE = 1.25
"""How many times as far from fp32 as sdpa with a mask, in bf16 too, an implementation may be."""


@dataclass(frozen=True)
class Way:
    """An implementation and how sequences are laid out. told: whether the host says where packed sequences end."""

    implementation: str
    packed: bool
    told: bool = False

    @property
    def name(self) -> str:
        if self.implementation == "flash_attention_2":
            return "flash" + ("" if not self.packed else ", ends told" if self.told else ", ends found")
        return "sdpa, no mask" if self.implementation == "sdpa_packed" else "sdpa, mask"


WAYS = (
    Way("sdpa", packed=False),
    Way("flash_attention_2", packed=False),
    Way("sdpa", packed=True),
    Way("sdpa_packed", packed=True, told=True),
    Way("flash_attention_2", packed=True),
    Way("flash_attention_2", packed=True, told=True),
)


@dataclass(frozen=True)
class AttentionRow:
    """One way of one model. seconds: of a forward and a backward; peak: bytes above the weights.

    output_error, gradient_error: the norm of the difference to fp32 over the norm in fp32, of the last hidden states of
    real tokens and of all weights' gradients.
    """

    model: str
    way: str
    packed: bool
    seconds: float
    peak: int
    output_error: float
    gradient_error: float


def lengths(seed: int, n: int = SEQUENCES, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Tokens of each sequence, drawn from the seed; one is of the longest."""
    chance = random.Random(derive_seed(seed, "bench", "attention"))
    return [longest, *(chance.randint(shortest, longest) for _ in range(n - 1))]


def bench_attention(
    *, result: Path | None, models: Sequence[str] = MODELS, layers: int = 4, seed: int = 0, runs: int = 5
) -> list[AttentionRow]:
    """Measures some layers of models of the zoo's shapes, with random weights in bf16, on the first GPU.

    Then attention alone, of shapes that are new and of those that are not (attention_shapes).
    Prints tables and writes JSON. Implementations that cannot run here are left out, which is said.
    Raises ConfigError without a GPU and for unknown models.
    """
    known = [entry["name"] for entry in zoo()]
    if unknown := [name for name in models if name not in known]:
        raise config_error("model", "--model", ", ".join(unknown), "not in the zoo", f"Use any of {', '.join(known)}")
    need_gpu("attention", "the tests compare implementations on the CPU")
    import torch

    from verl_shard.bench.stock_cells import config_of
    from verl_shard.runtime.attention import why_not_flash_attention

    rows: list[AttentionRow] = []
    for name in models:
        config = config_of(name)
        config.num_hidden_layers = layers
        why = why_not_flash_attention(config, dtype=torch.bfloat16, devices=[0])
        if why is not None:
            out.print(f"{name}: flash_attention_2 is left out: {why}.")
        ways = [way for way in WAYS if why is None or way.implementation != "flash_attention_2"]
        rows += measure(name, config, lengths(seed), ways, "cuda", runs=runs)
    shapes = measure_shapes("cuda")
    content = {
        "layers": layers, "lengths": lengths(seed), "tolerance": TOLERANCE, "rows": [asdict(row) for row in rows],
        "shapes": {"lengths": SHAPES, "rows": [asdict(row) for row in shapes]},
    }  # fmt: skip
    facts = machine() | {"flash-attn": _flash_version()}
    tell(SCHEMA, content, [_table(rows, layers), shapes_table(shapes, SHAPES)], result=result, facts=facts)
    return rows


def measure(
    name: str, config: Any, lengths: Sequence[int], ways: Sequence[Way], device: str, *, runs: int
) -> list[AttentionRow]:
    """Rows of one model's ways, on a GPU or (without peaks) the CPU."""
    import torch
    from transformers import AutoModel

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        model.to(torch.bfloat16).to(torch.float32)  # what bf16 can hold: all compute with the same weights
    weights: dict[str, Any] = {key: value.clone() for key, value in model.state_dict().items()}
    ids = [torch.randint(1, config.vocab_size, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    exact = _one_each(*_step(model, Way("sdpa", packed=False), ids, device)())
    model.to(torch.bfloat16 if device == "cuda" else torch.float32)
    rows = []
    for way in ways:
        model.load_state_dict(weights)
        step = _prepared(model, way, ids, device)
        found = _one_each(*step())
        errors = [float((x - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]
        del found
        seconds, peak = _timed(step, device, runs)
        rows.append(AttentionRow(name, way.name, way.packed, seconds, peak, *errors))
    return rows


def _prepared(model: Any, way: Way, ids: list[Any], device: str) -> Callable[[], tuple[Any, Sequence[Any]]]:
    from verl_shard.models.packed import PACKED
    from verl_shard.runtime.packed import use_packed_sdpa

    if way.implementation == PACKED:
        model.set_attn_implementation("sdpa")
        assert use_packed_sdpa(model), "models of the zoo that are measured here can"
    else:
        model.set_attn_implementation(way.implementation)
    return _step(model, way, ids, device)


def _step(model: Any, way: Way, ids: list[Any], device: str) -> Callable[[], tuple[Any, Sequence[Any]]]:
    """A forward and a backward; gives the hidden states of real tokens, T x hidden size, and all gradients."""
    import torch

    from verl_shard.runtime.packed import packed_inputs

    lengths = [len(one) for one in ids]
    real = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    if way.packed:
        inputs = {
            "input_ids": torch.cat(ids)[None].to(device),
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(device),
        }
    else:
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        inputs = {"input_ids": padded.to(device), "attention_mask": real.long().to(device)}
    kept = real.to(device)
    weigh = torch.randn(sum(lengths), model.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(device)

    def step() -> tuple[Any, Sequence[Any]]:
        told = packed_inputs(lengths, device, attn_implementation=way.implementation) if way.told else {}
        states = model(**inputs, **told, use_cache=False).last_hidden_state
        states = states[0] if way.packed else states[kept]
        gradients = torch.autograd.grad((states.float() * weigh).sum(), list(model.parameters()))
        return states.detach(), gradients

    return step


def _one_each(states: Any, gradients: Sequence[Any]) -> tuple[Any, Any]:
    """Both in fp32, the gradients in one row."""
    import torch

    return states.float(), torch.cat([gradient.flatten().float() for gradient in gradients])


def _timed(step: Callable[[], object], device: str, runs: int) -> tuple[float, int]:
    """The median time of a step in seconds, and what it took of the GPU's memory above what was there."""
    import torch

    if device != "cuda":
        began = time.perf_counter()
        step()
        return time.perf_counter() - began, 0
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times), torch.cuda.max_memory_allocated() - before


def _table(rows: Sequence[AttentionRow], layers: int) -> Any:
    title = f"{layers} layers, {SEQUENCES} sequences of {SHORTEST} to {LONGEST} tokens, forward and backward, bf16"
    columns = ("model", "layout", "attention", "ms", "peak GB", "output error", "gradient error")
    shown = (
        (
            row.model,
            "packed" if row.packed else "padded",
            row.way,
            f"{row.seconds * 1e3:.1f}",
            f"{row.peak / 1e9:.2f}",
            f"{row.output_error:.2e}",
            f"{row.gradient_error:.2e}",
        )
        for row in rows
    )
    return table(title, columns, shown)


def _flash_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None
