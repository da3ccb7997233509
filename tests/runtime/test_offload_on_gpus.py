"""offload_model on real GPUs; skipped where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module

from verl_shard import offload_model
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.offload import offload_of, undo_offload
from verl_shard.runtime.pinned import pinned_bytes

N_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(N_GPUS < 1, reason="needs a GPU")


def _model(small_config: Callable[..., Any], kind: str = "qwen2", auto: str = "SequenceClassification") -> Any:
    torch.manual_seed(0)
    config = small_config(kind, num_labels=1, num_hidden_layers=6)
    made = getattr(transformers, f"AutoModelFor{auto}").from_config(config, dtype=torch.bfloat16)
    return made.eval().requires_grad_(False)


def _ids(n: int = 4, length: int = 33, device: str = "cuda") -> torch.Tensor:
    return torch.randint(3, 100, (n, length), generator=torch.Generator().manual_seed(n)).to(device)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"ahead": 1}, {"ahead": 3, "prefetch": True}, {"embeddings_on_host": True}, {"offload": "cpu_offload"},
        {"offload": "cpu_offload_with_hook"}, {"offload": "auto"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["qwen2", "deepseek_v3", "gpt2"])
def test_results_are_the_resident_models(options: dict[str, Any], kind: str, small_config: Callable[..., Any]) -> None:
    model = _model(small_config, kind)
    start = pinned_bytes()
    expected = [model.cuda()(input_ids=_ids(n)).logits for n in (1, 4, 2)]
    model.cpu()
    offload_model(model, 0, **options)
    for _ in range(3):
        for n, logits in zip((1, 4, 2), expected, strict=True):
            assert torch.equal(model(input_ids=_ids(n)).logits, logits)
    if options.get("offload") not in ("cpu_offload_with_hook", "auto"):  # those leave the inputs to whoever calls
        assert torch.equal(model(input_ids=_ids(4, device="cpu")).logits, expected[1].cpu())
    with torch.inference_mode():
        assert torch.equal(model(input_ids=_ids(2)).logits, expected[2])
    with torch.cuda.stream(torch.cuda.Stream()):
        ids = _ids(4)
        other = model(input_ids=ids).logits
    torch.cuda.synchronize()
    assert torch.equal(other, expected[1])
    undo_offload(model)
    assert pinned_bytes() == start
    assert {p.device.type for p in model.parameters()} == {"cpu"} or options.get("offload") in ("auto",)
    assert torch.equal(model.cuda()(input_ids=_ids(4)).logits, expected[1])


@pytest.mark.parametrize("how", ["stream", "cpu_offload", "cpu_offload_with_hook", "none"])
@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_it_says_where_it_computes_and_goes_back(how: str, start: str, small_config: Callable[..., Any]) -> None:
    model = _model(small_config).to(start)
    offload_model(model, 0, offload=how)
    assert model.hf_device_map == {"": 0}
    assert input_device(model) == torch.device("cuda", 0)
    assert model(input_ids=_ids().to(input_device(model))).logits.device == torch.device("cuda", 0)
    undo_offload(model)
    assert not hasattr(model, "hf_device_map")
    assert {tensor.device.type for tensor in model.parameters()} == {"cuda" if how == "none" else start}


def test_buffers_are_given_back_and_a_model_goes_back_to_the_gpu(small_config: Callable[..., Any]) -> None:
    model = _model(small_config).cuda()
    expected = model(input_ids=_ids()).logits.cpu()
    gone = [*model.model.layers.parameters(), model.model.embed_tokens.weight]
    before = torch.cuda.memory_allocated()
    offload_model(model, embeddings_on_host=True)
    model(input_ids=_ids())
    told = offload_of(model)
    assert told is not None
    assert told.streamed is not None
    assert told.streamed.buffer_bytes == 0
    assert torch.cuda.memory_allocated() <= before - sum(p.numel() * p.element_size() for p in gone)
    remove_hook_from_module(model, recurse=True)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert torch.equal(model(input_ids=_ids()).logits.cpu(), expected)


def test_the_embedding_is_read_over_the_link_and_gathered_when_it_is_not_pinned(
    small_config: Callable[..., Any],
) -> None:
    model = _model(small_config)
    expected = model.cuda()(input_ids=_ids()).logits
    model.cpu()
    offload_model(model, 0, embeddings_on_host=True)
    assert model._hf_hook._embedding.mapped
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_offload(model)
    with pytest.warns(ShardNotice, match="could not be pinned"):
        offload_model(model, 0, embeddings_on_host=True, pin_limit=0)
    assert not model._hf_hook._embedding.mapped
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_offload(model)


def test_an_error_in_the_middle_loses_nothing(small_config: Callable[..., Any]) -> None:
    model = _model(small_config)
    expected = model.cuda()(input_ids=_ids()).logits
    model.cpu()
    offload_model(model, 0, prefetch=True)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for layer in (0, 3, 5):
        handle = model.model.layers[layer].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=_ids())
        handle.remove()
        assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_offload(model)


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dispatched", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_over_two_gpus_each_streams_its_own(dispatched: bool, on_host: bool, small_config: Callable[..., Any]) -> None:
    model = _model(small_config)
    expected = model.cuda()(input_ids=_ids()).logits
    model.cpu()
    layers = {f"model.layers.{i}": int(i > 2) for i in range(6)}
    placed = {"model.embed_tokens": 0, "model.rotary_emb": 0, **layers, "model.norm": 1, "score": 1}
    if dispatched:
        dispatch_model(model, placed)
    offload_model(model, None if dispatched else placed, embeddings_on_host=on_host)
    for _ in range(3):
        assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_offload(model)
    assert torch.equal((model if dispatched else model.cuda())(input_ids=_ids()).logits, expected)
