"""Which prompts are put through the model together: similar lengths, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Sequence

FORWARD_TOKENS = 256
"""A forward costs about as much as so many tokens in one that is there already."""
MOST_TOKENS = 16_384
"""In one forward, so that its activations stay small; more makes no forward faster."""


def prefill_groups(lengths: Sequence[int], *, forward_tokens: int = FORWARD_TOKENS) -> list[range]:
    """Consecutive groups of prompts with the smallest cost, where a group costs its prompts times the longest of them, and
    `forward_tokens`. lengths: of the prompts, from the longest to the shortest.
    """
    n = len(lengths)
    # A group ends only where the length changes.
    back = [0] * (n + 1)
    cost_to = [0.0, *[float("inf")] * n]
    ends = [i for i in range(1, n + 1) if i == n or lengths[i] != lengths[i - 1]]
    starts = [0]
    for end in ends:
        for start in reversed(starts):
            longest = lengths[start]
            cost = cost_to[start] + (end - start) * longest + forward_tokens
            if cost < cost_to[end]:
                cost_to[end], back[end] = cost, start
        starts.append(end)
    groups, end = [], n
    while end:
        groups.append(range(back[end], end))
        end = back[end]
    return groups[::-1]


def divided(group: range, longest: int, most_tokens: int = MOST_TOKENS) -> list[range]:
    """A group in parts of at most so many tokens, and at least one prompt."""
    step = max(1, most_tokens // max(1, longest))
    return [range(start, min(start + step, group.stop)) for start in range(group.start, group.stop, step)]
