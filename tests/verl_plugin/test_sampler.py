"""The sampler, over a TransferQueue in memory: what verl's own takes, in the order of the data, and no failure unseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.verl_plugin.failures import PARTITION
from verl_shard.verl_plugin.sampler import (
    LONGEST_WAIT_S,
    SHORTEST_WAIT_S,
    make_sampler,
)

Tags = dict[str, dict[str, Any]]


class FakeQueue:
    """What a replay buffer calls of transfer_queue: tags by partition and key, and a reward for each sample."""

    def __init__(self, partitions: dict[str, Tags], rewards: dict[str, float] | None = None) -> None:
        self.partitions = {name: {key: dict(tag) for key, tag in tags.items()} for name, tags in partitions.items()}
        self.rewards = rewards or {}
        self.cleared: list[str] = []

    def kv_list(self) -> dict[str, Tags]:
        return {name: dict(tags) for name, tags in self.partitions.items()}

    def kv_clear(self, partition_id: str, keys: Iterable[str]) -> None:
        for key in keys:
            self.cleared.append(key)
            self.partitions[partition_id].pop(key, None)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert select_fields == ["rm_scores"]
        del partition_id
        return {"rm_scores": [torch.tensor([0.0, self.rewards[key]]) for key in keys]}


def prompt(status: str, step: int = 1) -> dict[str, Any]:
    return {"is_prompt": True, "status": status, "global_steps": step}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeQueue]:
    def make(partitions: dict[str, Tags], rewards: dict[str, float] | None = None) -> FakeQueue:
        fake = FakeQueue(partitions, rewards)
        monkeypatch.setattr(replay_buffer, "tq", fake)
        return fake

    return make


class Trainer:
    """As much of verl's trainer as a sampler is given: its configuration, and the method that submits new prompts."""

    def __init__(
        self,
        metric: str | None = None,
        *,
        refill: bool = False,
        batch: int = 4,
        gen_batch: int | None = None,
        inflight: int = 2,
    ) -> None:
        self.config = OmegaConf.create(
            {
                "trainer": {"v1": {"sampler": {"sync_refill_failed_groups": refill}}},
                "data": {"train_batch_size": batch, "gen_batch_size": gen_batch},
                "algorithm": {"filter_groups": {"enable": metric is not None, "max_inflight_gen_batches": inflight}},
            }
        )
        self.metric = metric
        self.refills: list[int] = []
        self.on_refill: Callable[[int], None] = lambda count: None

    def _resolve_filter_groups_metric(self) -> str | None:
        return self.metric

    def refill(self, count: int) -> None:
        self.refills.append(count)
        self.on_refill(count)


COMMON: dict[str, Any] = {
    "trainer_config": OmegaConf.create({}), "max_off_policy_threshold": None, "max_off_policy_strategy": "drop",
}  # fmt: skip


def _make(trainer: Trainer, mode: str = "sync", **options: Any) -> Any:
    return make_sampler(
        **{"trainer_mode": mode, "sampler_kwargs": None, "refill_fn": trainer.refill, **COMMON, **options}
    )


def test_samples_come_in_the_order_of_the_data_then_of_sessions(queue: Callable[..., FakeQueue]) -> None:
    # "b" is first in the data; sessions end in any order, and the tenth is not before the second.
    train: Tags = {"b": prompt("finished"), "z": prompt("finished"), "a": prompt("finished"), "c": prompt("running")}
    train |= {key: {"n": key} for key in ("a_1_0", "z_10_0", "b_0_1", "z_2_0", "a_0_0", "b_0_0", "c_0_0", "b_1_0")}
    fake = queue({"train": train, "val": {"v": prompt("finished"), "v_0_0": {}}})
    batch, _ = _make(Trainer()).sample(1, "train", 3)
    assert batch.keys == ["b_0_0", "b_0_1", "b_1_0", "z_2_0", "z_10_0", "a_0_0", "a_1_0"]
    assert batch.tags == [{"n": key} for key in batch.keys]
    assert batch.partition_id == "train"
    assert fake.cleared == ["b", "z", "a"]


def test_older_prompts_come_first_whatever_their_place(queue: Callable[..., FakeQueue]) -> None:
    queue({"train": {"new": prompt("finished", 5), "old": prompt("finished", 4), "new_0_0": {}, "old_0_0": {}}})
    batch, _ = _make(Trainer(), "colocate_async").sample(5, "train", 1)
    assert batch.keys == ["old_0_0"]


