"""The sampler that hands finished samples to verl's trainer: verl's own, but prompt, ordered, and stopping on failures.

verl's looks every 2 seconds, which is most of a small step; takes prompts in the order of random ids, so that no two
runs see the same micro-batches; and does not know of failures. What it does about groups (`filter_groups`,
`sync_refill_failed_groups`) is inherited.
"""

from __future__ import annotations

import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_shard.common.errors import config_error
from verl_shard.verl_plugin import hooks
from verl_shard.verl_plugin.failures import PARTITION, too_many

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.03, 1.0


class _PromptSampling:
    """What both samplers change; for use in front of ReplayBuffer or ReplayBufferAsync."""

    max_failures = 0
    _waiting_since: float | None = None
    _last_wait_s: dict[str, float] | None = None
    """By partition: validation takes longer than a step."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()  # type: ignore[misc]
        if error := too_many(self.partitions[PARTITION], self.max_failures):  # type: ignore[attr-defined]
            raise error

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        # After three quarters of what the last batch took, then a twentieth of what has been waited already, and never
        # more than a second: quick for quick steps, and no load on slow ones, nor on what makes the samples.
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited = now - self._waiting_since
        last = (self._last_wait_s or {}).get(partition_id, 0.0)
        wait = max(0.75 * last - waited, waited / 20, SHORTEST_WAIT_S)
        self.poll_interval = min(wait, LONGEST_WAIT_S)
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))  # type: ignore[misc]

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        if self._waiting_since is not None:
            waited = time.monotonic() - self._waiting_since
            self._last_wait_s = {**(self._last_wait_s or {}), partition_id: waited}
        self._waiting_since = None
        steps: dict[str, int] = self.prompt_global_steps[partition_id]  # type: ignore[attr-defined]
        # Prompts are registered in the order of the data; `steps` keeps it, random ids do not.
        place = {uid: index for index, uid in enumerate(steps)}
        ordered = sorted(sampleable_keys, key=lambda uid: (steps.get(uid, 0), place[uid]))
        rank = {uid: index for index, uid in enumerate(ordered)}
        partition: dict[str, dict[str, Any]] = self.partitions[partition_id]  # type: ignore[attr-defined]

        def sample_place(key: str) -> tuple[int, int, int]:
            uid, session, index = key.rsplit("_", 2)
            return rank.get(uid, len(rank)), int(session), int(index)

        return ordered[:batch_size], {key: partition[key] for key in sorted(partition, key=sample_place)}, dict(steps)


class ShardReplayBuffer(_PromptSampling, ReplayBuffer):
    """For trainer_mode sync."""


class ShardReplayBufferAsync(_PromptSampling, ReplayBufferAsync):
    """For trainer_mode colocate_async and separate_async."""


def make_sampler(*, trainer_mode: str, sampler_kwargs: Any, refill_fn: Any, **kwargs: Any) -> ReplayBuffer:
    """The sampler for a trainer mode, as `trainer.v1.sampler.custom_sampler` names it.

    verl tells a custom sampler nothing of group filtering and refilling and leaves it to read the config; this one
    passes on what verl would have given its own. sampler_kwargs: max_failures, the number of failed rollouts and
    rewards after which the run still goes on (0).
    """
    options = dict(sampler_kwargs or {})
    max_failures = options.pop("max_failures", 0)
    where = "trainer.v1.sampler.sampler_kwargs"
    if options:
        raise config_error("unknown-key", where, sorted(options), "this sampler does not have it", "Use max_failures")
    if not isinstance(max_failures, int) or isinstance(max_failures, bool) or max_failures < 0:
        raise config_error(
            "not-a-count", f"{where}.max_failures", max_failures, "not a number of failures", "Use 0 or more"
        )
    buffer = ShardReplayBuffer if trainer_mode == "sync" else ShardReplayBufferAsync
    sampler = buffer(
        trainer_mode=trainer_mode,
        sampler_kwargs=sampler_kwargs,
        refill_fn=refill_fn,
        **hooks.group_options(refill_fn, sync=buffer is ShardReplayBuffer),
        **kwargs,
    )
    sampler.max_failures = max_failures
    return sampler
