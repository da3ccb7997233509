"""Times held against passes measured on H200s, against arithmetic, and in the order in which plans must come."""

from __future__ import annotations

import json
import statistics
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from verl_shard.bench.maps import zoo as zoo_entries
from verl_shard.bench.times import Part, Traces, _config
from verl_shard.config.cards import CARDS
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import Trace, trace
from verl_shard.memory.work import BACKWARD, CASTS, FORWARD, FP32
from verl_shard.models.meta import config_for
from verl_shard.models.read import spec_of_config
from verl_shard.planning.rates import Rates
from verl_shard.planning.times import (
    PassTime,
    generate_seconds,
    host_copy_seconds,
    link_copy_seconds,
    optimizer_seconds,
    pass_seconds,
)

_TRUTH = json.loads((Path(__file__).parents[1] / "data" / "h200_memory.json").read_text())
# The machine of those rows had a slower host than the one that the defaults are from, and other shares fit it best.
_H200 = replace(
    Rates.of(CARDS["h200-141g"]),
    bf16_flops=0.68 * 989e12,
    attention_flops=0.68 * 989e12,
    memory_bandwidth=0.74 * 4800e9,
    forward_s=33e-6,
    backward_s=38e-6,
    recompute_s=107e-6,
    decode_s=73e-6,
    token_s=2e-3,
)
# Two micro-batches of 8 x 1024 tokens and eight of 2 x 1024 of Qwen2-7B on one H200 and on two: seconds.
_ONE_GPU = {("forward", 2): 0.471, ("forward", 8): 0.493, ("train", 2): 1.388, ("train", 8): 1.539}
_TWO_IN_TURN = {("forward", 2): 0.451, ("forward", 8): 0.484, ("train", 2): 1.343, ("train", 8): 1.493}
_TWO_AT_ONCE = {("forward", 2): 0.329, ("forward", 8): 0.271, ("train", 2): 1.018, ("train", 8): 0.887}
_FIRST_CALL_S = 1.3
"""What the first call of `generate` in a process takes more; each measured one was the first."""


@cache
def _traced(model: str, wanted: PassSpec) -> Trace:
    fields = dict(_TRUTH["configs"][model])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    spec, module = spec_of_config(config_for(config, "causal-lm"), name=model, task="causal-lm", dtype=torch.float32)
    return trace(spec, module, wanted)


def _measured(row: dict[str, Any]) -> tuple[PassSpec, PassTime]:
    shape: dict[str, Any] = {"batch_size": row["batch"], "seq_len": row.get("seq") or row["prompt"]}
    if row["kind"] == "generate":
        wanted = PassSpec(phase="generate", new_tokens=row["new"], **shape)
        return wanted, generate_seconds(_traced(row["model"], wanted), wanted, _H200)
    if row["kind"] == "forward":
        wanted = PassSpec(phase="forward", **shape)
        return wanted, pass_seconds(_traced(row["model"], wanted), wanted, _H200)
    shape.update(gradient_checkpointing=row["ckpt"], attn_implementation=row["attn"])
    wanted = PassSpec(precision="bf16" if row["master"] == "bf16" else "bf16-mixed", **shape)
    traced = _traced(row["model"], wanted)
    return wanted, pass_seconds(traced, wanted, _H200) + optimizer_seconds(traced, _H200)


def test_steps_measured_on_an_h200() -> None:
    """Every second of 26 steps of training and scoring; the six constants above were fitted to them."""
    errors = []
    rows = [row for row in _TRUTH["rows"] if row["kind"] in ("train", "forward") and not row.get("oom")]
    for row in rows[::2]:
        wanted, time = _measured(row)
        errors.append(abs(time.seconds / row["step_s"] - 1))
        assert errors[-1] < 0.2, (row["model"], wanted.words)
    assert len(errors) == 13
    assert statistics.median(errors) < 0.06


def test_generations_measured_on_an_h200() -> None:
    rows = [row for row in _TRUTH["rows"] if row["kind"] == "generate"]
    assert len(rows) == 3
    for row in rows:
        _, time = _measured(row)
        assert time.bound == "launches"
        assert time.seconds + _FIRST_CALL_S == pytest.approx(row["step_s"], rel=0.15)


