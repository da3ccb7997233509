"""The GPUs that torch sees here, as an Inventory."""

from __future__ import annotations

from dataclasses import replace

from verl_shard.common.errors import ConfigError, config_error
from verl_shard.common.notices import notice
from verl_shard.config.cards import UNKNOWN, Card, card_of_memory, find_card
from verl_shard.config.inventory import Inventory, Node
from verl_shard.resources.limits import host_memory


def probe() -> Inventory:
    """This machine's visible GPUs, and the RAM that this process may have: in a container, its limit.

    Raises ConfigError where torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        fix = "Declare the GPUs to plan for: --gpus 4 --gpu a100-80g, or --gpus 4 --gpu-memory 80GiB"
        raise config_error("no-gpu", "gpus", None, "torch sees no GPU on this machine", fix)
    cards = []
    for gpu in range(torch.cuda.device_count()):
        there = torch.cuda.get_device_properties(gpu)
        cards.append(known_card(there.name, there.total_memory, (there.major, there.minor)))
    return Inventory((Node(tuple(cards), host_memory().total),))


def known_card(name: str, memory: int, capability: tuple[int, int]) -> Card:
    """The card of a driver's name with the memory that was found; one that is not known gets the speeds of UNKNOWN, said."""
    try:
        return replace(find_card(name), memory=memory, capability=capability)
    except ConfigError:
        notice("unknown-card", "gpu", name, "its speeds are not known", f"those of {UNKNOWN} for times")
        return replace(card_of_memory(memory), name=name, memory=memory, capability=capability)
