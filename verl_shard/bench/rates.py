"""Measures the Rates of this machine's first GPU and of its host, in under a minute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_shard.bench.record import machine
from verl_shard.common.errors import ConfigError, config_error
from verl_shard.common.tables import out, table
from verl_shard.config.cards import find_card
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import Trace
from verl_shard.memory.work import BACKWARD, CASTS, DECODE, FORWARD, RECOMPUTE
from verl_shard.planning.rates import Rates

_WIDTHS = ((896, 4864), (2048, 8192), (4096, 14336))
"""Rows and columns of the largest matrices in Qwen2 0.5B, Llama 3.2 1B and Llama 3.1 8B."""
_TOKENS = 8192
_TOKENS_OF_A_TURN = 24
SCORED = (2, 896, 4, 512)
"""What scores on the CPU: layers of Qwen2 0.5B's width, few of them, as a host without products of 16 bits takes seconds for
each; a micro-batch's sequences and their tokens."""


def need_gpu(what: str, without: str) -> None:
    """Raises ConfigError where torch sees no GPU. without: what can be done there."""
    import torch

    if not torch.cuda.is_available():
        why = "it measures on a GPU, and torch sees none"
        raise config_error("no-gpu", f"bench {what}", None, why, f"Run it on a machine with a GPU; {without}")


def bench_rates(*, result: Path | None) -> Rates:
    """Measures, prints a table, and writes JSON that Rates.load reads when `result` is given."""
    need_gpu("rates", "the rates of known cards need none: Rates.of")
    rates = measure_rates()
    out.print(rates_table(rates))
    if result is not None:
        rates.save(result, machine())
    return rates


def rates_table(rates: Rates) -> Any:
    """Rates for people, with the shares of the card's data sheet where the card is known."""
    card = _card(rates.name)
    rows = []
    for name, value in asdict(rates).items():
        if name in ("name", "source"):
            continue
        promised = getattr(card, "bf16_flops" if name == "attention_flops" else name, None)
        share = "" if not promised else f"{value / promised:.1%}"
        if name.endswith("_s"):
            rows.append((name, f"{value * 1e6:.1f} us", share))
        else:
            scale, unit = (1e12, "TFLOP/s") if name.endswith("flops") else (1e9, "GB/s")
            rows.append((name, f"{value / scale:.1f} {unit}", share))
    return table(f"Rates of {rates.name}: {rates.source}", ("", "reached", "of the data sheet's"), rows)


def _card(name: str) -> Any:
    try:
        return find_card(name)
    except ConfigError:
        return None


