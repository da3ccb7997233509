"""What FSDP gathers and reduces at once: one unit for each decoder layer, and the root for what no unit holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_shard.models.spec import ModelSpec

ShardedBackend = Literal["fsdp", "fsdp2"]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together. blocks: of the ModelSpec; params: elements of each parameter, in order;
    trained: of these, those that get a gradient."""

    blocks: tuple[int, ...]
    params: tuple[int, ...]
    trained: tuple[int, ...]

    @property
    def n_params(self) -> int:
        return sum(self.params)

    @property
    def n_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True)
class Units:
    """All units of a model; `root` is the last of them."""

    units: tuple[Unit, ...]
    of_block: tuple[int, ...]
    """For each Block of the ModelSpec the index of its unit."""

    @property
    def root(self) -> int:
        return len(self.units) - 1

    @property
    def n_params(self) -> int:
        return sum(unit.n_params for unit in self.units)

    @property
    def n_trained(self) -> int:
        return sum(unit.n_trained for unit in self.units)


def units_of(spec: ModelSpec, backend: ShardedBackend, *, tied: bool | None = None) -> Units:
    """The units that verl makes of a model.

    Both wrap each decoder layer (`_no_split_modules`). fsdp2 wraps embedding and head too, unless they are tied
    (verl/utils/fsdp_utils.py: get_fsdp_wrap_policy, _select_fsdp2_wrap_targets). With adapters only they are trained.
    tied: what the configuration's tie_word_embeddings says, which is what verl asks, also of a value model that has
    nothing to tie; by default whether the model has ties.
    """
    own = {"block"}
    if backend == "fsdp2" and not (bool(spec.ties) if tied is None else tied):
        own |= {"embedding", "head"}
    adapted = any("lora_" in tensor.name for tensor in spec.tensors)
    members: list[list[int]] = []
    rest: list[int] = []
    for index, block in enumerate(spec.blocks):
        alone = block.kind in own and (block.kind != "head" or _is_lm_head(block.names))
        members.append([index]) if alone else rest.append(index)
    members.append(rest)
    params: list[list[int]] = [[] for _ in spec.blocks]
    trained: list[list[int]] = [[] for _ in spec.blocks]
    for tensor in spec.tensors:
        if not tensor.is_buffer and not tensor.is_alias:
            params[tensor.block].append(tensor.n_elements)
            if not adapted or "lora_" in tensor.name:
                trained[tensor.block].append(tensor.n_elements)
    units = tuple(
        Unit(tuple(of), tuple(n for i in of for n in params[i]), tuple(n for i in of for n in trained[i]))
        for of in members
    )
    of_block = {block: number for number, unit in enumerate(units) for block in unit.blocks}
    return Units(units, tuple(of_block[index] for index in range(len(spec.blocks))))


def _is_lm_head(names: tuple[str, ...]) -> bool:
    """verl wraps the head by its name; a value model's `score` stays in the root."""
    return any(name.rpartition(".")[2] == "lm_head" for name in names)
