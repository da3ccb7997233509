"""The replayed allocator, step by step against what torch's rules give by hand, and against itself at random."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shard.memory.allocator import CachingAllocator, replay

_M = 2**20


def test_small_requests_share_a_segment_of_two_mib() -> None:
    allocator = CachingAllocator()
    addresses = [allocator.allocate(size) for size in (1, 512, 513)]
    assert (allocator.allocated, allocator.reserved) == (512 + 512 + 1024, 2 * _M)
    for address in addresses:
        allocator.release(address)
    assert (allocator.allocated, allocator.reserved) == (0, 2 * _M)
    allocator.allocate(_M)
    assert allocator.reserved == 2 * _M, "what was released was joined again"


def test_middle_requests_share_twenty_mib_and_large_ones_are_rounded_to_two() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * _M)
    allocator.allocate(9 * _M)
    assert allocator.reserved == 20 * _M
    allocator.allocate(10 * _M)
    assert allocator.reserved == 30 * _M
    allocator.allocate(11 * _M + 1)
    assert allocator.reserved == 42 * _M


def test_a_rest_of_up_to_one_mib_is_given_out_too() -> None:
    """A large block is split only when more than 1 MiB is left, so the rest counts as allocated."""
    allocator = CachingAllocator()
    allocator.allocate(12 * _M - _M)
    assert allocator.allocated == 12 * _M
    allocator.allocate(24 * _M - _M - 512)
    assert allocator.allocated == 12 * _M + 23 * _M - 512


def test_the_best_fit_is_taken() -> None:
    allocator = CachingAllocator()
    sizes = (40, 20, 30)
    addresses = [allocator.allocate(size * _M) for size in sizes]
    for address in addresses:
        allocator.release(address)
    assert allocator.allocate(19 * _M) == addresses[1]
    assert allocator.allocate(25 * _M) == addresses[2]
    assert allocator.reserved == 90 * _M


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * _M)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_whatever_comes(requests: list[tuple[bool, int]]) -> None:
    allocator, live = CachingAllocator(), []
    for release, size in requests:
        if release and live:
            allocator.release(live.pop(size % len(live))[0])
        else:
            address = allocator.allocate(size)
            assert all(address + size <= a or a + s <= address for a, s in live), "no two share a byte"
            live.append((address, size))
        asked = sum(size for _, size in live)
        assert asked <= allocator.allocated <= asked + len(live) * (_M + 512)
        assert allocator.allocated <= allocator.reserved
    for address, _ in live:
        allocator.release(address)
    assert allocator.allocated == 0


def test_a_workspace_is_cut_out_of_what_is_cached() -> None:
    """Made at the backward's first product, it takes a part of the block that the logits had: the next step's logits
    need a segment of their own. Made before everything it would have cost 32 MiB."""
    step = [("forward", 0, 100 * _M), ("forward", 1, 4 * _M), ("forward", 0, -1), ("backward", 2, 4 * _M)]
    plain = replay([], [], step, steps=2)
    assert plain.reserved == 120 * _M
    held = replay([], [], step, steps=2, workspaces={2: {"cublas": 32 * _M}})
    assert held.workspace == 32 * _M
    assert held.reserved == 220 * _M
    assert held.phase_peaks == {"forward": (104 + 32) * _M, "backward": (4 + 4 + 32) * _M}


def test_a_workspace_is_made_once_a_thread() -> None:
    step = [("forward", 0, 4 * _M), ("forward", 1, 4 * _M), ("backward", 2, 4 * _M), ("backward", 3, 4 * _M)]
    both = {"cublas": 32 * _M, "cublas-lt": _M}
    held = replay([], [], step, steps=3, workspaces={0: {"cublas": 32 * _M}, 1: both, 2: both, 3: both})
    assert held.workspace == 2 * 33 * _M


def test_a_step_is_repeated_and_the_first_makes_the_states() -> None:
    step = [("forward", 0, 4 * _M), ("backward", 1, 8 * _M), ("backward", 0, -1), ("optimizer", -1, 0)]
    replayed = replay([16 * _M], [12 * _M], step, steps=3)
    assert replayed.phase_peaks == {"forward": 32 * _M, "backward": 40 * _M, "optimizer": 36 * _M}