def measure_rates() -> Rates:
    """Rates of the first GPU and its host; the link to a second GPU where there is one.

    What kernels take beside their work (`kernel_s`, `graph_kernel_s`) shows only in real models, and is fitted to those: the
    first by bench times, the second from bench elastic.
    """
    import torch

    name = torch.cuda.get_device_name(0)
    host = _copy_rate("cpu")
    card = _card(name)
    link = _copy_rate("cuda:1") if torch.cuda.device_count() > 1 else (card.link_bandwidth if card else host)
    return Rates(
        name=name,
        bf16_flops=_products(torch.bfloat16, _TOKENS),
        fp32_flops=_products(torch.float32, _TOKENS // 4),
        attention_flops=_attention(),
        memory_bandwidth=_moves(),
        host_bandwidth=host,
        link_bandwidth=link,
        source="measured by verl-shard bench rates",
        cpu_flops=cpu_rate(),
        **_host(),
    )


def gpu_seconds(run: Callable[[], object], turns: int = 10) -> float:
    """Of one call on the GPU, the mean of several after three; for calls that the host launches faster than they run."""
    import torch

    for _ in range(3):
        run()
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(turns):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / turns


def wall_seconds(run: Callable[[], object], turns: int = 5, warm: int = 2) -> float:
    """Of one call and its end on the GPU, the median of several."""
    import torch

    taken = []
    for turn in range(warm + turns):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if turn >= warm:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _products(dtype: Any, tokens: int) -> float:
    """FLOP/s over products of tokens with the widths of real models, random numbers (zeros draw less power)."""
    import torch

    flops = seconds = 0.0
    for rows, columns in _WIDTHS:
        a = torch.randn(tokens, rows, device="cuda", dtype=dtype)
        b = torch.randn(rows, columns, device="cuda", dtype=dtype)
        seconds += gpu_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        flops += 2.0 * tokens * rows * columns
    return flops / seconds


def _attention() -> float:
    """FLOP/s of causal attention forward and backward, 32 heads of 128, its products counted whole."""
    import torch

    q, k, v = (torch.randn(4, 32, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def run() -> None:
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(made, (q, k, v), made)

    return 3.5 * 4 * 4 * 32 * 2048**2 * 128 / gpu_seconds(run)


def _moves() -> float:
    """Bytes/s of the element-wise operations of a block: an activation, products, a sum, a mean, changes of dtype."""
    import torch

    x, y = (torch.randn(2 * _TOKENS, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wide, row = x.float(), y[0].clone()
    n = x.numel()
    moved: Sequence[tuple[Callable[[], object], int]] = (
        (lambda: torch.nn.functional.silu(x), 4 * n),
        (lambda: x * y, 6 * n),
        (lambda: x + y, 6 * n),
        (lambda: x * row, 4 * n),
        (lambda: x.float(), 6 * n),
        (lambda: wide.pow(2), 8 * n),
        (lambda: wide.mean(-1), 4 * n),
        (lambda: wide.to(torch.bfloat16), 6 * n),
    )
    return sum(n_bytes for _, n_bytes in moved) / sum(gpu_seconds(run) for run, _ in moved)


def cpu_rate(scored: tuple[int, int, int, int] = SCORED, turns: int = 3) -> float:
    """FLOP/s of whole forwards in bf16 on the CPU, the median of several after one. Needs no GPU.

    scored: layers, width, sequences, tokens. With the threads that torch has in this process, by default all cores.
    """
    import torch
    from transformers import AutoModelForCausalLM

    layers, width, sequences, tokens = scored
    config = small_config(layers, width)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids = torch.randint(0, 1000, (sequences, tokens))
    taken = []
    with torch.no_grad():
        for _ in range(1 + turns):
            began = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            taken.append(time.perf_counter() - began)
    wanted = PassSpec(phase="forward", batch_size=sequences, seq_len=tokens, precision="bf16")
    return float(traced_pass(config, wanted).recording.work.flops.sum()) / statistics.median(taken[1:])


def _copy_rate(other: str) -> float:
    """Bytes/s from pinned host memory, or from another GPU, to the first."""
    import torch

    size = 1 << 29
    source = torch.empty(size, dtype=torch.uint8, device=other, pin_memory=other == "cpu")
    target = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    return size / gpu_seconds(lambda: target.copy_(source, non_blocking=True), 5)


def small_config(layers: int, width: int) -> Any:
    """The configuration of a Qwen2 of that many layers, for what only depends on how many operations there are."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen2", hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=4096, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip


def traced_pass(config: Any, wanted: PassSpec) -> Trace:
    """The Trace of a pass of a configuration's causal language model."""
    from verl_shard.memory.trace import trace
    from verl_shard.models.read import read_model

    spec, module = read_model(config, task="causal-lm", dtype=wanted.weight_dtype)
    return trace(spec, module, wanted)


def build(config: Any, dtype: Any) -> Any:
    """A model with random weights, made on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def generated(model: Any, ids: Any, n: int) -> Any:
    """`n` tokens for each row of ids, (batch, length)."""
    import torch

    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
    )


def _launches(traced: Trace, phase: int) -> int:
    """Operations of one phase that the host launches from Python."""
    work = traced.recording.work
    return int(((work.phases == phase) & (work.kinds != CASTS)).sum())


def _host() -> dict[str, float]:
    """Seconds of the host for each operation: a model so narrow that the GPU waits for it all the time."""
    import torch

    shape: dict[str, Any] = {"batch_size": 1, "seq_len": 16, "precision": "bf16"}
    config = small_config(12, 128)
    model = build(config, torch.bfloat16).train()
    ids = torch.randint(0, 1000, (1, 16), device="cuda")
    plain, again = (traced_pass(config, PassSpec(gradient_checkpointing=on, **shape)) for on in (False, True))
    forward, backward = _forward_and_backward(model, ids)
    with torch.no_grad():
        scoring = wall_seconds(lambda: model(input_ids=ids, labels=ids, use_cache=False), 9)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, repeated = _forward_and_backward(model, ids)
    per_token = []
    for layers in (6, 18):
        config = small_config(layers, 128)
        model = build(config, torch.bfloat16).eval()
        seconds = [wall_seconds(lambda n=n, m=model: generated(m, ids, n), 3, 1) for n in (1, 1 + _TOKENS_OF_A_TURN)]  # type: ignore[misc]
        traced = traced_pass(config, PassSpec(phase="generate", new_tokens=2, **shape))
        per_token.append(((seconds[1] - seconds[0]) / _TOKENS_OF_A_TURN, _launches(traced, DECODE)))
    (few_s, few), (many_s, many) = per_token
    decode_s = (many_s - few_s) / (many - few)
    return {
        "forward_s": (forward + scoring) / 2 / _launches(plain, FORWARD),
        "backward_s": backward / _launches(plain, BACKWARD),
        "recompute_s": max(repeated - backward, 0.0) / _launches(again, RECOMPUTE),
        "decode_s": decode_s,
        "token_s": max(few_s - few * decode_s, 0.0),
    }


def _forward_and_backward(model: Any, ids: Any) -> tuple[float, float]:
    """Seconds of each, the median of several turns."""
    import torch

    halves: tuple[list[float], list[float]] = ([], [])
    for turn in range(11):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        torch.cuda.synchronize()
        between = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        if turn > 1:
            halves[0].append(between - began)
            halves[1].append(time.perf_counter() - between)
    return statistics.median(halves[0]), statistics.median(halves[1])
