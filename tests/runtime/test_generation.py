"""Generation: transformers' greedy search token for token, and samples that depend on their request alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from verl_shard.common.errors import ConfigError
from verl_shard.runtime.generation import generate
from verl_shard.runtime.generation_sampling import Response, Sampling, choose

PAD, EOS, VOCAB = 0, 2, 40
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9], [3, 3, 8, 11, 4, 30, 12], [21, 17, 33, 20]]


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    """A random model whose distributions are neither flat nor peaked on one token."""
    kind = {"qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM)}.get(
        request.param, (transformers.LlamaConfig, transformers.LlamaForCausalLM)
    )
    config = kind[0](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.25, tie_word_embeddings=False,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    return kind[1](config).eval()


def _generate(
    model: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int], eos: Sequence[int] = (EOS,), **sampling: Any
) -> list[Response]:
    options = Sampling(**{"max_new_tokens": 12, **sampling})
    return generate(model, prompts, seeds, options, pad_token_id=PAD, eos_token_ids=eos, device=CPU)


def _expected_log_probs(
    model: Any,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> list[float]:
    """From one forward without cache and padding, by the definitions of the four parameters."""
    ids = [*prompt, *response]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    result = []
    for place, token in enumerate(response, len(prompt)):
        row = logits[place - 1].clone()
        for seen in set(ids[:place]):
            row[seen] = row[seen] / repetition_penalty if row[seen] > 0 else row[seen] * repetition_penalty
        row /= temperature
        ranked = row.argsort(descending=True).tolist()
        kept = ranked[:top_k] if top_k > 0 else ranked
        probabilities = torch.softmax(row[kept], dim=0).tolist()
        mass, nucleus = 0.0, []
        for candidate, probability in zip(kept, probabilities, strict=True):
            nucleus.append(candidate)
            mass += probability
            if mass >= top_p:
                break
        assert token in nucleus
        result.append(float(row[token] - torch.logsumexp(row[nucleus], dim=0)))
    return result


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_is_what_transformers_generates(prompt: list[int], model: Any) -> None:
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=PAD
    )[0, len(prompt) :].tolist()
    (response,) = _generate(model, [prompt], [0], temperature=0.0)
    assert response.token_ids == expected
    torch.testing.assert_close(
        torch.tensor(response.log_probs),
        torch.tensor(_expected_log_probs(model, prompt, expected)),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9), st.integers(0, 2**63 - 1)),
        min_size=1, max_size=6,
    ),
    order=st.randoms(use_true_random=False),
    at_once=st.integers(1, 6),
)  # fmt: skip
def test_a_response_is_the_same_alone_and_in_any_batch(
    requests: list[tuple[list[int], int]], order: Any, at_once: int, model: Any
) -> None:
    def run(batch: list[tuple[list[int], int]]) -> list[Response]:
        prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
        return generate(
            model, prompts, seeds, Sampling(12), pad_token_id=PAD, eos_token_ids=[EOS], device=CPU, max_rows=at_once
        )

    together = run(requests)
    places = list(range(len(requests)))
    order.shuffle(places)
    shuffled = run([requests[place] for place in places])
    for place, response in zip(places, shuffled, strict=True):
        (alone,) = run([requests[place]])
        for other in (together[place], response):
            assert other.token_ids == alone.token_ids
            torch.testing.assert_close(
                torch.tensor(other.log_probs), torch.tensor(alone.log_probs), atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.6},
        {"top_k": 3},
        {"top_p": 0.6},
        {"repetition_penalty": 1.5},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_sampling_distribution(sampling: dict[str, Any], model: Any) -> None:
    for prompt, response in zip(PROMPTS, _generate(model, PROMPTS, [1, 2, 3, 4], **sampling), strict=True):
        assert len(response.token_ids) == len(response.log_probs)
        torch.testing.assert_close(
            torch.tensor(response.log_probs),
            torch.tensor(_expected_log_probs(model, prompt, response.token_ids, **sampling)),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip


@pytest.mark.parametrize("seeds", [range(20_000), range(2**62, 2**62 + 20_000)], ids=["small", "large"])
def test_first_tokens_are_as_frequent_as_the_softmax_says(seeds: range, model: Any) -> None:
    prompt = PROMPTS[0]
    responses = _generate(model, [prompt] * len(seeds), seeds, max_new_tokens=1, temperature=2.0)
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / 2, dim=0) * len(seeds)
    observed = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=VOCAB).double()
    rare = expected < 8
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert freedom >= 8
    # The chi-square value that a right sampler exceeds once in 1,000 times (Wilson and Hilferty's formula).
    critical = freedom * (1 - 2 / (9 * freedom) + 3.090 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < critical


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, [2, 1, 3]), (1 - 2**-24, [4, 1, 3])])
def test_the_ends_of_the_uniform_numbers_choose_no_token_that_was_filtered(uniform: float, expected: list[int]) -> None:
    out = float("-inf")
    scores = torch.tensor(
        [[out, out, 1.0, 0.0, 1.0, out], [out, 5.0, out, out, out, out], [out, out, out, 0.1, out, out]]
    )
    assert choose(scores, torch.full((3,), uniform))[0].tolist() == expected


def test_evenly_spread_uniform_numbers_choose_each_token_as_often_as_it_is_likely() -> None:
    count = 10_000
    scores = torch.linspace(-3, 2, 23)[torch.randperm(23, generator=torch.Generator().manual_seed(0))]
    chosen, _ = choose(scores.expand(count, -1), (torch.arange(count) + 0.5) / count)
    expected = torch.softmax(scores.double(), dim=0) * count
    assert (torch.bincount(chosen, minlength=23) - expected).abs().max() < 1.5


def test_seeds_tell_responses_apart_and_bring_them_back(model: Any) -> None:
    first = _generate(model, [PROMPTS[0]] * 20, range(20))
    assert len({tuple(response.token_ids) for response in first}) > 10
    torch.rand(7)
    assert _generate(model, [PROMPTS[0]] * 20, range(20)) == first


def test_the_global_random_state_is_neither_read_nor_moved(model: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = _generate(model, PROMPTS, [1, 2, 3, 4])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert _generate(model, PROMPTS, [1, 2, 3, 4]) == first


def test_eos_ends_a_response_and_is_in_it(model: Any) -> None:
    free = _generate(model, PROMPTS, [1, 2, 3, 4], eos=[EOS], ignore_eos=True)
    assert [len(response.token_ids) for response in free] == [12] * 4
    # Two tokens that were sampled, at a place where neither had come before.
    stops = [free[0].token_ids[4], free[2].token_ids[7]]
    for response, whole in zip(_generate(model, PROMPTS, [1, 2, 3, 4], eos=stops), free, strict=True):
        end = min((whole.token_ids.index(stop) + 1 for stop in stops if stop in whole.token_ids), default=12)
        assert response.token_ids == whole.token_ids[:end]
        assert len(response.log_probs) == end


def test_ignored_eos_tokens_are_ordinary_tokens(model: Any) -> None:
    model.generation_config.eos_token_id = list(range(3, VOCAB))
    try:
        responses = _generate(model, PROMPTS, [1, 2, 3, 4], eos=range(3, VOCAB), ignore_eos=True)
    finally:
        model.generation_config.eos_token_id = EOS
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert len(response.token_ids) == 12
        torch.testing.assert_close(
            torch.tensor(response.log_probs),
            torch.tensor(_expected_log_probs(model, prompt, response.token_ids)),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip


@pytest.mark.parametrize(
    "defaults",
    [
        {"do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.2, "repetition_penalty": 3.0},
        {"do_sample": True, "min_p": 0.9, "typical_p": 0.1},
        {"num_beams": 4},
        {"no_repeat_ngram_size": 1, "suppress_tokens": list(range(3, 30)), "min_new_tokens": 12},
        {"bad_words_ids": [[4]], "forced_eos_token_id": 7, "exponential_decay_length_penalty": (1, 1.5)},
        {"guidance_scale": 2.0, "begin_suppress_tokens": list(range(3, 30)), "min_length": 30},
        {"max_length": 2},
    ],
    ids=lambda defaults: "-".join(defaults),
)
def test_the_folders_own_defaults_are_not_added(
    defaults: dict[str, Any], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _generate(model, PROMPTS, [1, 2, 3, 4])
    monkeypatch.setattr(
        model, "generation_config", transformers.GenerationConfig(**defaults, eos_token_id=EOS, pad_token_id=PAD)
    )
    assert _generate(model, PROMPTS, [1, 2, 3, 4]) == expected


def test_the_training_mode_is_put_back_even_after_a_fault(model: Any) -> None:
    model.train()
    try:
        _generate(model, PROMPTS, [1, 2, 3, 4])
        assert model.training
        with pytest.raises(IndexError):
            _generate(model, [[VOCAB + 5]], [1])
        assert model.training
    finally:
        model.eval()


def test_an_unknown_sampling_parameter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sampling_params = best_of, min_p: the hf rollout does not have it"):
        Sampling.from_request({"min_p": 0.1, "temperature": 1.0, "best_of": 2}, limit=5, ignore_eos=False)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, Sampling(8)),
        ({"temperature": 0, "top_k": -1, "top_p": 1, "logprobs": True}, Sampling(8, temperature=0.0)),
        ({"top_k": 0}, Sampling(8)),
        ({"top_k": 5, "top_p": 0.5, "repetition_penalty": 1.1}, Sampling(8, 1.0, 5, 0.5, 1.1)),
        ({"max_tokens": 3}, Sampling(3)),
        ({"max_new_tokens": 100}, Sampling(8)),
    ],
    ids=str,
)
def test_requests_are_read_as_verl_writes_them(params: dict[str, Any], expected: Sampling) -> None:
    assert Sampling.from_request(params, limit=8, ignore_eos=False) == expected


def test_a_bfloat16_model_samples_too(small_config: Callable[..., Any]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(small_config("qwen3"), dtype=torch.bfloat16).eval()
    (response,) = _generate(model, [PROMPTS[0]], [1], ignore_eos=True)
    assert len(response.token_ids) == 12
    assert all(log_prob <= 0 for log_prob in response.log_probs)
