"""Rollouts and rewards that fail, caught where they happen.

verl marks the prompt of a failed rollout or reward "failure" and trains on the rest: 13 of 32 samples raised in a
trial, exit code 0. Here the agent loop writes each failure into TransferQueue, where the sampler of the trainer sees
it at its next look.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_shard.common.errors import RunError
from verl_shard.common.notices import record_event

PARTITION = "verl_shard_failures"
"""The TransferQueue partition that holds nothing but failures, in the tags of its keys."""


@dataclass(frozen=True)
class Failure:
    """One rollout or reward that raised. kind: "rollout" or "reward"; error: the exception's own type and message."""

    kind: str
    error: str
    where: str

    @classmethod
    def of(cls, kind: str, error: BaseException) -> Failure:
        """From an exception, seen through Ray's wrapping to the one that was raised first, and where."""
        first, places = error, _places(error)
        while isinstance(cause := getattr(first, "cause", None), BaseException):
            first = cause
            # An exception that came from another process has its traceback there as text, with the outer one.
            places = _places(first) or places
        return cls(kind, f"{type(first).__name__}: {first}", places[-1] if places else "")


def _places(error: BaseException) -> list[str]:
    """The file:line of each frame that the exception passed, the innermost last."""
    if hasattr(error, "cause"):
        # Ray's wrapping says what the traceback in the other process was.
        return [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    return [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]


def too_many(failures: Mapping[str, Mapping[str, Any]], allowed: int) -> RunError | None:
    """The error that stops a run with more failures than `allowed`; None while there are not.

    failures: the tags of the failures' partition, in the order in which they came.
    """
    # TransferQueue makes a key before it has the tag.
    tags = [tag for tag in failures.values() if "kind" in tag]
    if len(tags) <= allowed:
        return None
    counts = {kind: sum(tag["kind"] == kind for tag in tags) for kind in ("rollout", "reward")}
    counted = " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items() if n)
    first = tags[0]
    at = f" ({first['where']})" if first["where"] else ""
    return RunError(
        f"{counted} failed; {allowed} allowed. The first, a {first['kind']}: {first['error']}{at}. "
        "To go on without failed samples, set +trainer.v1.sampler.sampler_kwargs.max_failures=N"
    )


class FailureReporting:
    """For an agent loop worker of verl's V1 trainer: reports what its rollouts and rewards raise, and raises it on."""

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            await super()._compute_score(outputs, kwargs=kwargs)  # type: ignore[misc]
        except Exception as error:
            await self._report("reward", error, kwargs)
            error.verl_shard_reported = True  # type: ignore[attr-defined]
            raise

    async def _run_agent_loop(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(sampling_params, **kwargs)  # type: ignore[misc]
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not getattr(error, "verl_shard_reported", False):
                await self._report("rollout", error, kwargs)
            raise

    async def _report(self, kind: str, error: Exception, kwargs: Mapping[str, Any]) -> None:
        import transfer_queue as tq

        failure = Failure.of(kind, error)
        record_event("failure", failure=kind, error=failure.error, where=failure.where)
        await tq.async_kv_put(
            key=f"{kwargs['uid']}_{kwargs['session_id']}",
            partition_id=PARTITION,
            tag={"kind": failure.kind, "error": failure.error, "where": failure.where},
        )
