"""Each term against figures worked out by hand for published models: fp32 weights, 16384 tokens, decimal gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_shard.memory.stock import terms
from verl_shard.memory.stock.units import Units, units_of
from verl_shard.models.read import read_spec

TOKENS = 16384
GB = 10**9


@pytest.fixture
def shapes(published: Callable[[str], Any]) -> Callable[..., tuple[Any, Units]]:
    def read(name: str) -> tuple[Any, Units]:
        config = published(name)
        return config, units_of(read_spec(config), "fsdp")

    return read


def _formula(config: Any, units: Units, ranks: int) -> tuple[int, int]:
    n = units.n_params
    backward = terms.update_backward(
        n,
        ranks,
        4,
        layer=max(unit.n_params for unit in units.units[:-1]),
        root=units.units[units.root].n_params,
        activations=terms.checkpointed_activations(TOKENS, config.hidden_size, config.num_hidden_layers),
        logits=terms.logits_copy(TOKENS, config.vocab_size),
    )
    return backward, terms.update_step(n, ranks, 4)


def test_a_7b_over_four_gpus(shapes: Callable[..., tuple[Any, Units]]) -> None:
    config, units = shapes("qwen2-7b")
    n = units.n_params
    assert terms.weights(n, 4, 4) / GB == pytest.approx(7.6, abs=0.05)
    assert terms.gradients(n, 4, 4) / GB == pytest.approx(7.6, abs=0.05)
    assert terms.adam(n, 4, 4) / GB == pytest.approx(15.2, abs=0.05)
    assert terms.foreach(n, 4, 4) / GB == pytest.approx(7.6, abs=0.05)
    assert terms.gathered_unit(units.units[0].n_params) / GB == pytest.approx(0.9, abs=0.05)
    assert 2 * units.units[units.root].n_params / GB == pytest.approx(2.2, abs=0.05)
    activations = terms.checkpointed_activations(TOKENS, config.hidden_size, config.num_hidden_layers)
    assert activations / GB == pytest.approx(3.3, abs=0.05)
    assert terms.logits_copy(TOKENS, config.vocab_size) / GB == pytest.approx(5.0, abs=0.05)
    assert terms.engine_weights(n, 1) / GB == pytest.approx(15.2, abs=0.05)
    backward, step = _formula(config, units, 4)
    assert backward / GB == pytest.approx(42, abs=0.5)
    assert step / GB == pytest.approx(38, abs=0.5)


def test_a_32b_over_eight_gpus_cannot_be_updated(shapes: Callable[..., tuple[Any, Units]]) -> None:
    config, units = shapes("qwen3-32b")
    n = units.n_params
    states = terms.weights(n, 8, 4) + terms.gradients(n, 8, 4) + terms.adam(n, 8, 4)
    assert states / GB == pytest.approx(65.5, abs=0.05)
    backward, step = _formula(config, units, 8)
    assert backward / GB == pytest.approx(86, abs=0.5)
    assert step / GB == pytest.approx(82, abs=0.5)


def test_the_head_and_the_entropy() -> None:
    tokens, vocab = 3, 1000
    assert terms.saved_log_softmax(tokens, vocab) == 3 * 1000 * 4
    assert terms.eager_entropy(tokens, vocab) == 3 * terms.saved_log_softmax(tokens, vocab)
    assert terms.fused_head(vocab) == 512 * vocab * 4 * 5


def test_shards_are_rounded_up() -> None:
    assert [terms.shard(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_the_engine_takes_its_share_of_the_card() -> None:
    assert terms.rollout_engine(0.5, 80 * GB) == 40 * GB


def test_one_rank_of_fsdp_clones_the_model_at_the_weight_sync() -> None:
    assert terms.exported_fsdp(1000, 0, 1, 4, root=300, layer=70) == 4000
    assert terms.exported_fsdp(1000, 100, 1, 4, root=300, layer=70) == 4400
    assert terms.exported_fsdp(1000, 100, 4, 4, root=300, layer=70) == 4 * (250 + 300 + 70)


def test_fsdp2_sends_a_tensor_at_a_time() -> None:
    assert terms.exported_fsdp2(200, 4, 4) == 800
    assert terms.exported_fsdp2(200, 1, 4) == 0


def test_pinned_blocks_are_powers_of_two() -> None:
    assert terms.pinned([1, 2, 3, 4, 5, 0, 1025]) == 1 + 2 + 4 + 4 + 8 + 2048


@pytest.mark.parametrize(("tied", "copies"), [(True, 8), (False, 1)])
def test_ranks_that_read_the_checkpoint(tied: bool, copies: int) -> None:
    assert terms.host_load(1000, 4, tied=tied, ranks_on_node=8, sources_on_node=1) == copies * 4000


def test_only_fsdp_reserves_gradients_of_a_ref() -> None:
    assert terms.host_ref_gradients(1000, 4, 4, "fsdp") == 1000
    assert terms.host_ref_gradients(1000, 4, 4, "fsdp2") == 0
