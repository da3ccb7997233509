"""A pipeline over two real GPUs, of which one has too little memory; skipped where there are fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from verl_shard.runtime.ladder import Ladder, Pieces
from verl_shard.runtime.micro_batches import run_micro_batches
from verl_shard.runtime.pipeline import dispatch_model

ROWS, LENGTH, VOCAB = 16, 512, 32_000
MAP = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1} | {
    f"model.layers.{i}": int(i > 1) for i in range(4)
}

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice"),
]


@pytest.fixture
def _uncapped() -> Iterator[None]:
    yield
    for gpu in range(2):
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)


def cap(gpu: int, size: int) -> None:
    """Lets torch have no more of a GPU than so many bytes: more is refused as on one that is full."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(gpu).total_memory, gpu)


@pytest.mark.usefixtures("_uncapped")
@pytest.mark.parametrize("in_flight", [1, 2, "auto"])
@pytest.mark.parametrize("short", [1, 0])
def test_one_gpu_alone_runs_out_and_the_step_is_done_in_smaller_pieces(short: int, in_flight: Any) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=VOCAB, max_position_embeddings=LENGTH, pad_token_id=0,
    )  # fmt: skip
    model: Any = dispatch_model(transformers.AutoModelForCausalLM.from_config(config), MAP)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    said: list[str] = []

    def step(pieces: Pieces) -> int:
        parts = ids.split(pieces.size)
        batches = [{"input_ids": part, "labels": part, "use_cache": False} for part in parts]
        try:
            return run_micro_batches(model, batches, in_flight=in_flight, scale="tokens").in_flight
        except torch.OutOfMemoryError as error:
            said.append(str(error))
            raise

    def taken(size: int) -> tuple[int, int]:
        """Bytes of that GPU with micro-batches of so many rows: allocated and reserved, at most. Gradients stay."""
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(short)
        step(Pieces(1, size, total=ROWS))
        return torch.cuda.max_memory_allocated(short), torch.cuda.max_memory_reserved(short)

    _, little = taken(1)
    much, _ = taken(ROWS)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert little < 0.8 * much
    copies = sum(gradient.nbytes for gradient in expected.values() if gradient.device.index == short)
    cap(short, copies + (little + much) // 2)

    ladder = Ladder("update_actor")
    ladder.work(
        step, Pieces(1, ROWS, total=ROWS), undo=lambda: model.zero_grad(set_to_none=True), too_large=str,
        below=lambda: ROWS,
    )  # fmt: skip
    assert ladder.taken >= 1
    assert said
    assert all(f"GPU {short} has" in words for words in said)
    for name, parameter in model.named_parameters():
        assert parameter.device.index == MAP[next(key for key in MAP if f"{name}.".startswith(f"{key}."))]
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    # What comes after is not disturbed by what was given up.
    model.zero_grad(set_to_none=True)
    step(ladder.pieces(Pieces(1, ROWS, total=ROWS)))
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
