"""What the Recorder hands on: a pass as events, and the pieces of a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_shard.memory.work import Work
from verl_shard.models.spec import ModelSpec

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache")
"""What a storage is, by its index here."""
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, KV_CACHE = range(len(KINDS))

LOSS = "loss"
"""A mark within the forward: the model is done, and what follows makes the loss of what it returned. A pipeline does that
only when the micro-batch's backward is next."""

NO_PRODUCT, PRODUCT, PRODUCT_WITH_BIAS = range(3)
"""Whether a matrix product made a storage: a thread's first of each kind makes a workspace, see memory/constants.py."""


@dataclass(frozen=True, eq=False)
class Recording:
    """What a pass allocated and released, in order.

    sizes (bytes), owners (Block), kinds (index into KINDS): by storage. events, actors, steps, uses: see Recorder.
    n_static: events before the pass. marks: where phases of the pass begin, as (name, event).
    kept: bytes that one micro-batch keeps for its backward, by Block.
    """

    sizes: np.ndarray
    owners: np.ndarray
    kinds: np.ndarray
    events: np.ndarray
    actors: np.ndarray
    steps: np.ndarray
    uses: tuple[tuple[int, int, int], ...]
    n_static: int
    marks: tuple[tuple[str, int], ...]
    kept: np.ndarray
    flops: tuple[int, ...]
    flops_in_backward: tuple[int, ...]
    of_product: np.ndarray
    """By storage, PRODUCT or PRODUCT_WITH_BIAS if a product of matrices made it, else NO_PRODUCT."""
    work: Work


def halved_gradients(recording: Recording) -> frozenset[int]:
    """Gradients of weights that a pass uses twice, as a tied head is: autograd keeps the half that comes first until the
    other is added to it, and only then adds it to what earlier micro-batches left.

    The backward goes through the chain from its end, so that it is one that comes before a gradient of a later Block.
    """
    made = recording.events[recording.n_static :] - 1
    made = made[made >= 0]
    made = made[recording.kinds[made] == GRADIENTS]
    owners = recording.owners[made]
    later = np.maximum.accumulate(owners[::-1])[::-1]  # the last Block of those that come from here on
    return frozenset(made[owners < later].tolist())


@dataclass(frozen=True)
class Pieces:
    """Which names of modules and tensors belong to which Block of the chain."""

    block_of: Mapping[str, int]
    n_blocks: int
    head: str | None

    @classmethod
    def of(cls, spec: ModelSpec) -> Pieces:
        block_of = {name: i for i, block in enumerate(spec.blocks) for name in (*block.names, *block.followers)}
        return cls(block_of, len(spec.blocks), spec.head)

    def of_tensor(self, name: str) -> int:
        """The Block that holds a parameter or buffer."""
        while name not in self.block_of:
            assert name, "the pieces of a model cover all its tensors"
            name = name.rpartition(".")[0]
        return self.block_of[name]
