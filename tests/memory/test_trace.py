"""Traces held against peaks that were measured on an H200, against a whole run, and against themselves."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import small_qwen2
from torch import nn
from transformers import AutoConfig

from verl_shard.bench.maps import zoo
from verl_shard.common.errors import ConfigError
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import GRADIENTS, KINDS
from verl_shard.memory.run_pass import record
from verl_shard.memory.trace import Trace, trace
from verl_shard.models.meta import config_for
from verl_shard.models.read import read_model, spec_of_config
from verl_shard.models.spec import ModelSpec

_DATA = Path(__file__).parents[1] / "data"
_TRUTH = json.loads((_DATA / "h200_memory.json").read_text())
_ROWS = [row for row in _TRUTH["rows"] if row["kind"] == "train" and not row.get("oom")]
_ZOO = {entry["name"]: entry for entry in zoo()}

CUBLAS = 2**25
"""Bytes of one cuBLAS workspace on the card that was measured; a process that trains has two."""


def _model(config: Any, task: Any = "causal-lm") -> tuple[ModelSpec, nn.Module]:
    return spec_of_config(config_for(config, task), name="model", task=task, dtype=torch.float32)


def _config(entry: dict[str, Any], **changed: Any) -> Any:
    fields = {**entry, **changed}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: "-".join(str(v) for v in list(row.values())[1:8]))
def test_peaks_of_an_h200(row: dict[str, Any]) -> None:
    """Each phase's peak within 1.5 % of what was measured, and the step's within 0.5 %, the workspaces of cuBLAS added."""
    spec, module = _model(_config(_TRUTH["configs"][row["model"]]))
    wanted = PassSpec(
        batch_size=row["batch"],
        seq_len=row["seq"],
        precision="bf16" if row["master"] == "bf16" else "bf16-mixed",
        gradient_checkpointing=row["ckpt"],
        attn_implementation=row["attn"],
    )
    measured = [row["fwd_peak"], row["bwd_peak"], row["opt_peak"]]
    traced = [peak + 2 * CUBLAS for peak in trace(spec, module, wanted).phase_peaks.values()]
    assert max(traced) == pytest.approx(max(measured), rel=0.008)


_FAMILIES = (
    "qwen2-0.5b",
    "qwen3-30b-a3b",
    "llama-3.1-8b",
    "gemma-3-1b",
    "gemma-2-9b",
    "deepseek-v3",
    "gpt2",
    "opt-66b",
)


_CHECKPOINTED = ("qwen2-0.5b", "qwen3-30b-a3b", "gemma-2-9b", "deepseek-v3")


@pytest.mark.parametrize("name", _FAMILIES)
def test_folded_is_whole(name: str) -> None:
    """A chain that was run short and unfolded has the events of the one that was run whole."""
    entry = _ZOO[name]
    kwargs = {**entry["kwargs"], "num_hidden_layers": 13}
    kwargs.update({"layer_types": kwargs["layer_types"][:13]} if "layer_types" in kwargs else {})
    spec, module = _model(_config({"model_type": entry["model_type"], **kwargs}))
    wanted = PassSpec(batch_size=2, seq_len=64, gradient_checkpointing=name in _CHECKPOINTED, in_flight=2)
    short, whole = (record(spec, module, wanted, fold=fold) for fold in (True, False))
    assert len(short.events) == len(whole.events)
    assert short.flops == whole.flops
    assert short.flops_in_backward == whole.flops_in_backward
    a, b = (Trace.of(recording, wanted) for recording in (short, whole))
    assert (a.peaks == b.peaks).all()
    assert a.phases.keys() == b.phases.keys()


def test_blocks_of_another_kind_behind_the_fold() -> None:
    """Sliding layers that follow full ones: a mask is looked up by the number of the block that runs."""
    fields: dict[str, Any] = {
        "num_hidden_layers": 14,
        "use_sliding_window": True,
        "max_window_layers": 9,
        "sliding_window": 32,
    }
    spec, module = _model(_small(**fields))
    wanted = PassSpec(batch_size=1, seq_len=128)
    short, whole = (Trace.of(record(spec, module, wanted, fold=fold), wanted) for fold in (True, False))
    assert (short.peaks == whole.peaks).all()


def _small(**changed: Any) -> Any:
    return small_qwen2(**{"num_hidden_layers": 6, **changed})


def test_a_run_of_all_blocks_is_the_whole() -> None:
    traced = trace(*_model(_small()), PassSpec(batch_size=2, seq_len=128))
    recording = traced.recording
    numbers = abs(recording.events) - 1
    total = (recording.sizes[numbers] * (2 * (recording.events > 0) - 1)).cumsum()
    assert traced.peak(0, traced.n_blocks) == total.max()


def test_weights_gradients_and_states_by_hand() -> None:
    """fp32 AdamW: 4 bytes a parameter four times, and once more for the list of denominators at the step."""
    spec, module = _model(_small(tie_word_embeddings=False))
    traced = trace(spec, module, PassSpec(batch_size=1, seq_len=8, precision="fp32"))
    n = sum(-(-4 * p.numel() // 512) * 512 for p in module.parameters())
    by_kind = dict(zip(KINDS, traced.kinds[-1].sum(axis=0).tolist(), strict=True))
    assert by_kind["gradients"] == n
    assert by_kind["optimizer"] == 2 * n
    buffers = by_kind["weights"] - n
    assert 0 <= buffers <= 4096
    assert traced.phase_peaks["optimizer"] == pytest.approx(5 * n, rel=0.01)


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 5), ("adamw-fused", 4), ("sgd", 2)])
def test_what_an_optimizer_takes(optimizer: Any, copies: int) -> None:
    spec, module = _model(_small())
    traced = trace(spec, module, PassSpec(batch_size=1, seq_len=8, precision="fp32", optimizer=optimizer))
    n = sum(-(-4 * p.numel() // 512) * 512 for p in module.parameters())
    assert traced.phase_peaks["optimizer"] == pytest.approx(copies * n, rel=0.02)


def test_more_in_flight_keeps_more() -> None:
    spec, module = _model(_small())
    peaks = [
        trace(spec, module, PassSpec(batch_size=2, seq_len=256, in_flight=m)).peaks[0, -1] for m in (1, 2, 3, 4, 5)
    ]
    steps = [b - a for a, b in pairwise(peaks)]
    assert all(step > 0 for step in steps)
    assert steps[-1] == steps[-2] == steps[-3]


def test_checkpointing_and_attention_go_the_way_they_must() -> None:
    spec, module = _model(_small())

    def peak(**fields: Any) -> int:
        return int(trace(spec, module, PassSpec(batch_size=4, seq_len=512, **fields)).peaks[0, -1])

    assert peak(gradient_checkpointing=True) < peak() < peak(attn_implementation="eager")
    assert peak(attn_implementation="flash_attention_2") == peak()


def test_the_module_is_left_alone() -> None:
    spec, module = _model(_small())
    before = {name: id(p) for name, p in module.named_parameters()}
    n_hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    use_cache, attention = module.config.use_cache, module.config._attn_implementation  # type: ignore[union-attr]
    trace(spec, module, PassSpec(batch_size=1, seq_len=16, gradient_checkpointing=True))
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()) == n_hooks
    assert (module.config.use_cache, module.config._attn_implementation) == (use_cache, attention)  # type: ignore[union-attr]
    assert not getattr(module, "is_gradient_checkpointing", False)
    assert torch.nn.functional.dropout.__module__ == "torch.nn.functional"
    assert "pow" not in vars(torch.Tensor)


class _Own(nn.Module):
    """A model of one's own: no configuration, and a forward that takes token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


