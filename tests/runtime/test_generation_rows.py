"""Rows that come and go: the tokens of transformers' generate for all kinds of caches, and what is computed meanwhile."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module, remove_hook_from_submodules
from shapes import small_qwen2
from transformers.cache_utils import DynamicCache

from verl_shard.common.notices import ShardNotice
from verl_shard.models.decoding import why_it_asks
from verl_shard.models.packed import PACKED
from verl_shard.runtime import generation, generation_rows
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.generation import generate
from verl_shard.runtime.generation_attention import NAME, grouped_decoding, one_token_attention
from verl_shard.runtime.generation_cache import RowsCache, RowsLayer
from verl_shard.runtime.generation_graph import capture_on, capture_on_gpu, why_not_fixed
from verl_shard.runtime.generation_prefill import divided, prefill_groups
from verl_shard.runtime.generation_rows import RowDecoder, why_not_rows
from verl_shard.runtime.generation_sampling import Response, Sampling
from verl_shard.runtime.offload import Offload
from verl_shard.runtime.packed import use_packed_sdpa
from verl_shard.runtime.pipeline import dispatch_model

CPU = torch.device("cpu")
STOPS = [2, *range(40, 56)]
_drawn = random.Random(1)
PROMPTS = [[_drawn.randrange(3, 100) for _ in range(n)] for n in (1, 5, 9, 20, 3, 3, 12, 30, 7)]
PROMPTS[5] = PROMPTS[4]
MOST = [25, 3, 9, 14, 25, 1, 7, 20, 11]


def _captured(step: Any) -> Any:
    """As on a GPU: the first run leaves its writes, and each other is of the same tensors."""
    result = step()
    return lambda: result.copy_(step()), result


def causal(config: Any) -> Any:
    """With weights large enough for distributions that are neither flat nor of one token."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model


def ours(model: Any, sampling: Sampling = Sampling(25), **given: Any) -> list[Response]:  # noqa: B008
    return generate(
        model, PROMPTS, range(len(PROMPTS)), sampling, pad_token_id=0, eos_token_ids=STOPS, device=CPU,
        max_new_tokens=MOST, **given,
    )  # fmt: skip


def each_alone(model: Any, sampling: Sampling = Sampling(25)) -> list[Response]:  # noqa: B008
    """By transformers' generate, one prompt at a time, so that nothing is padded or shared."""
    stops, made = sampling.stops(STOPS), []
    for seed, (prompt, most) in enumerate(zip(PROMPTS, MOST, strict=True)):
        made += generation._plainly(model, [prompt], [seed], sampling, [most], stops, 0, CPU)
    return made


