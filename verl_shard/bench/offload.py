"""A reward model out of GPU memory, every way there is in one run: what a call takes, and what stays on the GPU."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.maps import zoo
from verl_shard.bench.rates import gpu_seconds, need_gpu
from verl_shard.bench.record import tell
from verl_shard.common.errors import config_error
from verl_shard.common.tables import err, table

SCHEMA = "verl_shard/bench-offload/1"
SHAPES = ((8, 512), (32, 1024))
"""Sequences and tokens of each."""
_LONG_ENOUGH_S = 12.0
"""A way that is slow is called three times and no more once its calls have taken so long."""


@dataclass(frozen=True)
class Way:
    """A way to offload. start: takes a model on the host, and gives the bytes it pinned, None where that is not known.

    after: what belongs to a call, so that the GPU is free again. stop: puts the model back on the host; a way that has
    none comes last.
    """

    name: str
    start: Callable[[Any], int | None]
    after: Callable[[Any], object] = lambda model: None
    stop: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class OffloadRow:
    """One way and one shape. Bytes are of the GPU: peak while it scores, idle between calls; pinned ones of the host."""

    way: str
    sequences: int
    tokens: int
    seconds: float
    calls: int
    setup_s: float
    peak: int
    idle: int
    pinned: int | None
    identical: bool
    limit_s: float
    """The longer of the resident model's time and of the copy of the blocks at the link's measured rate."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.limit_s


