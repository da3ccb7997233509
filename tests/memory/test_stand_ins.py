"""Stand-ins of a GPU's operations: several sequences in one row, and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.masking_utils import find_packed_sequence_indices

from verl_shard import estimate_memory
from verl_shard.common.errors import ConfigError
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.run_pass import record
from verl_shard.memory.stand_ins import _sequence_of_each_token
from verl_shard.memory.trace import Trace, trace
from verl_shard.models.read import spec_of_config

_LAYERS, _HEADS, _SIZE = 3, 4, 16
_SHAPE: dict[str, Any] = {
    "hidden_size": _HEADS * _SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def _trace(config: Any, **fields: Any) -> Trace:
    spec, module = spec_of_config(config, name="model", task="causal-lm", dtype=torch.bfloat16)
    return trace(spec, module, PassSpec(precision="bf16", optimizer="sgd", **fields))


def _packed(**fields: Any) -> Trace:
    return _trace(AutoConfig.for_model("llama", **_SHAPE), batch_size=3, packed=True, **fields)


def _kept(traced: Trace) -> int:
    return int(traced.recording.kept.sum())


def test_which_token_is_of_which_sequence() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
    assert torch.equal(_sequence_of_each_token(positions), find_packed_sequence_indices(positions))


@pytest.mark.parametrize("length", [128, 125])
def test_a_mask_keeps_the_sequences_of_a_row_apart(length: int) -> None:
    """Of all tokens by all tokens, in bf16 and with rows of 16's: each layer makes its own and keeps it."""
    rows = 3 * length
    row = -(-rows // 16) * 16
    mask = _LAYERS * rows * row * 2
    fused, masked = (_packed(seq_len=length, attn_implementation=a) for a in ("flash_attention_2", "sdpa"))
    assert _kept(masked) - _kept(fused) == pytest.approx(mask, rel=0.005)


def test_without_a_mask_a_row_is_as_large_as_its_sequences() -> None:
    apart = _trace(AutoConfig.for_model("llama", **_SHAPE), batch_size=3, seq_len=128)
    together = _packed(seq_len=128, attn_implementation="flash_attention_2")
    assert _kept(together) == pytest.approx(_kept(apart), rel=0.01)
    # The row has more positions to rotate by.
    assert sum(f for f, _ in together.flops) == pytest.approx(sum(f for f, _ in apart.flops), rel=1e-3)


def test_a_masked_kernel_works_on_the_whole_row() -> None:
    """4 x tokens^2 x width of a layer's attention, of which a third belongs to the three sequences themselves."""
    together, masked = (_packed(seq_len=128, attn_implementation=a) for a in ("flash_attention_2", "sdpa"))
    more = sum(f for f, _ in masked.flops) - sum(f for f, _ in together.flops)
    assert more == _LAYERS * 4 * (3 * 128) ** 2 * _HEADS * _SIZE * 2 // 3


def test_flash_attention_copies_out_what_is_no_padding_and_its_output_back() -> None:
    """Each layer keeps the output as it is worked on and as it goes on, and no mask of length x length; sdpa keeps one, and k
    and v as often as there are heads of q."""
    kv_heads = _HEADS // 2
    config = AutoConfig.for_model("llama", **{**_SHAPE, "num_key_value_heads": kv_heads})
    batch, length = 3, 128
    plain, flash, masked = (
        _kept(_trace(config, batch_size=batch, seq_len=length, padded=padded, attn_implementation=attention))
        for padded, attention in ((False, "flash_attention_2"), (True, "flash_attention_2"), (True, "sdpa"))
    )
    assert flash - plain == pytest.approx(_LAYERS * batch * length * _HEADS * _SIZE * 2, abs=16 * batch * length)
    repeated = 2 * (_HEADS - kv_heads) * _SIZE * 2 * batch * length
    assert masked - plain == pytest.approx(_LAYERS * (repeated + batch * length * length * 2), rel=0.02)


@pytest.mark.parametrize("padded", [False, True])
def test_flash_attention_is_told_its_window_and_needs_no_mask_for_it(padded: bool) -> None:
    shape = {**_SHAPE, "num_key_value_heads": _HEADS // 2}
    with_window, without = (
        _kept(_trace(AutoConfig.for_model("mistral", sliding_window=window, **shape), batch_size=3, seq_len=128,
                     padded=padded, attn_implementation="flash_attention_2"))
        for window in (16, None)
    )  # fmt: skip
    assert with_window == without


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"phase": "generate"}, "a sequence that grows has a row of its own"),
        ("llama", {"padded": True}, "padding is what packing leaves out"),
        ("llama", {"packed": 1}, "not a bool"),
        ("bloom", {"attn_implementation": "eager"}, "BloomForCausalLM takes no position_ids"),
    ],
)
def test_packing_that_means_nothing(kind: str, fields: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(
        kind, **(_SHAPE if kind == "llama" else {"hidden_size": 64, "n_layer": 2, "n_head": 4})
    )
    with pytest.raises(ConfigError, match=message):
        estimate_memory(config, **{"batch_size": 2, "seq_len": 8, "packed": True, **fields})


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_the_gradient_of_experts_is_made_once(precision: Any) -> None:
    """grouped_mm lays it out as the weight, so that autograd takes it as it is, where another layout costs a copy."""
    config = AutoConfig.for_model("mixtral", **{**_SHAPE, "num_local_experts": 4, "intermediate_size": 96})
    spec, module = spec_of_config(config, name="model", task="causal-lm", dtype=torch.bfloat16)
    recording = record(spec, module, PassSpec(batch_size=1, seq_len=16, precision=precision, optimizer="sgd"))
    marks = dict(recording.marks)
    made = [e - 1 for e in recording.events[marks["backward"] : marks["optimizer"]].tolist() if e > 0]
    width = 2 if precision == "bf16" else 4
    for n_elements in (4 * 2 * 96 * 64, 4 * 64 * 96):  # gate and up together, and down
        assert sum(int(recording.sizes[number]) == n_elements * width for number in made) == _LAYERS
