"""The server of the hf rollout, before a stand-in for the training worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.common.seeds import derive_seed
from verl_shard.verl_plugin.rollout.adapter import generate_in_worker
from verl_shard.verl_plugin.rollout.generate import Response, Sampling
from verl_shard.verl_plugin.rollout.server import HFServer


@dataclass
class Call:
    prompts: list[tuple[int, ...]]
    seeds: list[int]
    sampling: Sampling
    pad: int
    eos: list[int]
    most: list[int]
    max_rows: int
    eager: bool


@dataclass
class Worker:
    """Answers a prompt with its last token and the request's seed; a call may be held back or fail."""

    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None
    release: asyncio.Event | None = None

    @property
    def __ray_call__(self) -> Any:
        return SimpleNamespace(remote=self._generate)

    async def _generate(
        self, function: Any, prompts: Sequence[Any], seeds: Sequence[int], sampling: Sampling, pad: int, eos: Any,
        most: Sequence[int], max_rows: int, eager: bool,
    ) -> list[Response]:  # fmt: skip
        assert function is generate_in_worker
        self.calls.append(Call(list(prompts), list(seeds), sampling, pad, list(eos), list(most), max_rows, eager))
        if self.release is not None:
            await self.release.wait()
        if self.error is not None:
            raise self.error
        return [Response([prompt[-1], seed], [-0.5, -1.5]) for prompt, seed in zip(prompts, seeds, strict=True)]


def _server(worker: Worker, *, eos: Any = 2, pad: int | None = 0, positions: int = 50, **config: Any) -> HFServer:
    settings = {"seed": 7, "response_length": 16, "max_model_len": None, "max_num_seqs": 100, "ignore_eos": False}
    settings["enforce_eager"] = False
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=pad, eos_token_id=9),
        generation_config=SimpleNamespace(eos_token_id=eos),
        hf_config=SimpleNamespace(max_position_embeddings=positions),
    )
    return HFServer(SimpleNamespace(**{**settings, **config}), model, worker)


async def _ask(server: HFServer, prompts: Sequence[list[int]], **params: Any) -> list[Any]:
    return await asyncio.gather(
        *(server.generate(str(number), prompt, params) for number, prompt in enumerate(prompts)), return_exceptions=True
    )


def test_requests_that_come_together_are_one_batch_in_a_fixed_order() -> None:
    worker = Worker()

    async def run() -> list[Any]:
        return await _ask(_server(worker), [[5, 6, 8], [4], [5, 6, 7], [3]])

    answers = asyncio.run(run())
    (call,) = worker.calls
    assert call.prompts == [(3,), (4,), (5, 6, 7), (5, 6, 8)]
    assert [answer.token_ids[0] for answer in answers] == [8, 4, 7, 3]
    assert (call.pad, call.eos, call.sampling) == (0, [2], Sampling(16))
    assert (call.most, call.max_rows) == ([16] * 4, 100)


def test_requests_that_come_while_a_batch_runs_are_the_next_batch() -> None:
    worker = Worker()

    async def run() -> list[Any]:
        worker.release = asyncio.Event()
        server = _server(worker)
        first = asyncio.create_task(_ask(server, [[1], [2]]))
        while not worker.calls:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(_ask(server, [[3]]))
        await asyncio.sleep(0.05)
        assert len(worker.calls) == 1
        worker.release.set()
        return [*(await first), *(await second)]

    answers = asyncio.run(run())
    assert [call.prompts for call in worker.calls] == [[(1,), (2,)], [(3,)]]
    assert [answer.token_ids[0] for answer in answers] == [1, 2, 3]


def test_a_batch_has_one_kind_of_sampling_and_the_worker_keeps_to_max_num_seqs() -> None:
    worker = Worker()

    async def run() -> None:
        server = _server(worker, max_num_seqs=2, enforce_eager=True)
        await asyncio.gather(_ask(server, [[1], [2], [3]]), _ask(server, [[4]], temperature=0.0))

    asyncio.run(run())
    assert sorted(map(len, (call.prompts for call in worker.calls))) == [1, 3]
    assert [(call.max_rows, call.eager) for call in worker.calls] == [(2, True)] * 2
    assert {prompt: call.sampling.temperature for call in worker.calls for prompt in call.prompts} == {
        (1,): 1.0, (2,): 1.0, (3,): 1.0, (4,): 0.0,
    }  # fmt: skip


def test_requests_of_different_lengths_share_a_batch() -> None:
    worker = Worker()

    async def run() -> None:
        server = _server(worker, positions=20)
        await asyncio.gather(_ask(server, [[1] * 15, [2]]), _ask(server, [[3]], max_tokens=3))

    asyncio.run(run())
    (call,) = worker.calls
    assert [(len(prompt), most) for prompt, most in zip(call.prompts, call.most, strict=True)] == [
        (1, 16),
        (1, 3),
        (15, 5),
    ]
    assert call.sampling == Sampling(16)