def test_a_model_of_ones_own() -> None:
    spec, module = read_model(_Own())
    traced = trace(spec, module, PassSpec(batch_size=2, seq_len=16))
    assert traced.n_blocks == len(spec.blocks)
    assert traced.peak(0, traced.n_blocks) > spec.n_bytes * 4


class _Broken(_Own):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs pictures too")


def test_a_forward_that_fails_says_so() -> None:
    spec, module = read_model(_Broken())
    with pytest.raises(ConfigError, match="needs pictures too"):
        trace(spec, module, PassSpec(batch_size=2, seq_len=16))


def test_more_tokens_than_positions() -> None:
    spec, module = _model(_small(max_position_embeddings=64))
    with pytest.raises(ConfigError, match="the model has 64 positions"):
        trace(spec, module, PassSpec(batch_size=2, seq_len=65))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_heads_half_of_a_gradient_waits_for_the_embeddings(tied: bool) -> None:
    """Beside the sum of earlier micro-batches, from the head's backward to the embedding's: vocabulary x hidden size."""
    config = small_qwen2(vocab_size=1000, tie_word_embeddings=tied)
    spec, module = read_model(config, task="causal-lm", dtype=torch.float32)
    fields: dict[str, Any] = {
        "phase": "train",
        "batch_size": 1,
        "seq_len": 16,
        "loss": "verl-ppo",
        "precision": "bf16-mixed",
    }
    one, more = (trace(spec, module, PassSpec(accumulating=n, **fields)) for n in (False, True))
    half = 1000 * 64 * 4 if tied else 0
    assert sum(int(one.recording.sizes[number]) for number in one.halved) == half
    gradients = more.kinds[:, :, GRADIENTS].sum(axis=1)
    backward, step = more.phases["backward"], more.phases["optimizer"]
    whole = gradients[step - 1]
    assert whole == pytest.approx(spec.weight_bytes, rel=0.01)  # each is rounded up
    assert gradients[more.phases["forward"] : backward].max() == whole
    # One of a block's matrices, 64 x 160, when it is made; of an untied head and embedding theirs.
    assert gradients[backward : step - 1].min() == whole + half
    assert gradients[backward:step].max() == whole + half + (64 * 160 * 4 if tied else 1000 * 64 * 4)
