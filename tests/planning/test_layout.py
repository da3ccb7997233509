"""How much of a streamed model is on the GPU: counts worked out by hand; and how a trained one is cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from shapes import small_qwen2

from verl_shard.config.cards import CARDS
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.memory.in_flight import Stage
from verl_shard.planning.layout import Layouts, stream_buffers
from verl_shard.planning.models import Models, pass_of


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


@pytest.mark.parametrize(("in_flight", "n_gpus"), [(4, 4), (2, 3), (1, 2)])
def test_a_trained_role_is_cut_by_what_each_gpu_of_its_pipeline_keeps(in_flight: int, n_gpus: int) -> None:
    """Against all cuts into so many runs, each by the trace of its update at its own place, which is above all other phases."""
    model = small_qwen2(num_hidden_layers=10, vocab_size=1000, tie_word_embeddings=False)
    own = RoleConfig(
        model=model, task="causal-lm", precision="bf16", optimizer="adamw", attn_implementation="sdpa",
        gradient_checkpointing=False, micro_batch_size=2, in_flight=in_flight, lora_rank=0, logits="responses",
    )  # fmt: skip
    work = Workload(train_batch_size=16, prompt_length=64, response_length=448)
    layouts = Layouts(Models(), work, Inventory.declared(n_gpus, card=CARDS["h200-141g"]))
    traced = layouts.models.trace(own, pass_of("update_actor", own, work))
    placed = layouts.alone("actor", own, n_gpus)

    def fullest(cuts: tuple[int, ...]) -> int:
        return max(traced.peak(i, j, Stage(number, n_gpus)) for number, (i, j) in enumerate(pairwise(cuts)))

    cuts = (0, *(end for _, end in placed.runs.values()))
    worth = [block.stands_alone for block in placed.spec.blocks]
    possible = [
        (0, *inner, traced.n_blocks)
        for inner in combinations(range(1, traced.n_blocks), n_gpus - 1)
        if all(any(worth[i:j]) for i, j in pairwise((0, *inner, traced.n_blocks)))
    ]
    assert len(placed.runs) == n_gpus
    assert fullest(cuts) == min(map(fullest, possible)) == max(placed.device_map.loads.values())
