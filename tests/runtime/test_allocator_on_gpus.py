"""ResourceAllocator on a real GPU that another process fills step by step; skipped where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from runtime.filled_gpu import fifty_steps

from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE

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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fifty_steps_while_another_process_fills_the_gpu(
    precision: str, filler: Filler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=32_000, max_position_embeddings=LENGTH, pad_token_id=0,
    )  # fmt: skip

    def leave(most: int, least: int, share: float) -> None:
        filler.leave(int(least * 1.2 + GIB / 4 + share * (1.5 * most - least)))

    taken = fifty_steps(config, precision, "cuda", rows=ROWS, length=LENGTH, leave=leave)
    assert taken[0] == 0
    assert max(taken) >= 2
    assert taken[-1] < max(taken)
    kinds = [line["kind"] for line in read_json_lines(tmp_path / "events.jsonl")]
    assert {"remedy", "remedy-back"} <= set(kinds)
