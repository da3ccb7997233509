"""Going on after memory ran out: smaller pieces, the same numbers, and no tensor of the failed attempt left."""

import gc
import random
import warnings
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime.ladder import SHORT, STUCK, WELL, Ladder, Pieces, is_out_of_memory, one_line

OOM = (
    "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 1 has a total capacity of 139.72 GiB of which 1.02 GiB is free. "
    "Of the allocated memory 130.1 GiB is allocated by PyTorch, and 7.2 GiB is reserved by PyTorch but unallocated."
)


def steps(pieces: Pieces) -> list[tuple[int, int]]:
    made = []
    now: Pieces | None = pieces
    while now is not None:
        made.append((now.in_flight, now.size))
        now = now.smaller()
    return made


def test_fewer_in_flight_then_smaller() -> None:
    assert steps(Pieces(4, 8, total=24)) == [(4, 8), (2, 8), (1, 8), (1, 4), (1, 2), (1, 1)]
    assert steps(Pieces(1, 9, total=27)) == [(1, 9), (1, 3), (1, 1)]
    assert steps(Pieces(2, 5000, smallest=900)) == [(2, 5000), (1, 5000), (1, 2500), (1, 1250), (1, 900)]


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_sizes_divide_the_batch_and_end_at_one(in_flight: int, size: int, times: int) -> None:
    made = steps(Pieces(in_flight, size, total=size * times))
    assert made[-1] == (1, 1)
    assert all(size * times % one == 0 for _, one in made)
    assert all(later < earlier for earlier, later in pairwise(made))


def holder(fails: int, held: list[weakref.ref[torch.Tensor]]) -> Callable[[Pieces], list[float]]:
    """Work that keeps activations alive in its frame and runs out of memory so many times."""

    def run(pieces: Pieces) -> list[float]:
        activation = torch.zeros(10)
        held.append(weakref.ref(activation))
        drawn = [random.random(), float(torch.rand(()))]
        if len(held) <= fails:
            raise torch.OutOfMemoryError(OOM)
        return [*drawn, pieces.size]

    return run


def test_again_from_the_same_random_state_with_nothing_held() -> None:
    random.seed(1)
    torch.manual_seed(1)
    undisturbed = holder(0, [])(Pieces(1, 8, total=8))
    random.seed(1)
    torch.manual_seed(1)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def undo() -> None:
        gc.collect()
        alive.append(sum(one() is not None for one in held))

    ladder = Ladder("actor, train")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ladder.work(holder(2, held), Pieces(2, 8, total=8), undo=undo, too_large=str)
    first, second = (str(warning.message) for warning in said)
    assert first.startswith("actor, train = micro-batches of 8 sequences, 2 in flight: CUDA out of memory. Tried")
    assert first.endswith("1.02 GiB is free. Using micro-batches of 8 sequences instead.")
    assert second.endswith("Using micro-batches of 4 sequences instead.")
    assert all(warning.category is ShardNotice for warning in said)
    assert found == [*undisturbed[:2], 4]
    assert alive == [0, 0]
    assert ladder.taken == 2
    # The steps stay taken for the next batch, and are taken back one by one.
    assert ladder.pieces(Pieces(2, 12, total=12)) == Pieces(1, 6, total=12)
    assert ladder.up(Pieces(2, 8, total=8), "there is room") == Pieces(1, 8, total=8)
    ladder.up(Pieces(2, 8, total=8), "there is room")
    assert ladder.up(Pieces(2, 8, total=8), "there is room") == Pieces(2, 8, total=8)


def gradients(dtype: torch.dtype, fails: int) -> tuple[list[torch.Tensor], int]:
    """Of a mini-batch of 16 rows, two micro-batches of 8 in flight, whose second forward runs out of memory at each attempt
    so many times; and the remedies that were taken."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(16, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 64),
        torch.nn.GELU(),
        torch.nn.Linear(64, 1),
    ]
    model = torch.nn.Sequential(*layers).to(dtype)
    rows = torch.randn(16, 16).to(dtype)
    left = [fails]

    def run(pieces: Pieces) -> None:
        parts = rows.split(pieces.size)
        for at in range(0, len(parts), pieces.in_flight):
            losses = [model(part).float().square().sum() / len(rows) for part in parts[at : at + pieces.in_flight]]
            for loss in losses:
                loss.backward()
            if left[0]:  # gradients are there by now, which must go
                left[0] -= 1
                raise torch.OutOfMemoryError(OOM)

    ladder = Ladder("actor, train")
    ladder.work(run, Pieces(2, 8, total=16), undo=model.zero_grad, too_large=str)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], ladder.taken


@pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("fails", [1, 2, 3])
def test_gradients_are_the_undisturbed_ones_but_for_rounding(dtype: torch.dtype, most: float, fails: int) -> None:
    """Fewer in flight: the same to the last bit. Then smaller micro-batches: as near as sums in another order come."""
    expected, _ = gradients(dtype, 0)
    found, taken = gradients(dtype, fails)
    assert taken == fails
    wrong = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True)]
    assert max(wrong) <= (0 if fails == 1 else most)


@pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")
def test_one_sequence_that_does_not_fit() -> None:
    def run(_: Pieces) -> None:
        raise torch.OutOfMemoryError(OOM)

    cleared: list[None] = []
    with pytest.raises(
        DoesNotFitError, match=r"^sequence 3 of 4096 tokens: CUDA out of memory\. Tried to allocate 1\.16 GiB"
    ):
        Ladder("actor, train").work(
            run, Pieces(1, 2, total=2), undo=lambda: cleared.append(None),
            too_large=lambda words: f"sequence 3 of 4096 tokens: {words}",
        )  # fmt: skip
    assert len(cleared) == 2


def test_other_failures_are_not_touched() -> None:
    def run(_: Pieces) -> None:
        raise ValueError("labels")

    with pytest.raises(ValueError, match="labels"):
        Ladder("actor, train").work(run, Pieces(1, 2, total=2), undo=pytest.fail, too_large=str)


@pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")
def test_all_processes_go_on_alike() -> None:
    """Another process runs out of memory once, and later for good; this one never does."""
    others = iter([SHORT, WELL, STUCK])
    tried: list[int] = []

    def run(pieces: Pieces) -> int:
        tried.append(pieces.size)
        return pieces.size

    ladder = Ladder("actor, train")

    def work() -> int:
        return ladder.work(
            run, Pieces(1, 4, total=4), undo=lambda: None, too_large=str, agree=lambda mine: max(mine, next(others))
        )

    assert work() == 2
    assert tried == [4, 2]
    with pytest.raises(DoesNotFitError, match="another process"):
        work()


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(OOM))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(MemoryError())
    assert one_line(torch.OutOfMemoryError(OOM)).endswith("1.02 GiB is free")
