"""The reference and the reward phase of a PPO step with weights on the GPU and in host memory, on our engine, without Ray."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.offload import GpuMeter, check_model, link_rate
from verl_shard.bench.rates import need_gpu
from verl_shard.bench.record import tell
from verl_shard.common.tables import table

SCHEMA = "verl_shard/bench-offload-phases/1"
SHAPES = ((32, 8, 512), (32, 8, 1024))
"""Sequences of a step, of a micro-batch, and tokens of each."""
WAYS = ("none", "stream")


@dataclass(frozen=True)
class PhaseRow:
    """One phase, shape and way. Bytes of the GPU, beside what was there before the model: peak in the phase, idle beside other
    phases, and freed, which the resident model holds idle and this one does not.

    limit_s: the longer of the phase with resident weights and of a copy of the blocks for each micro-batch.
    """

    phase: str
    offload: str
    sequences: int
    micro_batch: int
    tokens: int
    seconds: float
    peak: int
    idle: int
    freed: int
    limit_s: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.limit_s


def bench_offload_phases(
    *, result: Path | None, model: str = "qwen2-7b", calls: int = 5, as_json: bool = False
) -> list[PhaseRow]:
    """Runs both phases with random weights of a model of the zoo's shape in bf16; prints a table, or JSON, and writes JSON
    when `result` is given.

    ref_log_prob is TrainingWorker.infer_batch of verl over our engine, as the trainer asks for it; reward is
    ScoringModel.score over conversations. Raises ConfigError without a GPU and for an unknown model.
    """
    check_model(model)
    need_gpu("offload --phases", "tests run both phases on the CPU")
    from verl_shard.bench.stock_cells import config_of
    from verl_shard.verl_plugin.stock_engine import one_process

    link = link_rate()
    rows: list[PhaseRow] = []
    with ExitStack() as stack:
        stack.enter_context(one_process("cuda"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verl_shard_offload_")))
        config = config_of(model)
        made = make_folders(config, folder)
        for sequences, micro, tokens in SHAPES:
            for start in (reference(made, sequences, micro, tokens), reward(made, sequences, micro, tokens)):
                copy_s = made.block_bytes / link
                rows += phase_rows(start, sequences, micro, tokens, copy_s=copy_s, calls=calls, meter=GpuMeter())
    content = {
        "model": model, "link_bandwidth": link, "block_bytes": made.block_bytes,
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }  # fmt: skip
    tell(SCHEMA, content, [phases_table(model, rows, link, made.block_bytes)], result=result, as_json=as_json)
    return rows


@dataclass(frozen=True)
class Folders:
    """A causal language model and a reward model over the same weights, and the bytes of the blocks."""

    policy: Path
    judge: Path
    tokenizer: Path
    block_bytes: int


def make_folders(config: Any, folder: Path) -> Folders:
    """Random weights in bf16, saved once; the reward model's folder links them and adds a head. And a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from verl_shard.models.read import read_model
    from verl_shard.verl_plugin.stock_engine import save_model

    policy, judge = folder / "policy", folder / "judge"
    save_model(config, policy)
    judge.mkdir()
    files = sorted(policy.glob("*.safetensors"))
    for file in files:
        os.link(
            file, judge / f"policy-{file.name}"
        )  # model.safetensors by its own name would be taken for all there is
    index = policy / "model.safetensors.index.json"
    spec, _ = read_model(config, task="causal-lm", dtype=torch.bfloat16)
    names = [tensor.name for tensor in spec.tensors if not tensor.is_alias and not tensor.is_buffer]
    where = json.loads(index.read_text())["weight_map"] if index.exists() else dict.fromkeys(names, files[0].name)
    torch.manual_seed(1)
    head = torch.randn(1, config.hidden_size, dtype=torch.bfloat16) / config.hidden_size**0.5
    save_file({"score.weight": head}, judge / "score.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"policy-{file}" for name, file in where.items()} | {"score.weight": "score.safetensors"}
    (judge / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    fields = config.to_dict() | {
        "architectures": [f"{type(config).__name__.removesuffix('Config')}ForSequenceClassification"]
    }
    fields |= {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}, "pad_token_id": 0}
    (judge / "config.json").write_text(json.dumps(fields))
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(100)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder / "tokenizer")
    blocks = sum(block.weight_bytes for block in spec.blocks if block.kind == "block")
    return Folders(policy, judge, folder / "tokenizer", blocks)