def test_it_waits_briefly_until_enough_are_there(
    queue: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = queue({"train": {"a": prompt("running")}})
    now, waits = [100.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds
        if now[0] > 160:
            fake.partitions["train"] = {"a": prompt("finished"), "a_0_0": {}}

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sampler = _make(Trainer())
    batch, _ = sampler.sample(1, "train", 1)
    assert batch.keys == ["a_0_0"]
    assert waits[:3] == [SHORTEST_WAIT_S] * 3
    assert waits == sorted(waits)
    assert max(waits) == LONGEST_WAIT_S == 1.0
    # Each wait is at most a twentieth of what was waited before it.
    assert all(wait <= max(SHORTEST_WAIT_S, 0.0501 * sum(waits[:index])) for index, wait in enumerate(waits))
    assert len(waits) < 200
    # The next batch is not looked for before three quarters of what this one took, and after a second at the latest.
    fake.partitions["train"] = {"b": prompt("running")}
    waits.clear()
    now[0] = 159.99
    sampler.sample(1, "train", 1)
    assert waits[0] == LONGEST_WAIT_S


def test_it_waits_for_most_of_what_the_last_batch_took(
    queue: Callable[..., FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = queue({"train": {"a": prompt("running")}, "val": {"v": prompt("running")}})
    now, waits = [100.0], []
    ready = [100.4]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds
        if now[0] > ready[0]:
            fake.partitions["train"] = {"a": prompt("finished"), "a_0_0": {}}
            fake.partitions["val"] = {"v": prompt("finished"), "v_0_0": {}}

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sampler = _make(Trainer())
    sampler.sample(1, "train", 1)
    took = sum(waits)
    for partition, first in (("val", SHORTEST_WAIT_S), ("train", 0.75 * took)):
        fake.partitions["train"], fake.partitions["val"] = {"a": prompt("running")}, {"v": prompt("running")}
        waits.clear()
        ready[0] = now[0] + 0.4
        sampler.sample(1, partition, 1)
        assert waits[0] == pytest.approx(first), "each partition by its own last batch"


FAILED: Tags = {
    "u_3": {"kind": "reward", "error": "ValueError: no boxed answer", "where": "reward.py:7"},
    "u_1": {"kind": "rollout", "error": "RuntimeError: later", "where": ""},
    "w_0": {"kind": "reward", "error": "ValueError: later", "where": ""},
}


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_failures_stop_the_run_with_the_first_ones_own_message(mode: str, queue: Callable[..., FakeQueue]) -> None:
    queue({"train": {"a": prompt("finished"), "a_0_0": {}}, PARTITION: FAILED})
    message = (
        r"^1 rollout and 2 rewards failed; 0 allowed\. "
        r"The first, a reward: ValueError: no boxed answer \(reward\.py:7\)\. .*max_failures=N$"
    )
    with pytest.raises(RunError, match=message):
        _make(Trainer(), mode).sample(1, "train", 1)


@pytest.mark.parametrize(("allowed", "stops"), [(0, True), (2, True), (3, False), (10, False)])
def test_max_failures_is_how_many_may_fail(allowed: int, stops: bool, queue: Callable[..., FakeQueue]) -> None:
    queue({"train": {"a": prompt("finished"), "a_0_0": {}}, PARTITION: FAILED})
    sampler = _make(Trainer(), sampler_kwargs=OmegaConf.create({"max_failures": allowed}))
    if stops:
        with pytest.raises(RunError, match=rf"^1 rollout and 2 rewards failed; {allowed} allowed\."):
            sampler.sample(1, "train", 1)
    else:
        assert sampler.sample(1, "train", 1)[0].keys == ["a_0_0"]


def test_a_failure_stops_a_wait_that_would_never_end(queue: Callable[..., FakeQueue]) -> None:
    queue({"train": {"a": prompt("failure")}, PARTITION: dict(list(FAILED.items())[:1])})
    with pytest.raises(RunError, match=r"^1 reward failed"):
        _make(Trainer()).sample(1, "train", 5)


def _random_queue(chance: random.Random) -> tuple[dict[str, Tags], dict[str, float]]:
    """Prompts in any state, each of a step of its own, so that verl's own order is determined too; some without samples."""
    train: Tags = {}
    rewards: dict[str, float] = {}
    uids = [f"u{number}" for number in range(chance.randint(8, 14))]
    chance.shuffle(uids)
    for step, uid in enumerate(uids, 1):
        status = chance.choices(["finished", "failure", "running", "pending"], [8, 2, 1, 1])[0]
        train[uid] = prompt(status, step)
        same = chance.random() < 0.4
        for session in range(2 if status == "finished" else chance.randint(0, 1) if status == "failure" else 0):
            train[f"{uid}_{session}_0"] = {"session": session}
            rewards[f"{uid}_{session}_0"] = 1.0 if same else float(session)
    return {"train": train}, rewards


def _outcome(
    make: Callable[[Trainer], Any],
    partitions: dict[str, Tags],
    rewards: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    **trainer: Any,
) -> Any:
    """What came of a sample: a refill adds pending prompts, and a wait ends all that are pending or running."""
    fake = FakeQueue(partitions, rewards)
    monkeypatch.setattr(replay_buffer, "tq", fake)
    owner = Trainer("reward" if trainer.pop("filtered") else None, **trainer)
    train = fake.partitions["train"]

    def refill(count: int) -> None:
        first = sum(owner.refills) - count
        for number in range(first, first + count):
            train[f"new{number}"] = prompt("pending", 100 + number)

    def sleep(_: float) -> None:
        for uid, tag in list(train.items()):
            if tag.get("is_prompt") and tag["status"] in ("pending", "running"):
                tag["status"] = "finished"
                for session in (0, 1):
                    train[f"{uid}_{session}_0"] = {"session": session}
                    fake.rewards[f"{uid}_{session}_0"] = float(session)

    owner.on_refill = refill
    monkeypatch.setattr("time.sleep", sleep)
    batch, metrics = make(owner).sample(15, "train", 4)
    return {
        "samples": dict(zip(batch.keys, batch.tags, strict=True)),
        "metrics": metrics,
        "cleared": sorted(fake.cleared),
        "left": sorted(train),
        "refills": owner.refills,
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("filtered", "refill", "mode"),
    [
        (False, False, "sync"),
        (True, False, "sync"),
        (False, True, "sync"),
        (True, True, "sync"),
        (False, False, "colocate_async"),
        (True, False, "colocate_async"),
    ],
)
def test_groups_are_filtered_and_refilled_as_in_verls_own(
    seed: int, filtered: bool, refill: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions, rewards = _random_queue(random.Random(seed))

    def theirs(trainer: Trainer) -> Any:
        # As PPOTrainer._build_replay_buffer writes it.
        options: dict[str, Any] = {
            **COMMON, "trainer_mode": mode, "sampler_kwargs": None, "refill_fn": trainer.refill,
            "filter_groups_metric": trainer.metric, "sync_refill_failed_groups": refill,
        }  # fmt: skip
        if mode != "sync":
            return ReplayBufferAsync(**options)
        exact = filtered or refill
        return ReplayBuffer(
            **options,
            train_batch_size=4,
            gen_batch_size=1 if exact else 4,
            max_inflight_gen_batches=2 if filtered else 1,
        )

    outcomes = [
        _outcome(make, partitions, rewards, monkeypatch, filtered=filtered, refill=refill)
        for make in (theirs, lambda trainer: _make(trainer, mode))
    ]
    assert outcomes[0] == outcomes[1]


def test_what_is_compared_filters_and_refills_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for seed in range(12):
        partitions, rewards = _random_queue(random.Random(seed))
        outcome = _outcome(_make, partitions, rewards, monkeypatch, filtered=True, refill=True)
        seen |= {name.split("/", 1)[-1] for name in outcome["metrics"]} | ({"refill"} if outcome["refills"] else set())
    assert seen >= {"filter_groups/evicted_samples", "rollout_failure/evicted_samples", "refill"}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("gen_batch", [None, 12])
def test_verls_trainer_makes_it_with_the_settings_of_its_own(
    mode: str, filtered: bool, refill: bool, gen_batch: int | None
) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def build(sampler: dict[str, Any]) -> dict[str, Any]:
        config = OmegaConf.create(
            {
                "trainer": {
                    "v1": {
                        mode: {"a": 1},
                        "sampler": {
                            "max_off_policy_threshold": 3, "max_off_policy_strategy": "wait", "sampler_kwargs": {},
                            "sync_refill_failed_groups": refill, "custom_sampler": sampler,
                        },
                    }
                },
                "data": {"train_batch_size": 6, "gen_batch_size": gen_batch},
                "algorithm": {"filter_groups": {"enable": filtered, "metric": "acc", "max_inflight_gen_batches": 3}},
                "reward": {"reward_model": {"enable": False}},
            }
        )  # fmt: skip

        class Stand(PPOTrainer):  # type: ignore[misc]
            def __init__(self) -> None:
                self.config, self.trainer_mode = config, mode

            def on_sample_end(self) -> None: ...

            def on_step_end(self) -> None: ...

            def __eq__(self, other: object) -> bool:
                return isinstance(other, PPOTrainer)

        return vars(Stand()._build_replay_buffer())

    theirs = build({"path": None, "name": None})
    ours = build({"path": "pkg://verl_shard.verl_plugin.sampler", "name": "make_sampler"})
    for made in (theirs, ours):
        assert made.pop("refill_fn").__name__ == "_add_prompts_to_generate"
    assert ours.pop("max_failures") == 0
    assert ours == theirs
    assert theirs["filter_groups_metric"] == ("acc" if filtered else None)


def test_unknown_sampler_kwargs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler_kwargs = \['max_fails', 'other'\]: this sampler does not have it"):
        _make(Trainer(), sampler_kwargs=OmegaConf.create({"max_fails": 1, "other": 2, "max_failures": 3}))


@pytest.mark.parametrize("count", [-1, 1.5, True, "3", None])
def test_what_is_no_number_of_failures_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_failures.*not a number of failures"):
        _make(Trainer(), sampler_kwargs={"max_failures": count})
