"""Packed rows under sdpa: the same numbers as each sequence alone, and no mask of tokens x tokens."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from verl_shard.models.packed import PACKED, why_not_packed
from verl_shard.runtime.packed import packed_inputs, use_packed_sdpa

LENGTHS = (5, 1, 9, 3)
SMALL = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip


def made(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def packed(lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(n) for n in lengths])[None]


class Largest(TorchDispatchMode):
    """The most elements that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return result


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma3_text", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    ],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_sequence_is_as_if_alone(kind: str, fields: dict[str, Any], checkpointed: bool) -> None:
    model = made(kind, **fields)
    ids, positions = packed()
    alone = torch.cat([model(part).logits[0] for part in ids.split(list(LENGTHS), dim=1)])
    weights = torch.linspace(-1, 1, alone.numel()).view_as(alone)
    wanted = torch.autograd.grad((alone * weights).sum(), list(model.parameters()), allow_unused=True)

    assert use_packed_sdpa(model)
    if checkpointed:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    told = packed_inputs(LENGTHS, "cpu", attn_implementation=PACKED)
    together = model(ids, position_ids=positions, use_cache=False, **told).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((together * weights).sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_no_mask_of_tokens_by_tokens() -> None:
    lengths = (60,) * 20
    ids, positions = packed(lengths)
    model = made("qwen2")
    with torch.no_grad(), Largest() as with_mask:
        expected = model(ids, position_ids=positions, use_cache=False).logits
    assert with_mask.elements >= 1200 * 1200
    use_packed_sdpa(model)
    with torch.no_grad(), Largest() as without:
        found = model(
            ids, position_ids=positions, use_cache=False, **packed_inputs(lengths, "cpu", attn_implementation=PACKED)
        ).logits
    assert without.elements == 1200 * 50  # the logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_packed_is_sdpa() -> None:
    model = made("qwen2")
    ids, mask = torch.randint(0, 50, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = 0
    plain = (
        model(ids, attention_mask=mask).logits,
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False),
    )
    assert use_packed_sdpa(model)
    again = (
        model(ids, attention_mask=mask).logits,
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False),
    )
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[1], again[1])


def test_what_flash_attention_is_told() -> None:
    told = packed_inputs((2, 3), "cpu", attn_implementation="flash_attention_2")
    assert told["cu_seq_lens_q"].tolist() == [0, 2, 5]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert (told["max_length_q"], told["max_length_k"]) == (3, 3)
    assert "attention_mask" not in told
    assert packed_inputs((2, 3), "cpu", attn_implementation="eager") == {}


def test_models_that_need_their_mask() -> None:
    assert why_not_packed(made("qwen2")) is None
    llama4 = AutoConfig.for_model("llama4_text", **SMALL | {"intermediate_size_mlp": 32, "num_local_experts": 2})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama4, attn_implementation="sdpa")
    assert "chunked_attention" in str(why_not_packed(model))
    assert not use_packed_sdpa(model)
    assert model.config._attn_implementation == "sdpa"
    routed = made("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, output_router_logits=True)
    assert "routers" in str(why_not_packed(routed))
    eager = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SMALL), attn_implementation="eager")
    assert not use_packed_sdpa(eager)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 300])
def test_the_kernel_on_a_gpu(window: int | None) -> None:
    sliding = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    torch.manual_seed(0)
    fields = SMALL | {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "max_position_embeddings": 2048}
    config = AutoConfig.for_model("qwen2", **fields, **sliding)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).cuda().eval()
    lengths = (700, 1, 333, 1024)
    ids, positions = (x.cuda() for x in packed(lengths))
    exact = model(ids, position_ids=positions, use_cache=False).logits
    exact_gradient = torch.autograd.grad(exact.square().mean(), model.model.embed_tokens.weight)[0]
    model.bfloat16()
    masked = model(ids, position_ids=positions, use_cache=False).logits
    assert use_packed_sdpa(model)
    told = packed_inputs(lengths, "cuda", attn_implementation=PACKED)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = model(ids, position_ids=positions, use_cache=False, **told).logits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradient = torch.autograd.grad(found.float().square().mean(), model.model.embed_tokens.weight)[0]
    # As far from fp32 as sdpa with its mask is, in bf16.
    assert (found - exact).norm() <= 1.2 * (masked - exact).norm()
    assert (gradient - exact_gradient).norm() <= 0.05 * exact_gradient.norm()