def _seven_billion(phase: Any, n_micro: int, rates: Rates = _H200, **how: Any) -> PassTime:
    shape: dict[str, Any] = {"batch_size": 16 // n_micro, "seq_len": 1024, "precision": "bf16", "loss": "causal-lm"}
    wanted = PassSpec(phase=phase, **shape)
    return pass_seconds(_traced("qwen2-7b", wanted), wanted, rates, n_micro=n_micro, **how)


_HALVES = ((0, 15), (15, 31))
"""The embedding and 14 blocks; 14 blocks, the norm and the head."""


@pytest.mark.parametrize(("phase", "n"), _ONE_GPU)
def test_maps_measured_on_two_h200s(phase: str, n: int) -> None:
    one = _seven_billion(phase, n).seconds
    in_turn = _seven_billion(phase, n, stages=_HALVES).seconds
    at_once = _seven_billion(phase, n, stages=_HALVES, pipelined=True).seconds
    assert one == pytest.approx(_ONE_GPU[phase, n], rel=0.1)
    assert in_turn == pytest.approx(_TWO_IN_TURN[phase, n], rel=0.1)
    assert at_once == pytest.approx(_TWO_AT_ONCE[phase, n], rel=0.2)


def test_plans_come_in_the_measured_order() -> None:
    """Six ways to train on the same 16 x 1024 tokens."""
    found = {}
    for n in (2, 8):
        found[_ONE_GPU["train", n]] = _seven_billion("train", n).seconds
        found[_TWO_AT_ONCE["train", n]] = _seven_billion("train", n, stages=_HALVES, pipelined=True).seconds
    wanted = PassSpec(batch_size=8, seq_len=1024, precision="bf16", gradient_checkpointing=True)
    traced = _traced("qwen2-7b", wanted)
    found[1.711] = pass_seconds(traced, wanted, _H200, n_micro=2).seconds
    found[1.260] = pass_seconds(traced, wanted, _H200, n_micro=2, stages=_HALVES, pipelined=True).seconds
    assert [found[key] for key in sorted(found)] == sorted(found.values())


def _rung(adds: str) -> tuple[float, float, Trace]:
    """Seconds of an update as the ladder's row measured it, and as they are predicted by the card's data sheet."""
    results = Path(__file__).parents[2] / "docs" / "results" / "h200_ladder.json"
    (row,) = [row for row in json.loads(results.read_text())["rows"] if row["adds"] == adds]
    loss: Any = "verl-fused" if row["rung"]["fused"] else "ppo"
    wanted = PassSpec(
        batch_size=8, seq_len=2048, precision="bf16-mixed", gradient_checkpointing=row["rung"]["checkpointing"], loss=loss,
        padded=True, accumulating=True,
    )  # fmt: skip
    traced, rates = _traced("qwen2-0.5b", wanted), Rates.of(CARDS["h200-141g"])
    predicted = pass_seconds(traced, wanted, rates, n_micro=2) + optimizer_seconds(traced, rates)
    return row["seconds"], predicted.seconds, traced


def test_fused_logits_take_the_time_that_the_ladder_measured() -> None:
    """Nothing was fitted to it: its products of the backward are of 32 bits, and each chunk casts the head's weights."""
    (plain, _), (slow, _), (slower, _) = found = [
        _rung(adds)[:2] for adds in ("sdpa's fused kernel", "gradient checkpointing", "fused logits")
    ]
    assert plain < slow < slower
    for measured, predicted in found:
        assert predicted == pytest.approx(measured, rel=0.1)
    assert [predicted for _, predicted in found] == sorted(predicted for _, predicted in found)


def test_the_work_of_a_fused_head_by_hand() -> None:
    """16,384 tokens are 32 chunks. A product of tokens, size and vocabulary takes 2 x their product of FLOPs: one in the
    forward, of 16 bits; three in the backward, of 32, as that is outside of autocast."""
    _, _, traced = _rung("fused logits")
    work = traced.recording.work
    one = 2 * 16384 * 896 * 151936
    assert work.flops[(work.phases == FORWARD) & (work.blocks == traced.n_blocks - 1)].sum() == one
    assert work.flops[(work.phases == BACKWARD) & (work.kinds == FP32)].sum() == 3 * one
    assert (work.flops == one // 32).sum() == 4 * 32
    assert traced.flops[-1] == (one, 3 * one)
    # The weights' copy of 16 bits, anew for each chunk: 4 bytes read and 2 written.
    assert ((work.kinds == CASTS) & (work.n_bytes == 6 * 896 * 151936)).sum() == 32


def test_a_chunk_that_is_not_full_is_counted_in_part() -> None:
    """640 tokens are a chunk of 512 and a quarter of one."""
    wanted = PassSpec(phase="forward", batch_size=1, seq_len=640, loss="verl-fused")
    work = _traced("qwen2-0.5b", wanted).recording.work
    products = work.flops[(work.flops > 0) & (work.blocks == work.blocks.max())]
    assert sorted(products.tolist()) == [2 * n * 896 * 151936 for n in (128, 512)]


def test_a_pipeline_by_its_formula() -> None:
    """(micro-batches + stages - 1) x the slowest stage, when the host and the links take nothing."""
    free = replace(_H200, forward_s=0.0, link_bandwidth=1e18)
    halves = [_seven_billion("forward", 8, free, stages=(stage,)).seconds / 8 for stage in _HALVES]
    at_once = _seven_billion("forward", 8, free, stages=_HALVES, pipelined=True)
    assert at_once.seconds == pytest.approx((8 + 2 - 1) * max(halves))
    assert at_once.idle_s == pytest.approx(max(halves))
    assert _seven_billion("forward", 8, free, stages=_HALVES).seconds == pytest.approx(8 * sum(halves))
    # One thread launches for all stages.
    slow = replace(free, forward_s=1e-3)
    busy = _seven_billion("forward", 8, slow, stages=_HALVES, pipelined=True)
    assert busy.bound == "launches"
    assert busy.seconds == pytest.approx(busy.host_s) == pytest.approx(_seven_billion("forward", 8, slow).seconds)


def test_what_crosses_between_stages() -> None:
    """2 x 1024 tokens of 3584 numbers of 2 bytes, and the rotation: two tables of 1024 x 128 of 2 bytes, which need not
    be one for each sequence."""
    slow = replace(_H200, link_bandwidth=1e6)
    hidden, tables = 2 * 1024 * 3584 * 2, 2 * 1024 * 128 * 2
    copy_s = _seven_billion("forward", 8, slow, stages=_HALVES).copy_s / 8
    assert hidden + tables <= copy_s * 1e6 <= hidden + 2 * tables + 32768
    assert _seven_billion("forward", 8, slow, stages=_HALVES, pipelined=True).copy_s == pytest.approx(copy_s)
    assert _seven_billion("forward", 8, slow).copy_s == 0


@pytest.mark.parametrize(("batch", "prompt"), [(16, 512), (128, 16)])
def test_a_token_by_memory_bandwidth(batch: int, prompt: int) -> None:
    """Without a host, a token takes no less than the weights and the cache over the bandwidth, and not much more."""
    free = replace(_H200, decode_s=0.0, forward_s=0.0, token_s=0.0, kernel_s=0.0)
    times = []
    for new in (1, 1025):
        wanted = PassSpec(phase="generate", batch_size=batch, seq_len=prompt, new_tokens=new)
        times.append(generate_seconds(_traced("qwen2-7b", wanted), wanted, free))
    token_s = (times[1].seconds - times[0].seconds) / 1024
    weights = 2 * (7_615_616_512 - 152_064 * 3584)
    cache = 28 * 2 * 4 * 128 * 2 * batch * (prompt + 512.5)
    least = (weights + 3 * cache) / free.memory_bandwidth
    assert least < token_s < 1.15 * least  # activations and logits are moved too
    assert times[1].bound == "memory"
    wanted = PassSpec(phase="generate", batch_size=16, seq_len=512, new_tokens=129)
    hosted = replace(_H200, decode_s=1e-3, token_s=0.5)
    whole = generate_seconds(_traced("qwen2-7b", wanted), wanted, hosted)
    assert whole.bound == "launches"
    assert whole.seconds > 129 * 0.5


def test_a_token_of_a_graph_is_launched_at_once_and_copies_no_cache() -> None:
    """Weights and a full cache over the bandwidth; three launches of a token for each graph, of which 1,024 tokens need 16."""
    free = replace(_H200, decode_s=0.0, forward_s=0.0, token_s=0.0, kernel_s=0.0, graph_kernel_s=0.0)
    wanted = PassSpec(phase="generate", batch_size=16, seq_len=512, new_tokens=1025)
    traced = _traced("qwen2-7b", wanted)

    def decoding(rates: Rates, graph_steps: int = 64) -> float:
        made = [generate_seconds(traced, wanted, rates, new_tokens=n, graph_steps=graph_steps) for n in (1, 1025)]
        return made[1].seconds - made[0].seconds

    weights = 2 * (7_615_616_512 - 152_064 * 3584)
    cache = 28 * 2 * 4 * 128 * 2 * 16 * (512 + 1024)
    least = (weights + cache) / free.memory_bandwidth
    assert least < decoding(free) / 1024 < 1.15 * least
    hosted = replace(free, decode_s=1e-3)
    step_s = decoding(hosted, 0) / 1024  # launches longer than the GPU's work
    assert decoding(hosted) == pytest.approx(16 * 3 * step_s + (1024 - 16) / 1024 * decoding(free), rel=1e-6)
    # None is made for the 4 of 1,024 that are left after 6 of 170.
    assert decoding(hosted, 170) == pytest.approx((6 * 3 + 4) * step_s + (1020 - 6) / 1024 * decoding(free), rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_token_of_a_graph_repeats_no_key_and_has_kernels_of_its_own(precision: str) -> None:
    """Of a padded batch transformers' generate repeats keys and values seven times; ours reads them once, and in fp32 under
    autocast casts them: read and written, and the half read."""
    free = replace(_H200, decode_s=0.0, forward_s=0.0, token_s=0.0, kernel_s=0.0, graph_kernel_s=0.0)
    wanted = PassSpec(
        phase="generate", batch_size=16, seq_len=512, new_tokens=65, padded=True, trainable=True, precision=precision
    )  # fmt: skip
    traced = _traced("qwen2-7b", wanted)

    def a_token(rates: Rates, graph_steps: int) -> float:
        made = [generate_seconds(traced, wanted, rates, new_tokens=n, graph_steps=graph_steps) for n in (1, 65)]
        return (made[1].seconds - made[0].seconds) / 64

    weights = 2 * (7_615_616_512 - 152_064 * 3584)
    numbers = 28 * 2 * 4 * 128 * 16 * 576
    moved = {"bf16": 2, "bf16-mixed": 4 + 2 + 2}[precision] * numbers
    least = (weights + moved) / free.memory_bandwidth
    assert least < a_token(free, 64) < 1.1 * least
    assert a_token(free, 0) > least + 7 * 2 * numbers / free.memory_bandwidth  # where they are repeated
    # Launched one by one, a kernel has kernel_s; of those of a graph the copies of the cache are left out: two are appended,
    # two repeated and, where they are fp32, two cast, in each of 28 layers.
    plain, graphed = replace(free, kernel_s=1.0), replace(free, graph_kernel_s=1.0)
    n_copies = 28 * {"bf16": 4, "bf16-mixed": 6}[precision]
    assert a_token(plain, 0) - a_token(graphed, 64) == pytest.approx(n_copies, abs=0.01)


def test_rollouts_measured_on_an_h200() -> None:
    """64 requests of Qwen2 7B, of which nothing was fitted: rows that have ended leave where a graph ends."""
    record = json.loads((Path(__file__).parents[2] / "docs" / "results" / "h200_generate.json").read_text())
    prompts, responses = record["prompt_tokens"], record["response_tokens"]
    rates = Rates.of(CARDS["h200-141g"])
    seconds, at = 0.0, 0
    while at < max(responses) - 1:
        rows = [prompt for prompt, response in zip(prompts, responses, strict=True) if response - 1 > at]
        n = min(64, max(responses) - 1 - at)
        wanted = PassSpec(
            phase="generate", batch_size=len(rows), seq_len=max(rows) + at, new_tokens=n + 1, padded=True, precision="bf16"
        )  # fmt: skip
        traced = _traced(record["model"], wanted)
        whole, prompt = (
            generate_seconds(traced, wanted, rates, new_tokens=made, graph_steps=64).seconds for made in (n + 1, 1)
        )
        # Prompts are computed in groups of alike ones: by their tokens, as if there were no padding.
        seconds += whole - prompt + (0.0 if at else prompt * sum(prompts) / (len(prompts) * max(prompts)))
        at += n
    (measured,) = [row["seconds"] for row in record["rows"] if row["way"] == "ours"]
    assert seconds == pytest.approx(measured, rel=0.1)


def test_gradients_are_added_up() -> None:
    """From the second micro-batch on: two reads and a write of the gradients."""
    free = replace(_H200, forward_s=0.0, backward_s=0.0)
    one = _seven_billion("train", 8, free).seconds
    wanted = PassSpec(batch_size=2, seq_len=1024, precision="bf16", loss="causal-lm")
    single = pass_seconds(_traced("qwen2-7b", wanted), wanted, free).seconds
    assert one - 8 * single == pytest.approx(7 * 3 * 2 * 7_615_616_512 / free.memory_bandwidth, rel=0.001)


def test_what_bounds_a_pass() -> None:
    assert _seven_billion("train", 2).bound == "compute"
    assert _seven_billion("train", 2, replace(_H200, memory_bandwidth=1e11)).bound == "memory"
    assert _seven_billion("train", 2, replace(_H200, backward_s=1.0)).bound == "launches"


def test_copies() -> None:
    assert host_copy_seconds(54.8e9, _H200) == pytest.approx(1)
    assert link_copy_seconds(376e9, _H200) == pytest.approx(1)


def test_a_token_of_experts_reads_them(zoo: dict[str, Any]) -> None:
    """128 tokens that choose 8 of 128 experts each reach nearly all: all weights but the embedding's are read."""
    config = AutoConfig.for_model(zoo["qwen3-30b-a3b"]["model_type"], **zoo["qwen3-30b-a3b"]["kwargs"])
    spec, module = spec_of_config(config_for(config, "causal-lm"), name="moe", task="causal-lm", dtype=torch.float32)
    wanted = PassSpec(phase="generate", batch_size=128, seq_len=16, new_tokens=2)
    free = replace(_H200, decode_s=0.0, token_s=0.0, kernel_s=0.0)
    traced = trace(spec, module, wanted)
    prompt = pass_seconds(traced, replace(wanted, phase="forward", new_tokens=0), free)
    token_s = generate_seconds(traced, wanted, free).seconds - prompt.seconds
    weights = 2 * (30_532_122_624 - 151_936 * 2048)
    assert weights / free.memory_bandwidth == pytest.approx(token_s, rel=0.1)


def test_fewer_tokens_of_a_longer_trace() -> None:
    """The same as a trace that is as short, but for the shape in which the allocator rounds."""
    long, short = (PassSpec(phase="generate", batch_size=16, seq_len=512, new_tokens=n) for n in (1025, 65))
    cut = generate_seconds(_traced("qwen2-7b", long), long, _H200, new_tokens=65)
    own = generate_seconds(_traced("qwen2-7b", short), short, _H200)
    assert cut.seconds == pytest.approx(own.seconds, rel=0.01)
    assert cut.memory_s == pytest.approx(own.memory_s, rel=0.02)


def test_whole_steps_measured_on_an_h200_with_the_defaults() -> None:
    """Generation, two scorings and an update of three shapes; the defaults were fitted to their passes, not to them."""
    record = json.loads((Path(__file__).parents[2] / "docs" / "results" / "h200_times.json").read_text())
    rates = Rates.of(CARDS["h200-141g"])
    assert record["rates"]["kernel_s"] == rates.kernel_s
    steps = [row for row in record["rows"] if row["step"]]
    assert [row["model"] for row in steps] == ["qwen2-0.5b", "llama-3.1-8b", "qwen3-0.6b"]
    assert all(abs(row["predicted_s"] / row["measured_s"] - 1) < 0.1 for row in steps)
    small = steps[0]
    configs = {entry["name"]: entry for entry in zoo_entries()}
    found = Traces(_config(configs[small["model"]])).predicted(_parts(small), rates)
    assert found.seconds == pytest.approx(small["predicted_s"], rel=0.01)


def _parts(row: dict[str, Any]) -> list[Part]:
    known = {field.name for field in fields(PassSpec)}
    return [
        Part(
            PassSpec(**{name: value for name, value in part["wanted"].items() if name in known}),
            part["n_micro"],
            part["passes"],
            part["optimizer"],
        )
        for part in row["parts"]
    ]
