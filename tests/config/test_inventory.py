from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.common.errors import ConfigError
from verl_shard.common.units import GIB
from verl_shard.config.cards import CARDS
from verl_shard.config.inventory import Inventory, Node

cards = st.sampled_from(list(CARDS.values()))
nodes = st.builds(Node, st.lists(cards, min_size=1, max_size=4).map(tuple), st.none() | st.integers(1, 2**41))


def test_gpus_are_counted_over_nodes() -> None:
    made = Inventory.declared(4, card="h100-80g", n_nodes=2, host_memory=512 * GIB)
    assert [(gpu.id, gpu.node) for gpu in made.gpus] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert made.words == "4 x h100-80g (79.11 GiB) on 2 nodes"
    assert made.nodes[1].host_memory == 512 * GIB


@given(st.lists(nodes, min_size=1, max_size=4).map(tuple))
def test_written_and_read_it_is_the_same(made: tuple[Node, ...]) -> None:
    inventory = Inventory(made)
    assert Inventory.from_dict(inventory.to_dict()) == inventory


def test_every_fault_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Inventory.declared(0, card="h1000", n_nodes=0)
    assert [finding.where for finding in caught.value.findings] == ["gpus", "nodes", "--gpu"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"n_gpus": 3, "card": "h200", "n_nodes": 2}, "3 GPUs are not shared out evenly over 2 nodes"),
        ({"n_gpus": 4}, "4 GPUs, but not which"),
        ({"n_gpus": 4, "card": "h200", "memory": "80GiB"}, "says how much memory"),
        ({"n_gpus": True, "card": "h200"}, "whole number"),
    ],
)
def test_what_cannot_be_meant(given: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Inventory.declared(**given)  # type: ignore[arg-type]


def test_no_gpu_is_nothing_to_plan_for() -> None:
    with pytest.raises(ConfigError, match="no GPU to plan for"):
        Inventory((Node(()),))