class GpuMeter:
    """Time and memory of the first GPU."""

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize()

    def held(self) -> int:
        import torch

        return torch.cuda.memory_allocated()

    def begin_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()

    def empty(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def bench_offload(
    *, result: Path | None, model: str = "qwen2-7b", calls: int = 7, as_json: bool = False
) -> list[OffloadRow]:
    """Measures all ways with a reward model of a model of the zoo's shape, with random weights in bf16; prints a table,
    or JSON, and writes JSON when `result` is given. Raises ConfigError without a GPU and for an unknown model."""
    check_model(model)
    need_gpu("offload", "what auto chooses from bytes needs none: choose_offload")
    import torch

    from verl_shard.bench.stock_cells import config_of
    from verl_shard.runtime.stream_model import blocks_of, input_embedding

    config = config_of(model)
    config.num_labels, config.pad_token_id = 1, 0
    link = link_rate()
    made = reward_model(config, "cuda")
    inputs = [random_ids(config, shape, "cuda") for shape in SHAPES]
    block_bytes = sum(p.numel() * p.element_size() for block in blocks_of(made).values() for p in block.parameters())
    table_of = input_embedding(made)
    assert table_of is not None, "the zoo's models have an embedding"
    sizes = {
        "weights": sum(p.numel() * p.element_size() for p in made.parameters()),
        "blocks": block_bytes,
        "block": block_bytes // len(blocks_of(made)),
        "embedding": table_of.weight.numel() * table_of.weight.element_size(),
    }
    del table_of
    rows = measure(made, inputs, ways("cuda:0"), GpuMeter(), calls=calls, copy_s=block_bytes / link)
    torch.cuda.empty_cache()
    content = {
        "model": model, "link_bandwidth": link, "bytes": sizes,
        "copy_s": block_bytes / link, "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }  # fmt: skip
    tell(SCHEMA, content, tables(model, rows, link, block_bytes), result=result, as_json=as_json)
    return rows


def check_model(model: str) -> None:
    """Raises ConfigError for a model that the zoo does not have."""
    if model not in (known := [entry["name"] for entry in zoo()]):
        raise config_error("model", "--model", model, "not in the zoo", f"Use one of {', '.join(known)}")


def link_rate() -> float:
    """Bytes/s of copies from pinned memory to the first GPU, of the size of a block."""
    import torch

    size = 1 << 29
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    return size / gpu_seconds(lambda: target.copy_(source, non_blocking=True))


def reward_model(config: Any, device: str) -> Any:
    """A sequence classifier with one label and random weights, made on `device`."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return made.eval().requires_grad_(False)


def random_ids(config: Any, shape: tuple[int, int], device: str) -> Any:
    """Token ids over the whole vocabulary, none of them padding."""
    import torch

    return torch.randint(1, config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(device)


def ways(device: str) -> list[Way]:
    """All there are, with the words of offload_model; diffusers' where it is installed, which a line says otherwise."""
    from verl_shard.runtime.offload import offload_model, offload_of, undo_offload

    def start(**options: Any) -> Callable[[Any], int | None]:
        def run(model: Any) -> int | None:
            offload_model(model, device, **options)
            told = offload_of(model)
            assert told is not None, "it was offloaded just now"
            return told.pinned_bytes

        return run

    def release(model: Any) -> None:
        told = offload_of(model)
        assert told is not None, "it was offloaded before it was called"
        told.release()

    made = [
        Way("stream", start(), stop=undo_offload),
        Way("stream, prefetch", start(prefetch=True), stop=undo_offload),
        Way("stream, embeddings on the host", start(embeddings_on_host=True), stop=undo_offload),
        Way("accelerate's cpu_offload", start(offload="cpu_offload"), stop=undo_offload),
        Way("accelerate's cpu_offload_with_hook", start(offload="cpu_offload_with_hook"), release, undo_offload),
    ]
    try:
        hooks = importlib.import_module("diffusers.hooks")
    except ImportError as error:
        err.print(f"diffusers' group offloading is left out: {error}")
        return made

    def group(model: Any) -> None:
        import torch

        hooks.apply_group_offloading(
            model,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=True,
        )

    return [*made, Way("diffusers' group offloading, leaf level, stream", group)]


def measure(
    model: Any, inputs: Sequence[Any], offered: Sequence[Way], meter: Any, *, calls: int, copy_s: float
) -> list[OffloadRow]:
    """The model where it is, resident; then each way, from the host. inputs: token ids, (sequences, tokens).

    copy_s: seconds in which its blocks go over the link.
    """
    resident: list[OffloadRow] = []
    expected = []
    for ids in inputs:
        row, logits = _called(model, ids, Way("resident", lambda model: None), meter, calls)
        limit = max(row["seconds"], copy_s)
        resident.append(OffloadRow(**row, setup_s=0.0, pinned=0, identical=True, limit_s=limit))
        expected.append(logits)
    model.to("cpu")
    meter.empty()
    rows = list(resident)
    for way in offered:
        meter.wait()
        began = time.perf_counter()
        pinned = way.start(model)
        meter.wait()
        setup_s = time.perf_counter() - began
        meter.empty()
        for ids, wanted, before in zip(inputs, expected, resident, strict=True):
            row, logits = _called(model, ids, way, meter, calls)
            same = bool((logits == wanted).all())
            rows.append(OffloadRow(**row, setup_s=setup_s, pinned=pinned, identical=same, limit_s=before.limit_s))
            err.print(f"{way.name}: {rows[-1].sequences} x {rows[-1].tokens} in {rows[-1].seconds:.3f} s")
        if way.stop is None:
            assert way is offered[-1], "what cannot be undone comes last"
        else:
            way.stop(model)
            meter.empty()
    return rows


def _called(model: Any, ids: Any, way: Way, meter: Any, calls: int) -> tuple[dict[str, Any], Any]:
    """Two calls to warm up, one when it is slow, and the median of the rest."""
    import torch

    taken: list[float] = []
    warm = 2
    meter.begin_peak()
    while len(taken) < warm + calls:
        meter.wait()
        began = time.perf_counter()
        with torch.no_grad():
            logits = model(input_ids=ids).logits.float().cpu()
        way.after(model)
        meter.wait()
        taken.append(time.perf_counter() - began)
        if sum(taken) > _LONG_ENOUGH_S:
            warm = 1
            if len(taken) > 3:
                break
    kept = taken[warm:]
    row = {
        "way": way.name, "sequences": ids.shape[0], "tokens": ids.shape[1], "seconds": statistics.median(kept),
        "calls": len(kept), "peak": meter.peak(), "idle": meter.held(),
    }  # fmt: skip
    return row, logits


def tables(model: str, rows: Sequence[OffloadRow], link: float, block_bytes: int) -> list[Any]:
    """A table for each shape, and one of what does not depend on it; GB are 10**9 bytes."""
    made = []
    limit = f"{block_bytes / 1e9:.2f} GB of blocks at {link / 1e9:.1f} GB/s take {block_bytes / link:.3f} s"
    for shape in dict.fromkeys((row.sequences, row.tokens) for row in rows):
        shown = [
            (
                row.way,
                f"{row.seconds:.3f}",
                f"{row.ratio:.3f}",
                f"{row.peak / 1e9:.2f}",
                "yes" if row.identical else "no",
            )
            for row in rows
            if (row.sequences, row.tokens) == shape
        ]
        title = f"{model}, reward model, bf16: {shape[0]} x {shape[1]} tokens; {limit}"
        made.append(table(title, ("", "s a call", "of the limit", "peak GB", "same bits"), shown))
    ways_of = {row.way: row for row in rows}
    kept = [
        (
            row.way,
            f"{row.setup_s:.1f}",
            "?" if row.pinned is None else f"{row.pinned / 1e9:.2f}",
            f"{row.idle / 1e9:.2f}",
        )
        for row in ways_of.values()
    ]
    return [*made, table("Whatever is scored", ("", "set-up s", "pinned GB", "idle GB on the GPU"), kept)]