def same(found: list[Response], expected: list[Response]) -> None:
    assert [response.token_ids for response in found] == [response.token_ids for response in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=2e-5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen2", {}), ("gpt2", {}), ("falcon", {}), ("deepseek_v3", {}), ("phi3", {}),
        ("gemma2", {"sliding_window": 8}), ("mistral", {"sliding_window": 7}), ("llama", {"attn_implementation": "eager"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_tokens_are_those_of_generate(kind: str, fields: dict[str, Any], small_config: Callable[..., Any]) -> None:
    model = causal(small_config(kind, **fields))
    assert why_not_rows(model) is None
    sampling = Sampling(25, min_new_tokens=3)
    expected = each_alone(model, sampling)
    # Some end by a token, some by their limit; none that may go on ends before its third token.
    assert sum(len(made.token_ids) < most for made, most in zip(expected, MOST, strict=True)) >= 1
    assert all(len(made.token_ids) >= min(3, most) for made, most in zip(expected, MOST, strict=True))
    for at_once in (4, None):
        same(ours(model, sampling, max_rows=at_once), expected)
    assert model.config._attn_implementation == fields.get("attn_implementation", "sdpa")


def test_penalties_and_stop_tokens_of_a_request() -> None:
    model = causal(small_qwen2())
    sampling = Sampling(25, repetition_penalty=1.7, top_k=9, ignore_eos=True, stop_token_ids=(7, *range(100, 200)))
    expected = each_alone(model, sampling)
    assert any(made.token_ids[-1] in sampling.stop_token_ids for made in expected)
    same(ours(model, sampling, max_rows=3), expected)


def test_a_laid_out_model_generates_through_its_hooks() -> None:
    model = causal(small_qwen2())
    expected = each_alone(model)
    blocks = {f"model.layers.{i}": "cpu" for i in range(4)}
    rest = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    dispatch_model(model, {**blocks, **rest}, force_hooks=True)
    assert input_device(model) == CPU
    same(ours(model, max_rows=4), expected)
    remove_hook_from_submodules(model)


def test_what_is_computed_ends_with_each_response() -> None:
    model = causal(small_qwen2())
    prompts = [[5, 6, 7], [9] * 40, [5, 6, 7], [8, 8, 8]]
    most = [6, 2, 3, 1]
    decoder = RowDecoder(model, prompts, range(4), Sampling(6, ignore_eos=True), most, (), CPU, 4)
    with torch.no_grad():
        made = decoder.run()
    assert [len(response.token_ids) for response in made] == most
    stats = decoder.stats
    # The first token of each comes from the prefill: 5, 1, 2 and 0 steps remain, together as many as the longest.
    assert (stats.steps, stats.row_steps) == (5, 8)
    # One forward of three prompts, padded to 40: another would cost as much as 256 tokens. Equal ones are computed once.
    assert (stats.prefills, stats.prefill_tokens) == (1, 3 * 40)
    # 4 rows of 40 columns and room for 5 more in 4 layers, and the prefill's 3 rows, whose layers are let go one by one.
    token = 2 * 2 * 16 * 4  # keys and values, heads, their size, bytes
    assert stats.cache_bytes == 4 * 45 * 4 * token + 3 * 40 * token


def test_waiting_requests_take_the_rows_of_those_that_ended() -> None:
    model = causal(small_qwen2())
    prompts, most = [[i, 5] for i in range(3, 13)], [9, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    decoder = RowDecoder(model, prompts, range(10), Sampling(9, ignore_eos=True), most, (), CPU, 2)
    with torch.no_grad():
        made = decoder.run()
    assert [len(response.token_ids) for response in made] == most
    # One row is busy for 8 steps, and the 9 short ones need one each in the other.
    assert (decoder.stats.steps, decoder.stats.row_steps) == (9, 17)


def test_a_cache_of_another_kind_is_left_to_generate_and_said_once(small_config: Callable[..., Any]) -> None:
    model = causal(small_config("mamba", state_size=4))
    with pytest.warns(ShardNotice, match="Using transformers' generate, in which a batch lasts") as said:
        made = [ours(model, max_rows=4), ours(model)]
    assert len(said) == 1
    assert [[len(response.token_ids) <= most for response, most in zip(rows, MOST, strict=True)] for rows in made] == [
        [True] * 9
    ] * 2


def test_generate_stands_in_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal(small_qwen2())
    sampling = Sampling(25, min_new_tokens=4, top_p=0.9, repetition_penalty=1.3)
    expected = ours(model, sampling)
    monkeypatch.setattr(generation, "why_not_rows", lambda _: "of this test")
    with pytest.warns(ShardNotice, match="of this test"):
        same(ours(model, sampling, max_rows=4), expected)


@pytest.mark.parametrize("name", ["generate", "prepare_inputs_for_generation"])
def test_a_model_that_prepares_its_inputs_itself_is_left_to_generate(name: str) -> None:
    model = causal(small_qwen2())
    model.__class__ = type("Own", (type(model),), {name: lambda self: None})
    assert why_not_rows(model) == f"it has a {name} of its own"


def test_an_offloaded_model_reads_its_weights_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal(small_qwen2())
    prompts = [[4] * n for n in (2, 400, 3, 800)]

    def prefills() -> int:
        decoder = RowDecoder(model, prompts, range(4), Sampling(1), [1] * 4, (), CPU, 4)
        with torch.no_grad():
            decoder.run()
        return decoder.stats.prefills

    # Apart they are 800 + 400 + 2 * 3 tokens and three forwards, together 3,200 and one.
    assert prefills() == 3
    cpu_offload(model, CPU)
    told = Offload("cpu_offload", "a test")
    monkeypatch.setitem(model.__dict__, "_verl_shard_offload", told)
    assert prefills() == 1
    # Where nothing is offloaded, and where accelerate has undone it since, nothing comes with a forward.
    monkeypatch.setitem(model.__dict__, "_verl_shard_offload", replace(told, how="none"))
    assert prefills() == 3
    monkeypatch.setitem(model.__dict__, "_verl_shard_offload", told)
    remove_hook_from_module(model, recurse=True)
    assert prefills() == 3


def test_a_model_of_which_nothing_is_offloaded_has_steps_of_a_fixed_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal(small_qwen2())
    cache = RowsCache(DynamicCache(config=model.config))
    assert why_not_fixed(model, cache, positions=True) is None
    monkeypatch.setitem(model.__dict__, "_verl_shard_offload", Offload("none", "a test"))
    assert why_not_fixed(model, cache, positions=True) is None


def test_steps_of_a_fixed_shape_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal(small_qwen2())
    monkeypatch.setattr(generation_rows, "SPARE_COLUMNS", 6)
    monkeypatch.setattr(generation_rows, "FEWEST_STEPS", 4)
    made: list[torch.Tensor] = []

    def capture(step: Any) -> Any:
        again, result = _captured(step)
        made.append(result)
        return again, result

    def run(**given: Any) -> tuple[list[Response], int]:
        decoder = RowDecoder(model, PROMPTS, range(len(PROMPTS)), Sampling(25), MOST, STOPS, CPU, 4, **given)
        with torch.no_grad():
            return decoder.run(), decoder.stats.steps

    (free, steps), (fixed, fixed_steps) = run(), run(capture=capture)
    same(fixed, free)
    assert steps == fixed_steps
    assert len(made) < steps
    # Rows are laid out for four at most; those that ended are computed with.
    assert max(len(logits) for logits in made) == 4
    n_made = len(made)
    monkeypatch.setattr(generation_rows, "FEWEST_STEPS", 7)  # more than a cache has room for
    same(run(capture=capture)[0], free)
    assert len(made) == n_made


@pytest.mark.parametrize("attention", ["sdpa", PACKED, "flash_attention_2"])
def test_steps_are_sdpas_where_the_model_has_packed_rows_or_flash_attention(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash attention has no masks over a cache of fixed length; free steps under it stay its own."""
    model, given = causal(small_qwen2()), (PROMPTS, range(len(PROMPTS)), Sampling(25), MOST, STOPS, CPU, 4)
    with torch.no_grad():
        expected = RowDecoder(model, *given).run()
    seen: list[str] = []

    def as_sdpa(module: Any, *tensors: Any, **kwargs: Any) -> Any:
        seen.append(attention)
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, *tensors, **kwargs)

    def decoding(*tensors: Any, **kwargs: Any) -> Any:
        seen.append(NAME)
        return one_token_attention(*tensors, **kwargs)

    monkeypatch.setattr("verl_shard.runtime.generation_attention.one_token_attention", decoding)
    if attention == PACKED:
        assert use_packed_sdpa(model)
    elif attention != "sdpa":
        model.config._attn_implementation_internal = attention
        monkeypatch.setattr(generation_rows, "FEWEST_STEPS", 1)
        masks = transformers.AttentionMaskInterface._global_mapping
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention, as_sdpa)
        monkeypatch.setitem(masks, attention, masks["sdpa"])
    with torch.no_grad():
        found = RowDecoder(model, *given, capture=_captured).run()
    same(found, expected)
    assert NAME in seen
    # Prefills come before steps, and later ones between them.
    assert (attention in seen) == (attention == "flash_attention_2")
    assert model.config._attn_implementation == attention


def test_a_step_that_cannot_be_captured_is_free_from_then_on() -> None:
    model, given = causal(small_qwen2()), (PROMPTS, range(len(PROMPTS)), Sampling(25), MOST, STOPS, CPU, 4)
    with torch.no_grad():
        expected = RowDecoder(model, *given).run()
    tried: list[int] = []

    def refused(step: Any) -> Any:
        tried.append(len(step()))  # it ran once, beside the stream
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder = RowDecoder(model, *given, capture=refused)
    with torch.no_grad(), pytest.warns(ShardNotice, match=r"could not be captured .*stream is capturing"):
        found = decoder.run()
    same(found, expected)
    assert tried == [4]
    again = RowDecoder(model, *given, capture=refused)  # as the next batch has it
    assert again.capture is None
    with torch.no_grad():
        same(again.run(), expected)
    assert tried == [4]

    def full(step: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with torch.no_grad(), pytest.raises(torch.cuda.OutOfMemoryError):
        RowDecoder(causal(small_qwen2()), *given, capture=full).run()


def test_rows_that_have_ended_stay_where_the_model_has_positions() -> None:
    """They are computed with until the next layout, and their columns go on; on a GPU a position too many ends the process."""
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model, prompts, most = causal(config), [list(range(3, 53)), list(range(3, 8)), list(range(4, 9))], [12, 55, 1]
    made = []
    for capture in (None, _captured):
        decoder = RowDecoder(model, prompts, range(3), Sampling(60, temperature=0.0), most, (), CPU, 3, capture)
        assert decoder.capture is capture
        with torch.no_grad():
            made.append(decoder.run())
    same(made[1], made[0])
    assert [len(response.token_ids) for response in made[0]] == most


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rope asks"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, None),
    ],
)
def test_models_that_ask_the_gpu_are_not_captured(changed: dict[str, Any], why: str | None) -> None:
    decoder = partial(RowDecoder, causal(small_qwen2(**changed)), [[5]], [0], Sampling(9), [9], (), CPU, 1, _captured)
    if why is None:
        assert decoder().capture is _captured
        return
    with pytest.warns(ShardNotice, match=why):
        assert decoder().capture is None


@pytest.mark.parametrize(("implementation", "why"), [("eager", "experts ask"), ("grouped_mm", None)])
def test_experts_one_by_one_are_not_captured(
    implementation: str, why: str | None, small_config: Callable[..., Any]
) -> None:
    model = causal(small_config("qwen3_moe"))
    model.config._experts_implementation = implementation
    found = why_it_asks(model)
    assert (found is None) == (why is None)
    assert found is None or why in found  # type: ignore[operator]


def test_the_cache_is_given_back_when_the_last_response_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python's collector comes by: it is as large as a model. And cuDNN's attention is left out until then."""
    model, made, seen = causal(small_qwen2()), [], []
    monkeypatch.setattr(generation, "capture_on", lambda device: _captured)
    init = RowsCache.__init__

    def noted(self: RowsCache, like: Any) -> None:
        init(self, like)
        made.append(weakref.ref(self))

    monkeypatch.setattr(RowsCache, "__init__", noted)
    model.lm_head.register_forward_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    )
    gc.collect()
    gc.disable()
    try:
        given: Any = {"pad_token_id": 0, "eos_token_ids": [2], "device": CPU}
        assert len(generate(model, PROMPTS, range(len(PROMPTS)), Sampling(25), **given)) == len(PROMPTS)
        assert [cache() for cache in made] == [None]
    finally:
        gc.enable()
    assert set(seen) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_graphs_are_for_gpus_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture_on(CPU) is None
    made: Any = capture_on(torch.device("cuda", 1))
    assert (made.func, made.keywords) == (capture_on_gpu, {"device": torch.device("cuda", 1)})
    seen: list[Any] = []
    monkeypatch.setattr(generation, "capture_on", lambda device: _captured)
    monkeypatch.setattr(RowDecoder, "run", lambda self: seen.append(self.capture) or [])
    for eager in (False, True):
        generate(
            causal(small_qwen2()), [[5]], [0], Sampling(9), pad_token_id=0, eos_token_ids=[2], device=CPU,
            enforce_eager=eager,
        )  # fmt: skip
    assert seen == [_captured, None]


def test_steps_that_cannot_have_a_fixed_shape_are_said(small_config: Callable[..., Any]) -> None:
    for kind, fields, why in (
        ("gemma2", {"sliding_window": 8}, "it has layers that see a window"),
        ("falcon", {}, "it makes its masks or positions itself"),
    ):
        given = (PROMPTS, range(len(PROMPTS)), Sampling(25), MOST, STOPS, CPU, 4, lambda step: None)
        with pytest.warns(ShardNotice, match=why):
            assert RowDecoder(causal(small_config(kind, **fields)), *given).capture is None  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_prompts_cost_least(seed: int) -> None:
    drawn = random.Random(seed)
    lengths = sorted((drawn.choice((1, 2, 3, 10, 40)) for _ in range(7)), reverse=True)

    def cost(groups: list[range]) -> int:
        return sum(lengths[group.start] * len(group) + 11 for group in groups)

    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 7), n) for n in range(7))
    every = [[range(a, b) for a, b in itertools.pairwise((0, *cut, 7))] for cut in cuts]
    found = prefill_groups(lengths, forward_tokens=11)
    assert [i for group in found for i in group] == list(range(7))
    assert cost(found) == min(map(cost, every))


def test_a_group_is_divided_by_its_padded_tokens() -> None:
    assert divided(range(2, 9), 30, 100) == [range(2, 5), range(5, 8), range(8, 9)]
    assert divided(range(2), 30, 10) == [range(0, 1), range(1, 2)]


def test_rows_are_moved_laid_out_anew_and_kept_within_their_window() -> None:
    whole, window = RowsLayer(None), RowsLayer(3)
    prefilled = DynamicCache()
    columns = torch.arange(4.0).reshape(1, 1, 4, 1)
    prefilled.update(columns + torch.tensor([10.0, 20.0]).reshape(2, 1, 1, 1), columns.expand(2, 1, 4, 1) * -1, 0)
    for layer in (whole, window):
        layer.relay(3, 5, 2)
        layer.add(prefilled.layers[0], torch.tensor([1, 0, 1]))
    # A prompt of 4 columns that ends at the fifth; of the window two columns are kept.
    assert whole.keys[:, 0, :5, 0].tolist() == [[0, 20, 21, 22, 23], [0, 10, 11, 12, 13], [0, 20, 21, 22, 23]]
    assert window.keys[:, 0, :2, 0].tolist() == [[22, 23], [12, 13], [22, 23]]
    assert (whole.get_mask_sizes(1), window.get_mask_sizes(1)) == ((6, 0), (3, 3))
    new = torch.tensor([7.0, 8.0, 9.0]).reshape(3, 1, 1, 1)
    assert whole.update(new, new)[0][:, 0, :, 0].tolist() == [
        [0, 20, 21, 22, 23, 7], [0, 10, 11, 12, 13, 8], [0, 20, 21, 22, 23, 9],
    ]  # fmt: skip
    assert window.update(new, new)[0][:, 0, :, 0].tolist() == [[22, 23, 7], [12, 13, 8], [22, 23, 9]]
    for layer in (whole, window):
        layer.move(2, 0)
        layer.rows = 2
        layer.relay(2, 4, 1)
    assert whole.keys[:, 0, :, 0].tolist() == [[21, 22, 23, 9, 0], [11, 12, 13, 8, 0]]
    assert whole.values[0, 0, :, 0].tolist() == [-1, -2, -3, 9, 0]
    assert window.keys[:, 0, :, 0].tolist() == [[23, 9, 0], [13, 8, 0]]
    assert whole.nbytes == 2 * 2 * 5 * 4


def test_the_windows_of_the_cache_are_the_configurations(small_config: Callable[..., Any]) -> None:
    cache = RowsCache(DynamicCache(config=small_config("gemma2", sliding_window=8)))
    assert [layer.window for layer in cache.layers] == [8, None, 8]
    assert cache.is_sliding == [True, False, True]


@pytest.mark.parametrize("masked", [False, True])
def test_heads_that_share_keys_attend_as_if_each_had_its_own(masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 4)
    mask = torch.rand(3, 1, 1, 5) > 0.4 if masked else None
    if mask is not None:
        mask[..., -1] = True
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    found, _ = one_token_attention(module, query, key, value, mask, scaling=0.3)
    weights = 0.3 * query @ key.repeat_interleave(3, dim=1).transpose(2, 3)
    weights = weights if mask is None else weights.masked_fill(~mask, float("-inf"))
    expected = weights.softmax(-1) @ value.repeat_interleave(3, dim=1)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    assert found.shape == (3, 1, 6, 4)


def test_only_sdpa_gives_way_and_comes_back(small_config: Callable[..., Any]) -> None:
    for implementation, inside in (("sdpa", NAME), ("eager", "eager")):
        model = causal(small_config("qwen2", attn_implementation=implementation))
        seen = []
        try:
            with grouped_decoding(model):
                seen.append(model.config._attn_implementation)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            seen.append(model.config._attn_implementation)
        assert seen == [inside, implementation]
