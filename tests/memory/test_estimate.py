"""Estimates held against 70 passes measured on an H200, and what they must be by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import small_qwen2
from transformers import AutoConfig, AutoModelForCausalLM

from verl_shard import MemoryEstimate, build_device_map, estimate_memory
from verl_shard.bench.memory import _estimate
from verl_shard.bench.memory_rows import Row
from verl_shard.common.errors import ConfigError
from verl_shard.memory.constants import CUBLAS_HOPPER, CUBLAS_LT

_RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200_memory.json"
_RECORDED = json.loads(_RESULTS.read_text())
_ROWS = _RECORDED["rows"]
_HARDEST = (4, 8, 11, 15, 30, 47, 48, 53, 57, 58, 63, 65)
"""Rows whose reserved memory was or is furthest off: what fits into which cached block decides them."""
_TRUTH = json.loads((Path(__file__).parents[1] / "data" / "h200_memory.json").read_text())


@pytest.mark.parametrize("index", sorted({*range(0, len(_ROWS), 6), *_HARDEST}))
def test_passes_measured_on_an_h200(index: int) -> None:
    measured = _ROWS[index]
    estimate = _estimate(Row(**measured["row"]))
    assert estimate.peak == pytest.approx(measured["measured_peak"], rel=0.005)
    exact = measured["row"]["phase"] == "forward"  # few blocks are cached, and each fits or does not
    assert estimate.reserved == pytest.approx(measured["measured_reserved"], rel=0.002 if exact else 0.06)


@pytest.mark.parametrize("model", ["qwen2-0.5b", "llama-3.2-1b"])
@pytest.mark.parametrize(("master", "ckpt"), [("fp32", True), ("fp32", False), ("bf16", True)])
def test_each_phase_measured_on_an_h200(model: str, master: str, ckpt: bool) -> None:
    """Both models tie their head to the embedding, whose two gradients are summed in the backward: in place."""
    (row,) = (
        row
        for row in _TRUTH["rows"]
        if row["kind"] == "train"
        and (row["model"], row["master"], row["ckpt"]) == (model, master, ckpt)
        and (row["batch"], row["seq"], row["attn"]) == (4, 512, "sdpa")
    )
    fields = dict(_TRUTH["configs"][model])
    estimate = estimate_memory(
        AutoConfig.for_model(fields.pop("model_type"), **fields),
        task="causal-lm",
        batch_size=4,
        seq_len=512,
        precision="bf16-mixed" if master == "fp32" else "bf16",
        gradient_checkpointing=ckpt,
    )
    assert estimate.forward_peak == pytest.approx(row["fwd_peak"], rel=0.003)
    assert estimate.backward_peak == pytest.approx(row["bwd_peak"], rel=0.003)
    assert estimate.optimizer_peak == pytest.approx(row["opt_peak"], rel=0.003)


def _small(**fields: Any) -> Any:
    return small_qwen2(**{"max_position_embeddings": 256, **fields})


def _parts(estimate: MemoryEstimate) -> int:
    names = (
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "kv_cache",
        "workspace",
        "rounding_and_copies",
    )
    return sum(getattr(estimate, name) for name in names)


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        ("train", {}),
        ("train", {"batch_size": 5, "seq_len": 33, "gradient_checkpointing": True}),
        ("train", {"precision": "bf16", "optimizer": "adamw-fused", "in_flight": 6}),
        ("train", {"accumulating": True, "loss": "ppo"}),
        ("forward", {}),
        ("forward", {"batch_size": 1, "seq_len": 8}),
        ("generate", {"new_tokens": 8}),
        ("generate", {"batch_size": 3, "seq_len": 17, "new_tokens": 1}),
    ],
)
def test_the_parts_are_the_peak_to_the_byte(phase: str, fields: dict[str, Any]) -> None:
    config = _small(hidden_size=512, intermediate_size=1280)
    given: dict[str, Any] = {"batch_size": 2, "seq_len": 64} | fields
    device_map = build_device_map(config, 2, purpose="inference")
    for own in (None, device_map):
        estimate = estimate_memory(config, phase=phase, device_map=own, **given)
        for each in (estimate, *estimate.gpus.values()):
            assert _parts(each) == each.peak == max(each.phases.values())
            assert each.rounding_and_copies >= 0
        there = any(each.rounding_and_copies for each in estimate.gpus.values() or [estimate])
        assert ("rounding_and_copies" in estimate.report(200)) == there
    assert "rounding_and_copies" in json.loads(json.dumps(estimate.to_dict()))["gpus"]["1"]


@pytest.mark.parametrize(("rows", "beyond"), [(11 * 256, 2**20), (10 * 256 + 128, 0), (9 * 256, 0), (12 * 256, 0)])
def test_what_the_allocator_gives_out_beyond_what_is_asked_by_hand(rows: int, beyond: int) -> None:
    """An embedding of rows x 1024 numbers of 4 bytes, and nothing else: 256 rows are 1 MiB. Of 11 MiB the segment has 12,
    whose last is not cut off; of 10.5 it has 12, and 1.5 are; 9 are cut out of 20, and 12 are whole. One sequence of 64 tokens
    makes 64 x 4 KiB, of a block of 512 bytes times some."""
    module = torch.nn.Sequential(torch.nn.Embedding(rows, 1024))
    estimate = estimate_memory(module, phase="forward", precision="fp32", batch_size=1, seq_len=64)
    assert estimate.weights == rows * 4096
    assert estimate.rounding_and_copies == beyond


@pytest.mark.parametrize("phase", ["train", "forward", "generate"])
def test_the_parts_make_the_peak(phase: str) -> None:
    more = {"new_tokens": 8} if phase == "generate" else {}
    estimate = estimate_memory(_small(), phase=phase, batch_size=2, seq_len=64, **more)
    assert estimate.peak == max(estimate.phases.values())
    # What the allocator gives out beyond what was asked for is little.
    assert 0 <= estimate.rounding_and_copies <= 0.02 * estimate.peak
    # One more for the products with a bias, of which a Qwen2 has three a block, and none in the backward.
    assert estimate.workspace == (2 if phase == "train" else 1) * CUBLAS_HOPPER.n_bytes + CUBLAS_LT.n_bytes
    assert estimate.reserved >= estimate.peak


def test_the_cache_of_generation_by_hand() -> None:
    """2 x 4 layers x 2 heads x 16 x 2 bytes a token, each tensor in multiples of 512 bytes."""
    estimate = estimate_memory(_small(), phase="generate", batch_size=2, seq_len=32, new_tokens=200)
    assert estimate.kv_cache >= 2 * 4 * 2 * 16 * 2 * 2 * 231
    assert estimate.gradients == estimate.optimizer == 0


def test_on_each_gpu_of_a_map() -> None:
    config = _small()
    fields: dict[str, Any] = {"batch_size": 2, "seq_len": 128}
    device_map = build_device_map(config, 3, purpose="training", **fields)
    estimate = estimate_memory(config, device_map=device_map, **fields)
    assert list(estimate.gpus) == [0, 1, 2]
    for gpu, load in device_map.loads.items():
        assert estimate.gpus[gpu].peak - estimate.gpus[gpu].workspace == pytest.approx(load, rel=0.02)
    assert estimate.peak == max(e.peak for e in estimate.gpus.values())
    assert "fullest GPU" in estimate.report()
    whole = estimate_memory(config, device_map={"": 0}, **fields)
    assert whole.gpus[0].peak == estimate_memory(config, **fields).peak
    round_robin = {name: index // 2 % 2 for index, name in enumerate(device_map)}
    assert set(estimate_memory(config, device_map=round_robin, **fields).gpus) == {0, 1}


def test_adapters_save_gradients_and_states() -> None:
    config = _small(hidden_size=256, intermediate_size=640)
    whole = estimate_memory(config, batch_size=1, seq_len=16, precision="bf16")
    adapted = estimate_memory(config, batch_size=1, seq_len=16, precision="bf16", lora_rank=4)
    assert adapted.optimizer < 0.3 * whole.optimizer
    assert adapted.peak < whole.peak
    assert adapted.weights > whole.weights


def test_losses_differ_in_what_they_keep() -> None:
    fields: dict[str, Any] = {"batch_size": 4, "seq_len": 256, "precision": "bf16", "optimizer": "sgd"}
    config = _small(vocab_size=50_000)
    own, ppo = (estimate_memory(config, loss=loss, **fields).backward_peak for loss in ("causal-lm", "ppo"))
    short = estimate_memory(config, logits_to_keep=16, **fields).backward_peak
    assert short < ppo < own


def test_a_value_model_has_no_logits() -> None:
    estimate = estimate_memory(_small(vocab_size=50_000), task="value", batch_size=4, seq_len=128)
    assert estimate.logits < 2**20


def test_attention_dropout_keeps_a_byte_a_score() -> None:
    """GPT-2 with dropout is as fused as without: its scores are nowhere."""
    fields: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512}
    plain, dropping = (
        estimate_memory(
            AutoConfig.for_model("gpt2", **fields, attn_pdrop=p), batch_size=4, seq_len=512, optimizer="sgd"
        )
        for p in (0.0, 0.1)
    )
    assert dropping.peak == plain.peak


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"seq_len": 512}, "the model has 256 positions"),
        ({"phase": "generate", "seq_len": 250, "new_tokens": 10}, "250 [+] 10"),
        ({"optimizer": "adam"}, 'Use one of "adamw"'),
        ({"phase": "training"}, 'Use one of "train"'),
        ({"seqlen": 8}, 'Did you mean "seq_len"'),
        ({"lora_rank": -1}, "lora_rank = -1"),
        ({"device_map": {"model": 0}}, "it gives no device for lm_head.weight"),
        ({"task": "reward", "phase": "generate"}, "only causal language models"),
    ],
)
def test_bad_input(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate_memory(_small(), **{"batch_size": 1, "seq_len": 8, **fields})


def test_it_is_read_as_text_and_as_json() -> None:
    estimate = estimate_memory(_small(), batch_size=1, seq_len=8)
    assert "peak" in estimate.report()
    assert json.loads(json.dumps(estimate.to_dict()))["schema"] == "verl_shard/memory_estimate/1"


def test_the_command(small_config: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from verl_shard.cli.main import run

    small_config("llama").save_pretrained(tmp_path / "model")
    argv = ["estimate", str(tmp_path / "model"), "--batch-size", "2", "--seq-len", "16"]
    assert run([*argv, "--gradient-checkpointing", "--packed"]) == 0
    said = capsys.readouterr().out
    assert "reserved by torch" in said
    assert "packed" in said
    map_file = str(tmp_path / "map.json")
    assert run(["map", str(tmp_path / "model"), "--gpus", "2", "--save", map_file]) == 0
    capsys.readouterr()
    assert run([*argv, "--device-map", map_file, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["gpus"]) == {"0", "1"}
    assert run([*argv, "--phse", "train"]) == 2


def test_what_changes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate_memory(_small(), phase="forward", seq_len=8, gradient_checkpointing=True, in_flight=2, new_tokens=5)
    assert {finding.where for finding in caught.value.findings} == {"gradient_checkpointing", "in_flight", "new_tokens"}
    with pytest.raises(ConfigError, match="lora_rank = 8: a map names the modules of a given model"):
        build_device_map(_small(), 2, purpose="training", lora_rank=8)


def test_devices_as_people_name_them() -> None:
    estimate = estimate_memory(_small(), device_map={"model": 0, "lm_head": "cuda:0"}, batch_size=1, seq_len=8)
    assert list(estimate.gpus) == [0]
    with pytest.raises(ConfigError, match="would be off the GPUs"):
        estimate_memory(_small(), device_map={"model": 0, "lm_head": "cpu"}, batch_size=1, seq_len=8)


def test_all_logits_kept_are_all_logits() -> None:
    fields: dict[str, Any] = {"batch_size": 1, "seq_len": 128, "optimizer": "sgd"}
    config = _small(vocab_size=20_000)
    kept, plain = (estimate_memory(config, logits_to_keep=n, **fields).backward_peak for n in (128, None))
    assert kept == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize("phase", ["train", "forward"])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_of_responses_are_those_of_so_many_tokens(packed: bool, phase: str) -> None:
    """As verl's loss takes them on our engine: of sequences of 64 tokens there would be as many."""
    fields: dict[str, Any] = {
        "loss": "verl-ppo",
        "packed": packed,
        "padded": not packed,
        "batch_size": 2,
        "precision": "bf16",
    }
    if phase == "train":
        fields["optimizer"] = "sgd"  # whose step is not the peak
    config = _small(vocab_size=20_000)
    found, short, plain = (
        estimate_memory(config, phase=phase, seq_len=n, logits_to_keep=kept, **fields)
        for n, kept in ((256, 64), (64, None), (256, None))
    )
    assert found.logits == pytest.approx(short.logits, rel=0.002)
    assert plain.logits > 3 * found.logits
    # Places, and the hidden states cut out for the head, are all that is more than what is saved.
    assert found.peak < plain.peak - (plain.logits - found.logits) + 2**20


