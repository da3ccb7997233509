"""ResourceAllocator on a real GPU that another process fills step by step; skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.memory.passes import PassSpec
from verl_shard.runtime.allocator import ResourceAllocator
from verl_shard.runtime.ladder import Ladder, Pieces
from verl_shard.runtime.pass_memory import PassMemory

ROWS, LENGTH = 16, 512
GIB = 2**30
FILLER = """
import sys
import torch

held = []
torch.cuda.init()
print("ready", flush=True)
for line in sys.stdin:
    left, chunk = int(line), 64 * 2**20
    while held and torch.cuda.mem_get_info()[0] < left:
        held.pop()
        torch.cuda.empty_cache()
    while torch.cuda.mem_get_info()[0] > left + chunk:
        held.append(torch.empty(chunk, dtype=torch.uint8, device="cuda"))
    print(torch.cuda.mem_get_info()[0], flush=True)
"""

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice"),
]


class Filler:
    """Another process that takes the GPU's memory but for so much."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FILLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    def leave(self, size: int) -> int:
        assert self.process.stdin is not None
        torch.cuda.empty_cache()  # what torch has cached is this process's, whatever the other one does
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture
def filler() -> Iterator[Filler]:
    made = Filler()
    yield made
    made.end()


def test_fifty_steps_while_another_process_fills_the_gpu(
    filler: Filler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=32_000, max_position_embeddings=LENGTH, pad_token_id=0,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config).cuda()
    ids = torch.randint(3, 32_000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))

    def step(pieces: Pieces) -> list[int]:
        done = []
        for at in range(0, ROWS, pieces.size):
            part = ids[at : at + pieces.size].cuda()
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / ROWS).backward()
            done += list(range(at, at + len(part)))
        return done

    wanted = PassSpec(precision="fp32", accumulating=True, optimizer="sgd")
    memory = PassMemory(config, "causal-lm", wanted, {"": 0})
    ladder, asked = Ladder("update_actor"), Pieces(1, ROWS, total=ROWS)
    allocator = ResourceAllocator(ladder, lambda pieces: memory.of(pieces.size, LENGTH))
    step(asked)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    most, least = (memory.of(size, LENGTH) for size in (ROWS, 1))
    assert most is not None
    assert least is not None
    taken = []
    for number in range(50):
        share = abs(number - 25) / 25
        filler.leave(int(least[0] * 1.2 + GIB / 4 + share * (1.5 * most[0] - least[0])))
        allocator.before(asked)
        rows = ladder.work(step, asked, undo=lambda: model.zero_grad(set_to_none=True), too_large=str)
        assert rows == list(range(ROWS))
        for name, parameter in model.named_parameters():
            assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
        model.zero_grad(set_to_none=True)
        taken.append(ladder.taken)
    assert taken[0] == 0
    assert max(taken) >= 2
    assert taken[-1] < max(taken)
    kinds = [line["kind"] for line in read_json_lines(tmp_path / "events.jsonl")]
    assert {"remedy", "remedy-back"} <= set(kinds)
