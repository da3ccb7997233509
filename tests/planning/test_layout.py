"""How much of a streamed model is on the GPU: counts worked out by hand."""

from __future__ import annotations

import pytest

from verl_shard.planning.layout import stream_buffers


@pytest.mark.parametrize(
    ("n_blocks", "block", "head", "buffers"),
    [
        (28, 466, 0, 3),  # a reward model: one computes, two are copied
        (28, 466, 1090, 7),  # Qwen2-7B: its head is 2.3 blocks, and one more for the loss
        (24, 30, 272, 12),  # Qwen2-0.5B: never more than half
        (4, 10, 0, 2),
        (1, 10, 0, 1),
    ],
)
def test_how_many_blocks_of_a_streamed_model_are_on_the_gpu(n_blocks: int, block: int, head: int, buffers: int) -> None:
    assert stream_buffers(n_blocks, block, head) == buffers
