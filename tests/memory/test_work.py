"""What operations compute and move: by hand, and the same whether a chain was folded or run whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from shapes import small_qwen2
from torch import nn
from transformers import AutoConfig

from verl_shard.bench.maps import zoo
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.recording import KV_CACHE
from verl_shard.memory.run_pass import record
from verl_shard.memory.work import (
    ATTENTION,
    BACKWARD,
    BF16,
    CASTS,
    DECODE,
    FORWARD,
    FP32,
    MOVES,
    OPTIMIZER,
    RECOMPUTE,
    Work,
)
from verl_shard.models.meta import config_for
from verl_shard.models.read import spec_of_config, spec_of_module
from verl_shard.models.spec import ModelSpec

_ZOO = {entry["name"]: entry for entry in zoo()}


def _model(config: Any) -> tuple[ModelSpec, nn.Module]:
    return spec_of_config(config_for(config, "causal-lm"), name="model", task="causal-lm", dtype=torch.float32)


def _work(config: Any, wanted: PassSpec) -> Work:
    return record(*_model(config), wanted).work


class _Chain(nn.Module):
    """One linear layer without a bias after an embedding, and no more, so that all can be counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.head = nn.Linear(32, 48, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.embed(ids).view(-1, 32))
        return made


def test_a_lookup_and_a_product_by_hand() -> None:
    module = _Chain()
    spec, module_ = spec_of_module(module, name="chain", task=None, dtype=torch.float32), module
    wanted = PassSpec(phase="forward", batch_size=2, seq_len=5, precision="bf16")
    work = record(spec, module_, wanted).work
    assert work.phases.tolist() == [FORWARD] * 2
    by_kind = {int(kind): (int(f), int(b)) for kind, f, b in zip(work.kinds, work.flops, work.n_bytes, strict=True)}
    # 10 rows of 32 numbers of 2 bytes are read and written, and as much as the ids are read.
    assert by_kind[MOVES] == (0, 2 * 10 * 32 * 2 + 10 * 8)
    assert by_kind[BF16] == (2 * 10 * 32 * 48, 2 * (10 * 32 + 32 * 48 + 10 * 48))


@pytest.mark.parametrize(("optimizer", "times"), [("adamw", 21), ("adamw-fused", 7), ("sgd", 3)])
def test_what_an_optimizer_moves(optimizer: Any, times: int) -> None:
    """AdamW on lists: decay 2, the two averages 3 and 2 + 4, root, division and sum 2 each, the step 4. Fused: it reads
    weight, gradient and both averages, and writes all but the gradient. SGD: reads two and writes one."""
    config = small_qwen2()
    wanted = PassSpec(batch_size=1, seq_len=8, precision="fp32", optimizer=optimizer)
    work = _work(config, wanted)
    n = sum(p.numel() for p in _model(config)[1].parameters())
    moved = work.n_bytes[work.phases == OPTIMIZER].sum()
    assert moved == pytest.approx(times * 4 * n, rel=0.001)


def test_products_of_a_training_pass_by_hand() -> None:
    """Two FLOPs for each weight and token forward, four backward; and two more, but for the head's, when repeated."""
    config = small_qwen2(tie_word_embeddings=False)
    _, module = _model(config)
    in_blocks = sum(p.numel() for name, p in module.named_parameters() if "layers" in name and p.dim() == 2)
    head = 512 * 64
    works = [_work(config, PassSpec(batch_size=2, seq_len=32, gradient_checkpointing=on)) for on in (False, True)]
    for work in works:
        products = work.kinds == BF16
        assert work.flops[products & (work.phases == FORWARD)].sum() == 2 * 64 * (in_blocks + head)
        assert work.flops[products & (work.phases == BACKWARD)].sum() == 4 * 64 * (in_blocks + head)
    plain, again = (work.flops[(work.kinds == BF16) & (work.phases == RECOMPUTE)].sum() for work in works)
    assert plain == 0
    # The last product of a block is not repeated: nothing that it makes was kept.
    last = 4 * 64 * 160
    assert again in (2 * 64 * in_blocks, 2 * 64 * (in_blocks - last))
    attention = works[0].flops[works[0].kinds == ATTENTION]
    assert sorted(set(attention.tolist())) == [4 * 2 * 4 * 32 * 32 * 16, 10 * 2 * 4 * 32 * 32 * 16]


def test_bits_decide_the_kind() -> None:
    kinds = {
        precision: set(_work(small_qwen2(), PassSpec(phase="forward", seq_len=16, precision=precision)).kinds.tolist())  # type: ignore[arg-type]
        for precision in ("fp32", "bf16", "bf16-mixed")
    }
    assert kinds["fp32"] & {BF16, ATTENTION} == set()
    assert FP32 in kinds["fp32"]
    assert {BF16, ATTENTION, CASTS} <= kinds["bf16"]
    assert {BF16, ATTENTION, CASTS} <= kinds["bf16-mixed"]


def test_views_and_bare_allocations_cost_nothing() -> None:
    work = _work(small_qwen2(), PassSpec(phase="forward", batch_size=2, seq_len=32))
    assert (work.n_bytes[work.kinds < BF16] > 0).all()
    # modeling_qwen2.py: two norms of 8 (to fp32, power, mean, sum, root, product, back, weight), 3 + 1 + 3 products,
    # the rotation of q and of k in 5, attention, two sums, and the activation with its product; the last norm is alone.
    assert np.bincount(work.blocks)[1:-1].tolist() == [2 * 8 + 7 + 2 * 5 + 1 + 2 + 2] * 4 + [8]


def test_a_token_reads_the_weights_and_copies_the_cache() -> None:
    spec, module = _model(small_qwen2(tie_word_embeddings=False))
    wanted = PassSpec(phase="generate", batch_size=4, seq_len=64, new_tokens=16, precision="bf16")
    recording = record(spec, module, wanted)
    work = recording.work.of(DECODE, 0, len(spec.blocks))
    matrices = 2 * sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name)
    products = work.n_bytes[work.kinds == BF16].sum()
    assert matrices < products < 1.1 * matrices + 4 * 4 * 2 * 512 * 4
    cache = 4 * 2 * 80 * 4 * 2 * 16 * 2  # layers, keys and values, tokens, batch, heads, head size, bytes
    assert recording.sizes[recording.kinds == KV_CACHE].max() == cache // 8
    assert np.sort(work.n_bytes[work.kinds == MOVES])[-8:].sum() == pytest.approx(2 * cache, rel=0.02)


@pytest.mark.parametrize("name", ["qwen2-0.5b", "gemma-2-9b", "gpt2", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_checkpointing": True},
        {"in_flight": 2, "optimizer": "sgd"},
        {"phase": "generate", "new_tokens": 16},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_folded_is_whole(name: str, fields: dict[str, Any]) -> None:
    entry = _ZOO[name]
    kwargs = {**entry["kwargs"], "num_hidden_layers": 13}
    kwargs.update({"layer_types": kwargs["layer_types"][:13]} if "layer_types" in kwargs else {})
    spec, module = _model(AutoConfig.for_model(entry["model_type"], **kwargs))
    wanted = PassSpec(batch_size=2, seq_len=64, **fields)
    short, whole = (record(spec, module, wanted, fold=fold).work for fold in (True, False))
    for part in vars(short):
        assert (getattr(short, part) == getattr(whole, part)).all(), part