Start = tuple[str, Callable[[str], Callable[[], object]]]
"""A phase's name, and what makes its model, offloaded in a way, and gives what runs the phase."""


def reference(made: Folders, sequences: int, micro: int, tokens: int) -> Start:
    """The reference policy in verl's worker."""

    def start(offload: str) -> Callable[[], object]:
        from verl_shard.verl_plugin.stock_engine import Setup, StockRole

        setup = Setup(
            folder=made.policy, strategy="device_map", lengths=[(tokens // 2, tokens - tokens // 2)] * sequences,
            micro_batch_size_per_gpu=micro, ref_offload=offload,
        )  # fmt: skip
        return StockRole("ref", setup).score

    return "ref_log_prob", start


def reward(made: Folders, sequences: int, micro: int, tokens: int) -> Start:
    """The reward model as the reward loop has it."""

    def start(offload: str) -> Callable[[], object]:
        import torch

        from verl_shard.runtime.scoring_model import ScoringModel

        device = 0 if torch.cuda.is_available() else "cpu"
        scorer = ScoringModel(
            made.judge, device_map={"": device}, batch_size=micro, offload=offload, tokenizer=made.tokenizer
        )
        text = " ".join(f"w{3 + n % 90}" for n in range(tokens))
        return lambda: scorer.score([[{"role": "assistant", "content": text}]] * sequences)

    return "reward", start


def phase_rows(
    start: Start, sequences: int, micro: int, tokens: int, *, copy_s: float, calls: int, meter: Any
) -> list[PhaseRow]:
    """The phase with resident weights, and with streamed ones. meter: time and memory, as GpuMeter."""
    from verl_shard.verl_plugin.stock_engine import forget_engines

    phase, make = start
    rows: list[PhaseRow] = []
    for offload in WAYS:
        forget_engines()
        meter.empty()  # a model before this one may not have been collected yet
        before = meter.held()
        run = make(offload)
        run()
        run()
        seconds = []
        meter.wait()
        meter.begin_peak()
        for _ in range(calls):
            began = time.perf_counter()
            run()
            meter.wait()
            seconds.append(time.perf_counter() - began)
        peak = meter.peak() - before
        meter.empty()
        idle = meter.held() - before
        median = statistics.median(seconds)
        limit = rows[0].limit_s if rows else max(median, sequences / micro * copy_s)
        freed = rows[0].idle - idle if rows else 0
        rows.append(PhaseRow(phase, offload, sequences, micro, tokens, median, peak, idle, freed, limit))
        del run
    forget_engines()
    meter.empty()
    return rows


def phases_table(model: str, rows: Sequence[PhaseRow], link: float, block_bytes: int) -> Any:
    """All rows; GB are 10**9 bytes."""
    shown = [
        (
            row.phase, f"{row.sequences} x {row.tokens} in {row.micro_batch}s", row.offload, f"{row.seconds:.3f}",
            f"{row.ratio:.3f}", f"{row.peak / 1e9:.2f}", f"{row.idle / 1e9:.2f}",
            f"{row.freed / 1e9:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    copy = f"{block_bytes / 1e9:.2f} GB of blocks at {link / 1e9:.1f} GB/s, {block_bytes / link:.3f} s a micro-batch"
    columns = ("phase", "tokens", "offload", "seconds", "of the limit", "peak GB", "idle GB", "freed GB")
    return table(f"Scoring phases of a step, {model}, bf16; {copy}", columns, shown)
