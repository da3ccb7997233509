"""Batches of a model on a device that another process fills and leaves: none loses a row, and all have the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from verl_shard.memory.passes import PassSpec
from verl_shard.runtime.allocator import ResourceAllocator
from verl_shard.runtime.ladder import Ladder, Pieces
from verl_shard.runtime.pass_memory import PassMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WITHIN = {"fp32": 1e-5, "bf16": 1e-2}
"""How far, relative to their norm, gradients of a batch in smaller pieces may be from those of the whole batch."""


def fifty_steps(
    config: transformers.PretrainedConfig,
    precision: str,
    device: str,
    *,
    rows: int,
    length: int,
    leave: Callable[[int, int, float], None],
    free: Callable[[], Mapping[Any, int]] | None = None,
) -> list[int]:
    """How many remedies were taken in each of 50 batches of `rows` sequences, after whose first memory is short, then is not.

    leave(all, one, share): makes memory free, given what all rows and one row take; share falls from 1 to 0 and rises to 1.
    free: as ResourceAllocator's.
    """
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[precision]).to(device)
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))

    def step(pieces: Pieces) -> list[int]:
        done: list[int] = []
        for at in range(0, rows, pieces.size):
            part = ids[at : at + pieces.size].to(device)
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / rows).backward()
            done += range(at, at + len(part))
        return done

    wanted = PassSpec(precision=precision, accumulating=True, optimizer="sgd")  # type: ignore[arg-type]
    memory = PassMemory(config, "causal-lm", wanted, {"": 0})
    ladder, asked = Ladder("update_actor"), Pieces(1, rows, total=rows)
    allocator = ResourceAllocator(ladder, lambda pieces: memory.of(pieces.size, length), free=free)
    step(asked)
    expected = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    most, least = (memory.of(size, length) for size in (rows, 1))
    assert most is not None
    assert least is not None
    taken = []
    for number in range(50):
        leave(most[0], least[0], abs(number - 25) / 25)
        allocator.before(asked)
        done = ladder.work(step, asked, undo=lambda: model.zero_grad(set_to_none=True), too_large=str)
        assert done == list(range(rows))
        for name, parameter in model.named_parameters():
            off = (parameter.grad.float() - expected[name]).norm()
            assert off <= WITHIN[precision] * expected[name].norm(), (name, float(off / expected[name].norm()))
        model.zero_grad(set_to_none=True)
        taken.append(ladder.taken)
    return taken
