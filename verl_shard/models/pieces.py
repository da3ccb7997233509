"""From parts to the pieces of the chain: what must be on one device because of a tie, or of how models are written."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from verl_shard.models.chain import Part
from verl_shard.models.spec import Kind

Group = tuple[Kind, tuple[str, ...]]
"""Kind and names."""


def find_ties(module: nn.Module, parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    """Groups of names of one tensor: those that are the same object now, and those that transformers will tie.

    Ties come in pairs (a-b, b-c), so that they are joined to groups by union-find.
    """
    leader = {name: name for name in parameters}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        leader[find(name)] = find(first.setdefault(id(parameter), name))
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for one, other in (vars(child).get("all_tied_weights_keys") or {}).items():
            if prefix + one in leader and prefix + other in leader:
                leader[find(prefix + one)] = find(prefix + other)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in parameters:
        groups[find(name)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def hold_matrices(parameters: dict[str, nn.Parameter]) -> set[str]:
    """Names of all modules that hold a parameter with two or more dimensions, and of those parameters."""
    held: set[str] = set()
    for name, parameter in parameters.items():
        if parameter.dim() >= 2:
            while name and name not in held:
                held.add(name)
                name = name.rpartition(".")[0]
    return held


def group_parts(
    parts: list[Part], matrices: set[str], ties: list[list[str]]
) -> tuple[list[Group], list[tuple[str, ...]]]:
    """The pieces of the chain, and what follows each.

    What runs before a block is one piece, as its results are often added in code that belongs to no module. A later
    part that shares a weight follows the earlier one; blocks that share a weight become one piece with all between.
    """
    groups: list[Group] = []
    for part in parts:
        if part.place == "before" and groups and groups[-1][0] == "embedding":
            groups[-1] = ("embedding", (*groups[-1][1], part.name))
        elif part.place == "before":
            groups.append(("embedding", (part.name,)))
        elif part.place == "block":
            groups.append(("block", (part.name,)))
        else:
            groups.append(("head" if part.name in matrices else "tail", (part.name,)))
    followers: list[tuple[str, ...]] = [() for _ in groups]

    for tie in ties:
        owner = owners(groups, followers)
        touched = sorted({owner[part_of(owner, name)] for name in tie})
        first = touched[0]
        if any(groups[index][0] == "block" for index in touched[1:]):
            last = max(index for index in touched if groups[index][0] == "block")
            merged = tuple(name for _, names in groups[first : last + 1] for name in names)
            along = tuple(name for names in followers[first : last + 1] for name in names)
            groups[first : last + 1] = [("block", merged)]
            followers[first : last + 1] = [along]
            touched = [first] + [index - (last - first) for index in touched if index > last]
        for index in reversed(touched[1:]):
            followers[first] += groups[index][1] + followers[index]
            del groups[index], followers[index]
    return groups, followers


def owners(groups: list[Group], followers: list[tuple[str, ...]]) -> dict[str, int]:
    pairs = zip(groups, followers, strict=True)
    return {name: index for index, ((_, names), along) in enumerate(pairs) for name in (*names, *along)}


def part_of(owner: dict[str, int], name: str) -> str:
    while name not in owner:
        assert name, "the parts of a module cover all its tensors"
        name = name.rpartition(".")[0]
    return name