def test_adapters_do_not_change_the_logits_of_generation() -> None:
    fields: dict[str, Any] = {"phase": "generate", "batch_size": 2, "seq_len": 128, "new_tokens": 4}
    config = _small(vocab_size=20_000)
    assert estimate_memory(config, lora_rank=2, **fields).logits == estimate_memory(config, **fields).logits


def test_quantized_weights_are_not_traced() -> None:
    config = _small(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ConfigError, match="packed weights are not traced"):
        estimate_memory(config, phase="forward", batch_size=1, seq_len=8)


def test_it_can_be_asked_where_gradients_are_off() -> None:
    with torch.no_grad():
        inside = estimate_memory(_small(), batch_size=1, seq_len=8)
    assert inside == estimate_memory(_small(), batch_size=1, seq_len=8)


def test_a_loss_that_is_asked_for_counts_in_scoring_too() -> None:
    fields: dict[str, Any] = {"phase": "forward", "batch_size": 4, "seq_len": 128}
    config = _small(vocab_size=50_000)
    plain, own, ppo = (estimate_memory(config, loss=loss, **fields).peak for loss in (None, "causal-lm", "ppo"))
    assert plain < ppo < own


def test_a_fused_head_never_holds_the_logits() -> None:
    """tokens x vocabulary in bf16, which the plain loss holds several times, is more than all of the fused pass."""
    config = small_qwen2(vocab_size=32000, max_position_embeddings=4096)
    given: dict[str, Any] = {"phase": "forward", "batch_size": 8, "seq_len": 2048, "task": "causal-lm"}
    logits = 8 * 2048 * 32000 * 2
    fused, plain = (estimate_memory(config, loss=kind, **given) for kind in ("verl-fused", "verl-ppo"))
    assert fused.peak < logits < plain.peak / 2
    with pytest.raises(ConfigError, match="lm_head"):
        estimate_memory(config, phase="forward", batch_size=1, seq_len=8, task="reward", loss="verl-fused")


def test_several_micro_batches_hold_the_gradients_of_the_first() -> None:
    """The backward of a second micro-batch has all gradients beside it; scoring of shapes as the first does not."""
    given: dict[str, Any] = {"batch_size": 8, "seq_len": 128, "task": "causal-lm", "precision": "fp32"}
    once, again = (estimate_memory(small_qwen2(), accumulating=on, **given) for on in (False, True))
    n_bytes = 4 * AutoModelForCausalLM.from_config(small_qwen2()).num_parameters()
    assert once.forward_peak + 0.98 * n_bytes < again.forward_peak <= once.forward_peak + n_bytes * 1.02
    assert again.optimizer_peak == once.optimizer_peak
    assert again.backward_peak > once.backward_peak
