"""Failures: seen through wrappings to the error that was raised, counted, and reported once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.verl_plugin.failures import PARTITION, Failure, FailureReporting, too_many


def _raised(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise make()
    except BaseException as error:  # noqa: BLE001
        return error


class WrappingError(Exception):
    """As ray.exceptions.RayTaskError: the error in `cause`, the other process's traceback as text."""

    def __init__(self, cause: BaseException, text: str = "") -> None:
        super().__init__(text)
        self.cause = cause


def test_an_error_is_itself_with_the_place_where_it_was_raised() -> None:
    failure = Failure.of("reward", _raised(lambda: ValueError("no boxed answer")))
    line = _raised.__code__.co_firstlineno + 2
    assert failure == Failure("reward", "ValueError: no boxed answer", f"{__file__}:{line}")


def test_an_error_that_was_not_raised_has_no_place() -> None:
    assert Failure.of("rollout", KeyError("x")) == Failure("rollout", "KeyError: 'x'", "")


def test_it_is_seen_through_nested_wrappings() -> None:
    inner = WrappingError(
        ValueError("bad row"), 'File "/a/reward.py", line 7, in score\n  x\nFile "/a/row.py", line 3, in get'
    )
    outer = _raised(lambda: WrappingError(inner, 'File "/a/worker.py", line 99, in call'))
    assert Failure.of("reward", outer) == Failure("reward", "ValueError: bad row", "/a/row.py:3")


def test_rays_own_wrapping_is_seen_through() -> None:
    from ray.exceptions import RayTaskError

    text = 'Traceback (most recent call last):\n  File "/a/reward.py", line 7, in score\nValueError: bad row\n'
    for wrapped in (
        RayTaskError("score", text, ValueError("bad row")),
        RayTaskError("score", text, ValueError("bad row")).as_instanceof_cause(),
        RayTaskError("outer", "outer", RayTaskError("score", text, ValueError("bad row")).as_instanceof_cause()),
    ):
        failure = Failure.of("reward", _raised(lambda wrapped=wrapped: wrapped))
        assert (failure.error, failure.where) == ("ValueError: bad row", "/a/reward.py:7")


@pytest.mark.parametrize("cause", [None, "text"])
def test_a_cause_that_is_no_exception_is_none(cause: Any) -> None:
    error = OSError("disk")
    error.cause = cause  # type: ignore[attr-defined]
    assert Failure.of("rollout", error).error == "OSError: disk"


def _tags(*kinds: str) -> dict[str, dict[str, Any]]:
    return {str(n): {"kind": kind, "error": f"E: {n}", "where": f"f.py:{n}"} for n, kind in enumerate(kinds)}


@pytest.mark.parametrize(
    ("kinds", "counted", "first"),
    [
        (("rollout",), "1 rollout failed", "a rollout: E: 0 (f.py:0)"),
        (("reward", "reward"), "2 rewards failed", "a reward: E: 0 (f.py:0)"),
        (("reward", "rollout", "rollout"), "2 rollouts and 1 reward failed", "a reward: E: 0 (f.py:0)"),
    ],
)
def test_the_message_counts_and_quotes_the_first(kinds: tuple[str, ...], counted: str, first: str) -> None:
    error = too_many(_tags(*kinds), 0)
    assert str(error).startswith(f"{counted}; 0 allowed. The first, {first}. To go on")


def test_up_to_the_threshold_nothing_is_raised() -> None:
    assert too_many({}, 0) is None
    assert too_many(_tags("reward", "reward"), 2) is None
    assert too_many(_tags("reward", "reward", "reward"), 2) is not None
    assert too_many({"a": {}, **_tags("reward")}, 1) is None


class _Base:
    """As verl's worker: a rollout generates, then computes its score."""

    fails: str | None = None

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        if self.fails == "reward":
            raise ValueError("no boxed answer")
        outputs.append("score")

    async def _run_agent_loop(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        if self.fails == "rollout":
            raise RuntimeError("out of memory")
        if self.fails == "cancelled":
            raise asyncio.CancelledError
        outputs = ["response"]
        await self._compute_score(outputs, kwargs=kwargs)
        return outputs


class _Worker(FailureReporting, _Base):
    pass


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    async def async_kv_put(**put: Any) -> None:
        calls.append(put)

    monkeypatch.setitem(__import__("sys").modules, "transfer_queue", SimpleNamespace(async_kv_put=async_kv_put))
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    return calls


def _run(fails: str | None) -> Any:
    worker = _Worker()
    worker.fails = fails
    return asyncio.run(worker._run_agent_loop({}, uid="u1", session_id=3))


def test_what_goes_well_is_not_reported(reported: list[dict[str, Any]], tmp_path: Path) -> None:
    assert _run(None) == ["response", "score"]
    assert reported == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fails", "kind", "text"),
    [("reward", ValueError, "ValueError: no boxed answer"), ("rollout", RuntimeError, "RuntimeError: out of memory")],
)
def test_a_failure_is_reported_once_and_raised_on(
    fails: str, kind: type[Exception], text: str, reported: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(kind):
        _run(fails)
    (put,) = reported
    assert (put["key"], put["partition_id"]) == ("u1_3", PARTITION)
    assert (put["tag"]["kind"], put["tag"]["error"]) == (fails, text)
    assert put["tag"]["where"].startswith(f"{__file__}:")
    (line,) = read_json_lines(tmp_path / "events.jsonl")
    assert (line["kind"], line["failure"], line["error"]) == ("failure", fails, text)
    assert line["where"] == put["tag"]["where"]


def test_a_cancelled_rollout_is_no_failure(reported: list[dict[str, Any]]) -> None:
    with pytest.raises(asyncio.CancelledError):
        _run("cancelled")
    assert reported == []