def test_n_responses_to_one_prompt_have_different_seeds_that_come_back_with_the_step() -> None:
    worker = Worker()

    async def run() -> list[list[int]]:
        server, seeds = _server(worker), []
        for step in (3, 4, 3):
            await server.set_global_steps(step)
            seeds.append(sorted(answer.token_ids[1] for answer in await _ask(server, [[5, 6]] * 4 + [[5]])))
        return seeds

    first, second, again = asyncio.run(run())
    expected = [derive_seed(7, 3, number, 5, 6) for number in range(4)] + [derive_seed(7, 3, 0, 5)]
    assert first == again == sorted(expected)
    assert len({*first, *second}) == 10


def test_seeds_do_not_depend_on_the_order_of_arrival_among_other_prompts() -> None:
    async def run(prompts: list[list[int]]) -> dict[tuple[int, ...], set[int]]:
        worker = Worker()
        await _ask(_server(worker), prompts)
        found: dict[tuple[int, ...], set[int]] = {}
        for call in worker.calls:
            for prompt, seed in zip(call.prompts, call.seeds, strict=True):
                found.setdefault(prompt, set()).add(seed)
        return found

    prompts = [[1, 2], [3], [1, 2], [4, 4], [3]]
    assert asyncio.run(run(prompts)) == asyncio.run(run(prompts[::-1]))


def test_an_exception_reaches_every_request_of_the_batch_and_no_later_one() -> None:
    worker = Worker(error=RunError("out of memory"))

    async def run() -> tuple[list[Any], list[Any]]:
        server = _server(worker)
        failed = await _ask(server, [[1], [2], [3]])
        worker.error = None
        return failed, await _ask(server, [[4]])

    failed, later = asyncio.run(run())
    assert failed == [worker_error := failed[0]] * 3
    assert str(worker_error) == "out of memory"
    assert later[0].token_ids[0] == 4


def test_a_request_that_is_given_up_does_not_keep_the_others_from_their_answers() -> None:
    worker = Worker()

    async def run() -> Any:
        worker.release = asyncio.Event()
        server = _server(worker)
        given_up = asyncio.create_task(server.generate("a", [1], {}))
        other = asyncio.create_task(server.generate("b", [2], {}))
        while not worker.calls:
            await asyncio.sleep(0.005)
        given_up.cancel()
        await asyncio.sleep(0)
        worker.release.set()
        return await asyncio.wait_for(other, 5)

    assert asyncio.run(run()).token_ids[0] == 2


@pytest.mark.parametrize("failing", [False, True])
def test_sleep_returns_when_every_request_is_answered(failing: bool) -> None:
    worker = Worker(error=RunError("no") if failing else None)

    async def run() -> None:
        worker.release = asyncio.Event()
        server = _server(worker)
        await server.sleep()
        asked = asyncio.create_task(_ask(server, [[1]]))
        while not worker.calls:
            await asyncio.sleep(0.005)
        asleep = asyncio.create_task(server.sleep())
        await asyncio.sleep(0.05)
        assert not asleep.done()
        worker.release.set()
        await asyncio.wait_for(asleep, 5)
        assert (await asyncio.wait_for(asked, 1)) != []
        await server.wake_up(tags=["weights"])

    asyncio.run(run())


def test_a_response_has_at_most_the_positions_that_are_left() -> None:
    worker = Worker()
    asyncio.run(_ask(_server(worker, positions=20), [[1] * 15]))
    asyncio.run(_ask(_server(worker, positions=20, max_model_len=18), [[1] * 15]))
    asyncio.run(_ask(_server(worker, positions=20), [[1] * 15], max_tokens=2))
    assert [call.sampling.max_new_tokens for call in worker.calls] == [5, 3, 2]


@pytest.mark.parametrize("length", [20, 21])
def test_a_prompt_that_leaves_no_room_is_refused(length: int) -> None:
    (error,) = asyncio.run(_ask(_server(Worker(), positions=20), [[1] * length]))
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"prompt = {length} tokens: the model's 20 positions leave no room for a response.")


def test_pictures_and_unknown_parameters_are_refused() -> None:
    async def run() -> None:
        server = _server(Worker())
        with pytest.raises(ConfigError, match="image_data, audio_data"):
            await server.generate("a", [1], {}, image_data=["x"], audio_data=["y"])
        with pytest.raises(ConfigError, match="min_p"):
            await server.generate("a", [1], {"min_p": 0.1})
        assert (await server.generate("a", [1], {}, image_data=None, mm_processor_kwargs={})).token_ids[0] == 1

    asyncio.run(run())


def test_log_probs_are_given_to_who_asks_and_steps_to_everybody() -> None:
    async def run() -> tuple[Any, Any]:
        server = _server(Worker())
        await server.set_global_steps(6)
        return (await _ask(server, [[1]], logprobs=True))[0], (await _ask(server, [[1]]))[0]

    asked, other = asyncio.run(run())
    assert asked.log_probs == [-0.5, -1.5]
    assert other.log_probs is None
    assert asked.stop_reason == "completed"
    assert asked.extra_fields == {"global_steps": 6}


@pytest.mark.parametrize(
    ("eos", "pad", "expected"), [([2, 3], 0, ([2, 3], 0)), (None, 0, ([9], 0)), (2, None, ([2], 2))], ids=str
)
def test_special_tokens(eos: Any, pad: int | None, expected: tuple[list[int], int]) -> None:
    server = _server(Worker(), eos=eos, pad=pad)
    assert (server.eos, server.pad) == expected
