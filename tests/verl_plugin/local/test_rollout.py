"""The local rollout beside the server of the `hf` rollout: the same requests in the same batches with the same seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.local import rollout as module
from verl_shard.verl_plugin.local.group import Processes
from verl_shard.verl_plugin.local.rollout import Rollout
from verl_shard.verl_plugin.rollout.generate import Response, Sampling
from verl_shard.verl_plugin.rollout.server import HFServer

Call = tuple[list[tuple[int, ...]], list[int], Sampling, int, list[int], list[int], int, bool]
SETTINGS: dict[str, Any] = {
    "seed": 7, "response_length": 16, "prompt_length": 9, "max_model_len": None, "max_num_seqs": 3, "ignore_eos": False,
    "enforce_eager": True,
    "temperature": 0.8, "top_k": -1, "top_p": 0.9, "n": 2, "calculate_log_probs": True,
    "val_kwargs": {"temperature": 0, "top_k": -1, "top_p": 1.0, "n": 1},
}  # fmt: skip
MODEL = SimpleNamespace(
    tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=9),
    generation_config=SimpleNamespace(eos_token_id=2),
    hf_config=SimpleNamespace(max_position_embeddings=50, model_type="none"),
    processor=None,
)
PROMPTS = [[5, 6, 8], [4], [5, 6, 7], [4]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What is asked of the model; it answers a prompt with its seed."""
    made: list[Call] = []

    def generate(
        _: Any, prompts: Any, seeds: Any, sampling: Sampling, pad: int, eos: Any, most: Any, rows: int, eager: bool
    ) -> list[Response]:
        made.append((list(prompts), list(seeds), sampling, pad, list(eos), list(most), rows, eager))
        return [Response([seed], [-0.5]) for seed in seeds]

    monkeypatch.setattr(module, "generate_in_worker", generate)
    return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """make(processes, ...): a rollout whose prompts are token ids already."""
    builder = SimpleNamespace(build_initial_tokens=lambda messages: list(messages))
    monkeypatch.setattr(module, "create_continuous_token_builder", lambda *_, **__: builder)

    def rollout(processes: Processes = Processes(0, 1, 0), **changed: Any) -> Rollout:  # noqa: B008
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": {**SETTINGS, **changed}}, "data": {}})
        return Rollout(config, MODEL, processes)

    return rollout


def rows(prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    return [{"raw_prompt": prompt} for prompt in prompts]


def requests(calls: list[Call]) -> list[tuple[tuple[int, ...], int]]:
    """The prompts that were asked, with their seeds."""
    return sorted(pair for prompts, seeds, *_ in calls for pair in zip(prompts, seeds, strict=True))


def test_it_asks_what_the_server_asks(make: Any, calls: list[Call]) -> None:
    served: list[Call] = []

    async def remote(
        _: Any, prompts: Any, seeds: Any, sampling: Sampling, pad: int, eos: Any, most: Any, rows: int, eager: bool
    ) -> list[Response]:
        served.append((list(prompts), list(seeds), sampling, pad, list(eos), list(most), rows, eager))
        return [Response([seed], [-0.5]) for seed in seeds]

    worker = SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))
    local, steps = make(), (0, 1)

    async def serve() -> list[list[int]]:
        server, answers = HFServer(SimpleNamespace(**SETTINGS), MODEL, worker), []
        for step in steps:
            await server.set_global_steps(step)
            asked = [prompt for prompt in PROMPTS for _ in range(2)]
            params = {"temperature": 0.8, "top_p": 0.9, "top_k": -1}
            found = await asyncio.gather(*(server.generate("", prompt, params) for prompt in asked))
            answers += [answer.token_ids for answer in found]
        return answers

    expected = asyncio.run(serve())
    found = []
    for step in steps:
        local.set_steps_done(step)
        found += [list(sample.response) for sample in local.generate(rows(PROMPTS))]
    assert found == expected
    assert calls == served
    assert [call[-2:] for call in calls] == [(SETTINGS["max_num_seqs"], SETTINGS["enforce_eager"])] * 2
    # No two samples are drawn with one seed, in a step or in the next.
    assert len({seed for _, seeds, *_ in calls for seed in seeds}) == 16


def test_several_processes_ask_together_what_one_asks(
    make: Any, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [sample.response for sample in make().generate(rows(PROMPTS))]
    asked = requests(calls)
    calls.clear()
    shares: list[list[Response]] = []
    monkeypatch.setattr(Processes, "gather", lambda _, work: shares.append(work()) or [Response([0], [0.0])] * 8)
    for rank in (0, 1):
        make(Processes(rank, 2, rank)).generate(rows(PROMPTS))
    assert list(map(len, shares)) == [4, 4]
    assert requests(calls) == asked
    assert sorted(response.token_ids[0] for share in shares for response in share) == sorted(r[0] for r in one)


def test_samples_of_a_prompt_stand_together_and_share_a_uid(make: Any, calls: list[Call]) -> None:
    samples = make().generate(rows([[5], [4], [5]]))
    assert [sample.prompt for sample in samples] == [(5,), (5,), (4,), (4,), (5,), (5,)]
    uids = [sample.uid for sample in samples]
    assert [uids[0], uids[2], uids[4]] == [uids[1], uids[3], uids[5]]
    assert len(set(uids)) == 3
    assert samples[0].log_probs == (-0.5,)


def test_validation_has_its_own_sampling(make: Any, calls: list[Call]) -> None:
    assert len(make(calculate_log_probs=False).generate(rows([[5], [4]]), validate=True)) == 2
    assert calls[0][2] == Sampling(16, temperature=0.0)


def test_a_prompt_that_is_too_long(make: Any, calls: list[Call]) -> None:
    with pytest.raises(ConfigError, match="10 tokens: max_prompt_length is 9"):
        make().generate(rows([list(range(10))]))
    with pytest.raises(ConfigError, match="with a response of 48 that is more than the model's 50 positions"):
        make(response_length=48).generate(rows([[1, 2, 3]]))
    assert calls == []
