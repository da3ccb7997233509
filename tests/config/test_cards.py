from __future__ import annotations

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.units import GIB
from verl_shard.config.cards import CARDS, card_of_memory, find_card


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24g"),
        ("NVIDIA RTX A6000", "a6000-48g"),
        ("NVIDIA A10", "a10-24g"),
        ("NVIDIA L4", "l4-24g"),
        ("NVIDIA L40S", "l40s-48g"),
        ("Tesla T4", "t4-16g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("h200", "h200-141g"),
        ("A100-80G", "a100-80g"),
    ],
)
def test_names_as_drivers_and_people_write_them(name: str, card: str) -> None:
    assert find_card(name).name == card


@pytest.mark.parametrize("name", ["a1000", "NVIDIA L40", "h10", "gtx1080", ""])
def test_another_card_is_not_taken_for_a_known_one(name: str) -> None:
    with pytest.raises(ConfigError, match="no such card is known"):
        find_card(name)


def test_a_family_of_several_sizes_asks_which() -> None:
    with pytest.raises(ConfigError, match="Use one of a100-80g, a100-40g"):
        find_card("a100")


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
def test_memory_goes_with_the_name(card: object) -> None:
    """CUDA offers a little less than what is on the box, which counts in GB or GiB."""
    nominal = int(card.name.rsplit("-", 1)[1].removesuffix("g"))  # type: ignore[attr-defined]
    assert 0.88 * nominal * GIB < card.memory <= nominal * GIB  # type: ignore[attr-defined]


def test_a_card_of_which_only_the_memory_is_known() -> None:
    card = card_of_memory("80GiB")
    assert card.memory == 80 * GIB
    assert "a100-80g" in card.source
    with pytest.raises(ConfigError, match="less than 1 GiB"):
        card_of_memory("80MiB")
