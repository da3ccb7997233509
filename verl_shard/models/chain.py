"""A module as parts in the order in which they run: what comes before the blocks, the blocks, what comes after."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from verl_shard.common.errors import config_error

Place = Literal["before", "block", "after"]

# A module runs where it is registered, but for these: tables that are made first, and heads that are registered early.
_FIRST = re.compile(r"(?<!un)embed(?!.*(norm|_out$))|rotary|rope|^wte$|^wpe$|position|prompt|^pos_", re.IGNORECASE)
_LAST = re.compile(r"final|unembed|(^|_)out$|lm_head|^head$|score|classifier|pool|^norm$|^ln_f$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """A module that is never divided, or a tensor that a divided module holds itself."""

    name: str
    place: Place


def no_split_classes(model: nn.Module, named: Collection[str] | None) -> frozenset[str]:
    """The classes whose instances stay whole: those that transformers' models declare, and those in `named`.

    Raises ConfigError when `named` holds a class that the model has no instance of.
    """
    present = {type(module).__name__ for module in model.modules()}
    named = {named} if isinstance(named, str) else set(named or ())
    if unknown := sorted(named - present):
        seen = sorted({type(module).__name__ for module in model.modules() if module._modules} - {"ModuleList"})
        raise config_error(
            "unknown-block-class",
            "no_split_module_classes",
            ", ".join(unknown),
            f"{type(model).__name__} has no module of that class",
            f"Name the class of its blocks, one of {', '.join(seen[:12])}",
        )
    declared: set[str] = set()
    for module in model.modules():
        declared.update(vars(module).get("_no_split_modules") or getattr(type(module), "_no_split_modules", None) or ())
    return frozenset((declared & present) | named)


def parts_in_order(model: nn.Module, no_split: Collection[str]) -> list[Part]:
    """Parts that cover every module and tensor of `model`, each once, in the order in which they run.

    Without an instance of `no_split`, the elements of the outermost ModuleLists are the blocks. A model that has
    neither is one part with the name "". Registration order is execution order, except for what _FIRST and _LAST
    name; the tests hold this against the order in which hooks fire in real forward passes.
    """
    whole = {id(module) for module in model.modules() if type(module).__name__ in no_split}
    if not whole:
        whole = {id(block) for blocks in _outermost_lists(model) for block in blocks}
    divided = {id(module) for module in _ancestors(model, whole)}
    if id(model) not in divided:
        return [Part("", "block")]
    return list(_walk(model, "", whole - divided, divided, _output_embedding(model)))


def _output_embedding(model: nn.Module) -> nn.Module | None:
    """What transformers calls the head of a language model, if the model has one."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return head if isinstance(head, nn.Module) else None


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and any(not isinstance(block, nn.Embedding) for block in child):
            yield child
        else:
            yield from _outermost_lists(child)


def _ancestors(module: nn.Module, whole: set[int]) -> list[nn.Module]:
    """Modules that have a whole one below them. What is inside a whole module does not count."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> bool:
        if id(module) in whole:
            return True
        below = [visit(child) for child in module.children()]
        if any(below):
            found.append(module)
        return any(below)

    visit(module)
    return found


def _walk(module: nn.Module, prefix: str, whole: set[int], divided: set[int], head: nn.Module | None) -> Iterator[Part]:
    own = [*module._parameters.items(), *module._buffers.items()]
    yield from (Part(prefix + name, "before") for name, tensor in own if tensor is not None)
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)

    def runs(name: str, child: nn.Module) -> bool:
        """Holds blocks, or is one; a whole embedding (BERT's) or pooling head is no block."""
        if id(child) in divided or is_list:
            return True
        return id(child) in whole and not _is_first(name, child) and not _LAST.search(name)

    running = [index for index, (name, child) in enumerate(children) if runs(name, child)]
    before: list[tuple[str, nn.Module]] = []
    between: list[tuple[str, nn.Module]] = []
    after: list[tuple[str, nn.Module]] = []
    for index, (name, child) in enumerate(children):
        if running and running[0] <= index <= running[-1]:
            between.append((name, child))
        elif child is head:
            after.append((name, child))
        elif index < min(running, default=0):
            (after if _LAST.search(name) and not _is_first(name, child) else before).append((name, child))
        else:
            (before if _is_first(name, child) else after).append((name, child))

    after.sort(key=lambda item: "norm" not in item[0])  # OPT registers its last norm behind the projection it feeds
    places: list[tuple[list[tuple[str, nn.Module]], Place]] = [(before, "before"), (between, "after"), (after, "after")]
    for group, place in places:
        for name, child in group:
            if id(child) in divided:
                yield from _walk(child, f"{prefix}{name}.", whole, divided, head)
            else:
                yield Part(prefix + name, "block" if group is between and runs(name, child) else place)


def _is_first(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or _FIRST.search(name) is not None
