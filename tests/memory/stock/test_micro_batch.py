"""What verl makes of logits, counted by hand: T tokens, V words, few parameters beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shapes import small_qwen2

from verl_shard.common.errors import ConfigError
from verl_shard.memory.stock.micro_batch import MicroBatch, record_micro_batch
from verl_shard.models.read import read_model

T, V = 256, 16384
N = T * V


def _record(n_layers: int = 1, **fields: Any) -> Any:
    config = small_qwen2(
        hidden_size=16, intermediate_size=32, vocab_size=V, num_hidden_layers=n_layers, tie_word_embeddings=False
    )
    spec, module = read_model(config, task="causal-lm")
    return record_micro_batch(spec, module, MicroBatch(sequences=4, length=T // 4, **fields))


def _live(recording: Any) -> np.ndarray:
    sizes = recording.sizes[np.abs(recording.events) - 1] * np.sign(recording.events)
    total: np.ndarray = sizes.cumsum()[recording.n_static :] - sizes.cumsum()[recording.n_static - 1]
    return total


def _peak(**fields: Any) -> float:
    """In units of T x V bytes; the embedding's gradients and the layer are small beside it."""
    return float(_live(_record(**fields)).max() / N)


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({"packed": True}, 2),  # the logits in bf16
        ({"packed": True, "temperature": 0.7}, 4),  # and scaled
        ({"packed": False}, 4),  # and without padding
        ({"packed": True, "entropy": "full"}, 2),  # compiled: one pass over them
        ({"packed": False, "entropy": "full"}, 14),  # softmax, a cast and a temporary in fp32
        ({"packed": True, "entropy": "full", "compiled": False}, 14),
    ],
)
def test_scoring(fields: dict[str, Any], copies: int) -> None:
    assert _peak(**fields) == pytest.approx(copies, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "copies"),
    [
        ({"flash": True}, 2),  # its gradient goes into the logits in place
        ({"flash": True, "entropy": "full"}, 6),  # both gradients in bf16 beside the logits
        ({"flash": False}, 6),  # logits, and each row's log_softmax in fp32
        # With padding, what unbind took apart stays until its backward, which makes as much again beside the gradients.
        ({"flash": True, "packed": False}, 6),
        # By rows the peak is in the forward: with padding, without it, and log_softmax.
        ({"flash": False, "packed": False}, 8),
    ],
)
def test_training(fields: dict[str, Any], copies: int) -> None:
    assert _peak(**{"packed": True, "training": True, **fields}) == pytest.approx(copies, rel=0.15)


def test_the_entropy_in_chunks_holds_half_of_twice_as_many_rows() -> None:
    config = small_qwen2(hidden_size=16, intermediate_size=32, vocab_size=4096, num_hidden_layers=1)
    spec, module = read_model(config, task="causal-lm")
    wanted = MicroBatch(sequences=1, length=4096, packed=True, entropy="chunked")
    # The logits, and of a chunk of 2048 rows four copies in fp32: itself, softmax, what logsumexp is of, its temporary.
    copies = _live(record_micro_batch(spec, module, wanted)).max() / 4096**2
    assert 2 + 3 * 4 / 2 <= copies * 1.01 <= 2 + 4 * 4 / 2 + 0.2


@pytest.mark.parametrize("training", [True, False])
def test_the_fused_head_never_holds_all_logits(training: bool) -> None:
    config = small_qwen2(hidden_size=16, intermediate_size=32, vocab_size=4096, num_hidden_layers=1)
    spec, module = read_model(config, task="causal-lm")
    sizes = []
    for tokens in (2048, 4096):
        wanted = MicroBatch(sequences=1, length=tokens, packed=True, training=training, entropy="full", fused=True)
        sizes.append(int(_live(record_micro_batch(spec, module, wanted)).max()))
    of_a_chunk = 512 * 4096
    assert 12 * of_a_chunk < sizes[0] < 30 * of_a_chunk
    assert sizes[1] - sizes[0] < 2048 * 4096  # less than a byte for each logit more


def test_a_value_model_has_no_vocabulary() -> None:
    config = small_qwen2(vocab_size=V, num_hidden_layers=1)
    spec, module = read_model(config, task="value")
    wanted = MicroBatch(sequences=4, length=T // 4, packed=True, output="values")
    assert _live(record_micro_batch(spec, module, wanted)).max() < N / 10


def test_marks_are_in_the_order_of_a_pass() -> None:
    names = [name for name, _ in _record(packed=True, training=True).marks]
    assert names == ["forward", "loss", "backward", "gathered"]
    assert [name for name, _ in _record(packed=True).marks] == ["forward", "loss"]


def test_a_long_chain_is_run_short_and_comes_out_the_same() -> None:
    config = small_qwen2(num_hidden_layers=12)
    spec, module = read_model(config, task="causal-lm")
    wanted = MicroBatch(sequences=2, length=32, packed=True, training=True, gradient_checkpointing=True)
    folded = record_micro_batch(spec, module, wanted)
    for index, layer in enumerate(module.model.layers):  # type: ignore[arg-type, union-attr]
        layer.told_apart = float(index)  # type: ignore[assignment]
    whole = record_micro_batch(spec, module, wanted)
    assert _live(folded).max() == _live(whole).max()
    assert len(folded.events) == len(whole.events)


def test_a_mask_of_length_by_length_is_held_where_attention_takes_one() -> None:
    without, masked = (_record(packed=True, masked=on).sizes.tolist() for on in (False, True))
    assert (T * T in without, T * T in masked) == (False, True)


def test_what_cannot_be_run_is_said() -> None:
    config = small_qwen2(num_hidden_layers=1)
    spec, module = read_model(config, task="causal-lm")
    module.model.layers[0].self_attn.q_proj.weight.data = module.lm_head.weight.data[:3]  # type: ignore[union-attr, index]
    with pytest.raises(ConfigError, match="fails without memory"):
        record_micro_batch(spec, module, MicroBatch(sequences=1, length=8))
