"""Remedies before memory runs out: taken when the estimate is not free, taken back when it is for long enough."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from runtime.filled_gpu import fifty_steps

from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.memory.estimate import estimate_memory
from verl_shard.memory.passes import PassSpec
from verl_shard.runtime.allocator import AFTER_OOM, ResourceAllocator
from verl_shard.runtime.ladder import Ladder, Pieces
from verl_shard.runtime.pass_memory import PassMemory

ASKED = Pieces(2, 4, total=8)
"""Takes 800, in 4 more steps 400, 200 and 100."""

pytestmark = pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")


class Machine:
    """What is free, and what each batch needs: 100 for each sequence that is in flight."""

    def __init__(self, free: dict[Any, int]) -> None:
        self.free = free
        self.ladder = Ladder("update_actor")
        self.allocator = ResourceAllocator(self.ladder, self.needed, free=lambda: self.free)

    def needed(self, pieces: Pieces) -> dict[Any, int]:
        return {0: 100 * pieces.size * pieces.in_flight}

    def batch(self, free: int) -> tuple[int, int]:
        self.free = {0: free}
        pieces = self.allocator.before(ASKED)
        return pieces.in_flight, pieces.size


def test_down_until_it_fits_and_up_one_by_one_after_two_batches() -> None:
    machine = Machine({})
    # 800 and 5 % of it.
    assert machine.batch(840) == (2, 4)
    assert machine.batch(839) == (1, 4)
    assert machine.batch(100) == (1, 1)
    assert machine.batch(104) == (1, 1)
    # Two sequences and 25 %: 250, in two batches in a row.
    assert machine.batch(249) == (1, 1)
    assert machine.batch(250) == (1, 1)
    assert machine.batch(249) == (1, 1)
    assert machine.batch(250) == (1, 1)
    assert machine.batch(250) == (1, 2)
    assert [machine.batch(10_000) for _ in range(4)] == [(1, 2), (1, 4), (1, 4), (2, 4)]
    assert machine.ladder.taken == 0


def test_a_head_room_that_wavers_takes_nothing_in_turns() -> None:
    machine = Machine({})
    assert machine.batch(839) == (1, 4)
    assert {machine.batch(free) for free in [800, 880] * 10} == {(1, 4)}


def test_out_of_memory_in_spite_of_it_is_not_tried_again_soon() -> None:
    machine = Machine({})
    assert machine.batch(10_000) == (2, 4)
    machine.ladder.down(ASKED, "CUDA out of memory")
    assert [machine.batch(10_000) for _ in range(AFTER_OOM - 1)] == [(1, 4)] * (AFTER_OOM - 1)
    assert machine.batch(10_000) == (2, 4)
    machine.ladder.down(ASKED, "CUDA out of memory")
    assert [machine.batch(10_000) for _ in range(2 * AFTER_OOM)] == [(1, 4)] * (2 * AFTER_OOM - 1) + [(2, 4)]


def test_nothing_is_done_where_nothing_is_known() -> None:
    machine = Machine({})
    machine.free = {}
    assert machine.allocator.before(ASKED) == ASKED
    machine.free = {1: 1}  # of another GPU
    assert machine.allocator.before(ASKED) == ASKED
    unknown = ResourceAllocator(machine.ladder, lambda _: None, free=lambda: {0: 1})
    assert unknown.before(ASKED) == ASKED
    machine.ladder.down(ASKED, "CUDA out of memory")
    assert [unknown.before(ASKED).in_flight for _ in range(20)] == [1] * 20


def test_all_processes_work_in_the_same_pieces() -> None:
    """Another process is short, then has enough later than this one."""
    machine, others = Machine({}), iter([2, 2, 2, 1])
    machine.allocator.agree = lambda mine: max(mine, next(others))
    assert [machine.batch(10_000) for _ in range(4)] == [(1, 2), (1, 2), (1, 2), (1, 4)]


def test_what_a_batch_took_corrects_its_estimate() -> None:
    machine = Machine({})
    machine.allocator.after(ASKED, {0: 600})
    machine.allocator.after(ASKED, {0: 400})
    # Three quarters of 800, and 5 %.
    assert machine.batch(630) == (2, 4)
    assert machine.batch(629) == (1, 4)
    machine.allocator.after(ASKED, {0: 100_000})
    # One and a half times 400 at most.
    assert machine.batch(630) == (1, 4)
    assert machine.batch(629) == (1, 2)


def test_the_events_have_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    machine = Machine({})
    for free in (500, 10_000, 10_000):
        machine.batch(free)
    lines = [line for line in read_json_lines(tmp_path / "events.jsonl") if line["kind"].startswith("remedy")]
    shown = [
        {key: line[key] for key in ("kind", "where", "taken", "device", "needed", "free", "after")} for line in lines
    ]
    small, large = "micro-batches of 4 sequences", "micro-batches of 4 sequences, 2 in flight"
    assert shown == [
        {
            "kind": "remedy", "where": "update_actor", "taken": 1, "device": "0", "needed": "800 B", "free": "500 B",
            "after": small,
        },
        {
            "kind": "remedy-back", "where": "update_actor", "taken": 0, "device": "0", "needed": "800 B",
            "free": "9.77 KiB", "after": large,
        },
    ]  # fmt: skip


CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=1024, pad_token_id=0,
)  # fmt: skip
WORKSPACE = 64 * 2**20


@pytest.mark.parametrize("phase", ["train", "forward"])
def test_a_pass_takes_what_is_estimated_above_its_weights(phase: str) -> None:
    fields: dict[str, Any] = {"precision": "fp32", "loss": "verl-ppo", "padded": True}
    if phase == "train":
        fields |= {"accumulating": True, "optimizer": "sgd"}
    memory = PassMemory(CONFIG, "causal-lm", PassSpec(phase=phase, **fields), {"": 0})  # type: ignore[arg-type]
    for rows, length, within in ((4, 256, 0.01), (3, 256, 0.01), (1, 256, 0.01), (2, 192, 0.2)):
        found = estimate_memory(CONFIG, phase=phase, batch_size=rows, seq_len=length, **fields)
        above = max(found.forward_peak, found.backward_peak) - found.weights - found.workspace
        assert memory.of(rows, length) == {0: pytest.approx(above, rel=within, abs=0)}, (rows, length)


def test_over_two_devices_each_has_its_blocks_and_what_is_in_flight() -> None:
    placed = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 2, "lm_head": 2}
    placed |= {f"model.layers.{i}": device for i, device in enumerate((0, 1, 1, 2))}
    memory = PassMemory(CONFIG, "causal-lm", PassSpec(precision="fp32", accumulating=True), placed)
    found = {n: memory.of(2, 256, in_flight=n) for n in (1, 2, 3, 4)}
    steps = []
    for n in (2, 3, 4):
        now, before = found[n], found[n - 1]
        assert now is not None
        assert before is not None
        steps.append([now[device] - before[device] for device in (0, 1, 2)])
    # In 1F1B order the second of three devices has two micro-batches at most, the last one, until there are more than devices;
    # and the hidden states of one that is on its way.
    one_more = steps[2]
    on_its_way = 4 * 2 * 256 * CONFIG.hidden_size
    assert steps[0] == pytest.approx([one_more[0], one_more[1], on_its_way], abs=2)
    assert steps[1] == pytest.approx([one_more[0], on_its_way, 0], abs=2)
    # Two blocks keep twice what one does; beside the first is the embedding, beside the last the logits, which are more.
    assert 1.5 * one_more[0] < one_more[1] <= 2 * one_more[0]
    assert one_more[2] > one_more[0]
    one, four = (
        estimate_memory(
            CONFIG, batch_size=2, seq_len=256, precision="fp32", accumulating=True, in_flight=n, device_map=placed
        ).gpus
        for n in (1, 4)
    )
    ours = [sum(step[device] for step in steps) for device in (0, 1, 2)]
    assert ours == pytest.approx([four[device].peak - one[device].peak for device in (0, 1, 2)], rel=0.02)


def test_what_cannot_be_traced_is_not_estimated() -> None:
    memory = PassMemory(CONFIG, "causal-lm", PassSpec(precision="fp32"), {"model.layers.0": 0})
    assert memory.of(1, 8) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fifty_batches_while_memory_goes_and_comes_lose_no_row_and_have_the_same_gradients(precision: str) -> None:
    free = {0: 0}

    def leave(most: int, least: int, share: float) -> None:
        free[0] = int(least * 1.06 + share * (1.5 * most - least))

    config = transformers.LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 2})
    taken = fifty_steps(config, precision, "cpu", rows=4, length=16, leave=leave, free=lambda: free)
    # Four sequences, two and one, and back, a step at a time.
    assert (taken[0], max(taken), taken[-1]) == (0, 2, 0)
    assert {now - then for then, now in pairwise(taken)} == {-1, 0, 1}
