"""Inventory: the GPUs and hosts that a plan is made for, probed or declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from verl_shard.common.errors import ConfigError, Finding, config_error
from verl_shard.config.cards import Card, card_of_memory, find_card


@dataclass(frozen=True)
class Node:
    """One machine. cards: of its GPUs, in the order of their ids. host_memory: bytes of RAM; None is unknown."""

    cards: tuple[Card, ...]
    host_memory: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU of an Inventory. id: counted over all nodes; on one machine it is the ordinal that torch sees."""

    id: int
    node: int
    card: Card


@dataclass(frozen=True)
class Inventory:
    """Nodes with their GPUs, which are counted from 0 over all nodes in their order. Raises ConfigError for none."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not any(node.cards for node in self.nodes):
            fix = "Declare some: gpus=4 with gpu=..., or --gpus 4 --gpu a100-80g"
            raise config_error("no-gpu", "gpus", None, "there is no GPU to plan for", fix)

    @classmethod
    def declared(
        cls,
        n_gpus: int,
        *,
        card: str | Card | None = None,
        memory: int | str | None = None,
        n_nodes: int = 1,
        host_memory: int | None = None,
    ) -> Inventory:
        """`n_gpus` equal GPUs on `n_nodes` equal machines: a card by name, or by its memory alone.

        Raises ConfigError with every fault: a count below one, a count that the nodes do not divide, neither card nor
        memory, an unknown card.
        """
        faults: list[Finding] = []
        for name, count in (("gpus", n_gpus), ("nodes", n_nodes)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                faults.append(
                    Finding(
                        "error",
                        f"no-{name}",
                        name,
                        repr(count),
                        "a whole number of 1 or more is needed",
                        "Give 1 or more",
                    )
                )
        if not faults and n_gpus % n_nodes:
            why = f"{n_gpus} GPUs are not shared out evenly over {n_nodes} nodes"
            faults.append(Finding("error", "gpus-per-node", "gpus", str(n_gpus), why, f"Give a multiple of {n_nodes}"))
        made: Card | None = None
        try:
            if isinstance(card, Card):
                made = card
            elif card is not None:
                made = find_card(card)
                if memory is not None:
                    why = f"{made.name} says how much memory it has"
                    faults.append(
                        Finding("error", "gpu-and-memory", "--gpu-memory", str(memory), why, "Give one of the two")
                    )
            elif memory is not None:
                made = card_of_memory(memory)
            else:
                why = f"{n_gpus} GPUs, but not which"
                faults.append(
                    Finding("error", "which-gpu", "gpus", str(n_gpus), why, "Add --gpu a100-80g, or --gpu-memory 80GiB")
                )
        except ConfigError as error:
            faults.extend(error.findings)
        if faults:
            raise ConfigError(faults)
        assert made is not None, "a fault was raised otherwise"
        return cls((Node((made,) * (n_gpus // n_nodes), host_memory),) * n_nodes)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, counted from 0 over the nodes."""
        placed = [(n, card) for n, node in enumerate(self.nodes) for card in node.cards]
        return tuple(Gpu(i, node, card) for i, (node, card) in enumerate(placed))

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def words(self) -> str:
        """For people: "8 x a100-80g (79.2 GiB)", with the nodes when there are several."""
        counts: dict[Card, int] = {}
        for gpu in self.gpus:
            counts[gpu.card] = counts.get(gpu.card, 0) + 1
        from verl_shard.common.units import format_bytes

        kinds = ", ".join(f"{n} x {card.name} ({format_bytes(card.memory)})" for card, n in counts.items())
        return kinds + (f" on {len(self.nodes)} nodes" if len(self.nodes) > 1 else "")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; equal neighbours are written once with their count."""
        nodes: list[dict[str, Any]] = []
        for node in self.nodes:
            kinds: list[dict[str, Any]] = []
            for card in node.cards:
                if kinds and kinds[-1]["card"] == _card_dict(card):
                    kinds[-1]["count"] += 1
                else:
                    kinds.append({"count": 1, "card": _card_dict(card)})
            entry = {"count": 1, "host_memory": node.host_memory, "gpus": kinds}
            if nodes and {**nodes[-1], "count": 1} == entry:
                nodes[-1]["count"] += 1
            else:
                nodes.append(entry)
        return {"nodes": nodes}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Inventory:
        """The Inventory that `to_dict` gave."""
        nodes: list[Node] = []
        for entry in record["nodes"]:
            cards: list[Card] = []
            for kind in entry["gpus"]:
                fields = {**kind["card"], "capability": tuple(kind["card"]["capability"])}
                cards += [Card(**fields)] * kind["count"]
            nodes += [Node(tuple(cards), entry["host_memory"])] * entry["count"]
        return cls(tuple(nodes))


def _card_dict(card: Card) -> dict[str, Any]:
    return {**asdict(card), "capability": list(card.capability)}
