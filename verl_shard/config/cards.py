"""GPUs by name: what they hold and how fast they are, for plans made on a machine that has none of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from verl_shard.common.errors import config_error
from verl_shard.common.units import GIB, parse_bytes

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Card:
    """One kind of GPU. Bytes, FLOP/s of dense products and bytes/s, as its maker states them unless `source` says more.

    memory: bytes that CUDA offers, which is less than on the box.
    bf16_flops, fp32_flops: dense, without sparsity; fp32 without tf32, torch's default.
    memory_bandwidth: bytes/s of its own memory.
    host_bandwidth: bytes/s between pinned host memory and the GPU, one way.
    link_bandwidth: bytes/s to another GPU of the same machine, one way.
    capability: CUDA compute capability.
    """

    name: str
    memory: int
    bf16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    host_bandwidth: float
    link_bandwidth: float
    capability: tuple[int, int]
    source: str


def _card(
    name: str, gib: float, bf16: float, fp32: float, memory: float, host: float, link: float,
    capability: tuple[int, int], source: str = "data sheet",
) -> Card:  # fmt: skip
    return Card(
        name, int(gib * GIB), bf16 * _TERA, fp32 * _TERA, memory * _GIGA, host * _GIGA, link * _GIGA, capability, source
    )


# Memory is nvidia-smi's total less what the driver keeps for itself (about 0.5 GiB on data-centre cards), as users' logs
# show it; the H200's memory, host and link bandwidth were measured. Host bandwidth: PCIe 3.0 x16 12, 4.0 25, 5.0 55 GB/s.
CARDS = {
    card.name: card
    for card in (
        _card("h200-141g", 139.80, 989, 67, 4800, 54.8, 376, (9, 0), "data sheet; memory, host and link measured"),
        _card("h100-80g", 79.11, 989, 67, 3350, 55, 400, (9, 0)),
        _card("h100-pcie-80g", 79.11, 756, 51, 2000, 55, 50, (9, 0)),
        _card("h20-96g", 95.0, 148, 44, 4000, 55, 400, (9, 0)),
        _card("b200-180g", 178.0, 2250, 80, 8000, 55, 800, (10, 0)),
        _card("a100-80g", 79.15, 312, 19.5, 2039, 25, 270, (8, 0)),
        _card("a100-40g", 39.39, 312, 19.5, 1555, 25, 270, (8, 0)),
        _card("a800-80g", 79.15, 312, 19.5, 2039, 25, 180, (8, 0)),
        _card("l40s-48g", 44.40, 362, 91.6, 864, 25, 25, (8, 9)),
        _card("l4-24g", 22.03, 121, 30.3, 300, 25, 25, (8, 9)),
        _card("a10-24g", 22.06, 125, 31.2, 600, 25, 25, (8, 6)),
        _card("a6000-48g", 47.40, 155, 38.7, 768, 25, 50, (8, 6)),
        _card("rtx4090-24g", 23.52, 165, 82.6, 1008, 25, 20, (8, 9)),
        _card("rtx3090-24g", 23.57, 71, 35.6, 936, 25, 50, (8, 6)),
        _card("rtx5090-32g", 31.36, 210, 104.8, 1792, 55, 50, (12, 0)),
        _card("v100-32g", 31.74, 112, 15.7, 900, 12, 130, (7, 0), "data sheet; fp16, it has no bf16 units"),
        _card("v100-16g", 15.77, 112, 15.7, 900, 12, 130, (7, 0), "data sheet; fp16, it has no bf16 units"),
        _card("t4-16g", 14.56, 65, 8.1, 300, 12, 12, (7, 5), "data sheet; fp16, it has no bf16 units"),
    )
}
"""Known cards by name."""

UNKNOWN = "a100-80g"
"""Whose speeds are used for a card of which only the memory is known; that is said."""


def find_card(name: str, where: str = "--gpu") -> Card:
    """The card of that name, or of a torch device name such as "NVIDIA H100 80GB HBM3".

    Raises ConfigError with the nearest names.
    """
    wanted = name.strip().lower()
    if wanted in CARDS:
        return CARDS[wanted]
    words = re.sub(r"nvidia|geforce|tesla", "", wanted).replace("-", " ").replace("rtx a", "a").replace("rtx ", "rtx")
    words = " ".join(words.split())
    stems = {card.name.rsplit("-", 1)[0] for card in CARDS.values()}
    # The longest that begins the name, and is not the beginning of another number: "a100" is no A10 and "a1000" no A100.
    fitting = [stem for stem in stems if re.match(rf"{stem.replace('-', ' ')}\b", words)]
    stem = max(fitting, key=len, default=None)
    family = [card for card in CARDS.values() if card.name.rsplit("-", 1)[0] == stem]
    family = [card for card in family if card.name.rsplit("-", 1)[1] in words] or family
    if len(family) == 1:
        return family[0]
    if family:
        choices = ", ".join(card.name for card in family)
        raise config_error("which-card", where, name, "there are several of that name", f"Use one of {choices}")
    near = get_close_matches(wanted, CARDS, 3, 0.4)
    known = ", ".join(CARDS)
    fix = f"Did you mean {' or '.join(near)}? Known are {known}" if near else f"Known are {known}"
    raise config_error("unknown-card", where, name, "no such card is known", f"{fix}; or give --gpu-memory")


def card_of_memory(memory: int | str, where: str = "--gpu-memory") -> Card:
    """A card of which only the memory is known, with the speeds of UNKNOWN."""
    size = parse_bytes(memory, where)
    if size < GIB:
        raise config_error(
            "too-small", where, memory, "less than 1 GiB holds no model that is trained", "Give its size, such as 80GiB"
        )
    like = CARDS[UNKNOWN]
    return Card(
        f"{size / GIB:.0f} GiB GPU", size, like.bf16_flops, like.fp32_flops, like.memory_bandwidth, like.host_bandwidth,
        like.link_bandwidth, like.capability, f"memory as given; speeds of {UNKNOWN}, as only the memory is known",
    )  # fmt: skip
