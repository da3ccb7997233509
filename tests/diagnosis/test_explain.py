"""Logs of failures that really happened, here or to others, are explained as they should be."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from diagnosis.evidence import ALSO_SEEN, LOGS, PROVOKED, QUOTES, REPORTS, THREADS, log
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shard.diagnosis import catalogue as catalogue_module
from verl_shard.diagnosis.explain import Explainer, explain_lines
from verl_shard.diagnosis.explain_answer import Answer

FIT = [
    "(TaskRunner pid=77) test_gen_batch meta info: {'eos_token_id': 151645, 'validate': True}",
    "(WorkerDict pid=78) INFO 2025-05-01 12:00:00 Loading checkpoint shards: 100%|██████████| 2/2",
    "(pid=gcs_server) nothing of note",
    "Training Progress:  25%|██▌       | 390/1545 [5:21:04<15:50:51, 49.40s/it]",
    "{'lr': 1e-06, 'note': 'no trouble'}",
    "",
]


def fault_of(answer: Answer) -> str:
    if answer.cause is not None:
        return answer.cause.fault.id
    return "unknown" if answer.unknown is not None else ""


def test_every_log_has_its_answer() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(PROVOKED)


@pytest.mark.parametrize("name", PROVOKED)
def test_what_was_provoked_here_is_explained(name: str) -> None:
    answer = explain_lines(log(name))
    assert fault_of(answer) == PROVOKED[name]
    assert answer.exit_code == (PROVOKED[name] != "")


@pytest.mark.parametrize("fault", ALSO_SEEN)
def test_what_hides_a_cause_is_seen_and_told_apart(fault: str) -> None:
    answer = explain_lines(log(ALSO_SEEN[fault]))
    assert fault in [one.fault.id for one in answer.also]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote['fault']}-{quote['url'].rsplit('/', 1)[1]}")
def test_what_others_reported_is_explained(quote: dict[str, Any]) -> None:
    answer = explain_lines(quote["log"].splitlines())
    assert fault_of(answer) == quote["fault"]
    cause = answer.cause
    assert cause is not None
    for name in ("role", "phase", "rank"):
        if name in quote:
            assert getattr(cause.place, name) == quote[name]
    if "over" in quote:
        assert cause.memory is not None
        assert cause.memory.over is not None
        assert round(cause.memory.over / 2**20) == quote["over"]
    for said in quote.get("said", ()):
        assert said in cause.title + cause.cause


@pytest.mark.parametrize("thread", THREADS, ids=lambda thread: thread["url"].removeprefix("https://github.com/"))
def test_what_no_pattern_was_written_from_is_explained(thread: dict[str, Any]) -> None:
    assert fault_of(explain_lines(thread["log"].splitlines())) == thread["fault"]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["ref"])
def test_every_user_report_is_answered(report: dict[str, Any]) -> None:
    answer = explain_lines(report["log"].splitlines())
    assert fault_of(answer) == report["fault"]
    cause = answer.cause
    assert cause is not None
    assert report["ref"] in cause.fault.reports
    assert cause.title == report.get("title", cause.title)
    if "advises" in report:
        assert any(report["advises"] in one.write for one in cause.remedies)


def test_every_report_that_an_entry_names_is_tested() -> None:
    named = {ref for fault in catalogue_module.catalogue() for ref in fault.reports}
    assert named == {report["ref"] for report in REPORTS}
    assert len(REPORTS) == 24


def test_a_real_out_of_memory_says_by_how_much() -> None:
    cause = explain_lines(log("gpu_oom_update")).cause
    assert cause is not None
    assert (cause.place.role, cause.place.phase) == ("actor", "update_actor")
    memory = cause.memory
    assert memory is not None
    # 83.57 asked for, 55.71 of 139.80 GiB free, 84.08 in this process: the numbers of the H200 that it happened on.
    gib = 2**30
    assert (memory.gpu, round(memory.tried / gib, 2), round(memory.free / gib, 2)) == (0, 83.57, 55.71)  # type: ignore[operator]
    assert round(memory.over / gib, 2) == 27.86  # type: ignore[operator]
    assert cause.remedies[0].write == "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    assert not memory.fragmented


def test_another_process_on_the_gpu_is_told_from_this_one() -> None:
    cause = explain_lines(log("gpu_oom_other_process")).cause
    assert cause is not None
    assert cause.memory is not None
    assert round(cause.memory.other / 2**30, 2) == 100.51  # type: ignore[operator]
    assert cause.memory.process == 518 << 20
    assert "100.51 GiB in other processes" in str(cause.memory)


def test_the_driver_that_ray_killed_is_told() -> None:
    cause = explain_lines(log("ray_host_out_of_memory")).cause
    assert cause is not None
    assert cause.title == "Ray killed the driver because a machine ran out of host memory"
    assert cause.groups["used"] == "3.67GB"
    assert cause.groups["who"] == "ray::TaskRunner.run"


def test_a_worker_of_ray_gives_role_phase_and_process() -> None:
    cause = explain_lines(log("ray_worker_raises")).cause
    assert cause is not None
    assert (cause.place.role, cause.place.phase) == ("actor", "update_actor")
    assert re.fullmatch(r"WorkerDict pid=\d+, ip=10\.0\.0\.1", cause.place.process)


def test_an_unknown_error_is_said_to_be_unknown_with_its_frames() -> None:
    answer = explain_lines(log("unknown"))
    assert answer.verdict == "unknown"
    unknown = answer.unknown
    assert unknown is not None
    assert (unknown.type, unknown.message) == ("KeyError", "'wrong'")
    assert [frame.name for frame in unknown.frames] == ["<module>", "compute_score", "<listcomp>", "reward"]
    assert (unknown.place.role, unknown.place.phase) == ("reward", "reward")


OOM = log("gpu_oom_update")
WATCHDOG = next(quote["log"] for quote in QUOTES if quote["fault"] == "watchdog-timeout").splitlines()
DIED = log("ray_worker_killed")


@pytest.mark.parametrize("before", [0, 1], ids=["cause-first", "cause-last"])
@pytest.mark.parametrize("follows", [WATCHDOG, DIED, [*WATCHDOG, *DIED]], ids=["watchdog", "died", "both"])
def test_a_cause_outranks_what_follows_from_it(follows: list[str], before: int) -> None:
    lines = [*follows, *OOM] if before else [*OOM, *follows]
    assert fault_of(explain_lines(lines)) == "gpu-out-of-memory"


def test_of_two_causes_the_first_counts() -> None:
    tokens = log("token_ids_on_cpu")
    assert fault_of(explain_lines([*OOM, *tokens])) == "gpu-out-of-memory"
    assert fault_of(explain_lines([*tokens, *OOM])) == "token-id-beyond-vocabulary"


def test_an_unknown_error_before_a_symptom_is_the_answer_and_after_it_not() -> None:
    assert fault_of(explain_lines([*log("unknown"), *WATCHDOG])) == "unknown"
    assert fault_of(explain_lines([*WATCHDOG, *log("unknown")])) == "watchdog-timeout"
    assert (
        fault_of(explain_lines([*DIED[-2:], *log("unknown"), "ray.exceptions.ActorDiedError: gone"])) == "worker-died"
    )


def test_what_the_run_survived_is_no_fault() -> None:
    steps = [f"step:{step} - timing_s/step:9" for step in range(4)]
    assert explain_lines([*log("unknown"), *steps]).verdict == "nothing"
    assert explain_lines([*steps, *log("unknown")]).verdict == "unknown"
    assert explain_lines([*OOM, *steps]).verdict == "fault"


@pytest.mark.parametrize(("ref", "told"), [(6.1, True), (4.4, False)])
def test_a_slow_reference_shows_in_the_times_of_a_step(ref: float, told: bool) -> None:
    line = f"step:13 - timing_s/gen:15.719 - timing_s/old_log_prob:1.0 - timing_s/ref:{ref} - timing_s/step:18.468"
    answer = explain_lines([line])
    assert (fault_of(answer) == "reference-always-offloaded") is told
    assert answer.exit_code == 0


def test_memory_outside_of_torch_is_counted() -> None:
    said = "memory allocated (GB): 10.00, memory reserved (GB): {}, device memory used/total (GB): 40.00/80.00"
    assert fault_of(explain_lines(["After init, " + said.format(36)])) == "memory-outside-of-torch"
    assert fault_of(explain_lines(["After init, " + said.format(39)])) == ""


def interleaved(lines: list[str], seed: int, prefix: bool) -> list[str]:
    """The lines with others between them, and each as Ray would print it."""
    chance = random.Random(seed)
    made: list[str] = []
    for line in lines:
        made += chance.choices(FIT, k=chance.randrange(3))
        made.append(f"\x1b[36m(WorkerDict pid=41, ip=10.0.0.9)\x1b[0m {line}" if prefix else line)
    return made


# Those of Ray and torchrun have prefixes already.
PLAIN = [name for name in PROVOKED if not name.startswith(("ray_", "gpu_nccl", "gpu_duplicate"))]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PLAIN), st.integers(0, 2**31), st.booleans())
def test_other_lines_and_prefixes_change_nothing(name: str, seed: int, prefix: bool) -> None:
    plain, changed = explain_lines(log(name)), explain_lines(interleaved(log(name), seed, prefix))
    assert fault_of(changed) == fault_of(plain)
    if changed.cause is not None and plain.cause is not None:
        assert changed.cause.fault is plain.cause.fault
        assert changed.cause.memory == plain.cause.memory
        assert (changed.cause.place.role, changed.cause.place.phase) == (
            plain.cause.place.role,
            plain.cause.place.phase,
        )
        assert changed.cause.frames == plain.cause.frames


def test_code_that_a_traceback_shows_is_not_what_was_said() -> None:
    cause = explain_lines(log("loss_agg_mode")).cause
    assert cause is not None
    assert cause.title == "verl 0.9.1 does not do this: Invalid loss_agg_mode: mean"


def test_two_tracebacks_line_by_line_are_told_apart() -> None:
    """The frames of one process do not get into the traceback of another."""
    a = [f"(WorkerDict pid=1) {line}" for line in OOM]
    b = [f"(vLLMHttpServer pid=2) {line}" for line in log("ray_worker_raises_unknown")]
    mixed = [line for pair in zip(a, b, strict=False) for line in pair] + b[len(a) :]
    cause = explain_lines(mixed).cause
    assert cause is not None
    assert [frame.name for frame in cause.frames] == ["<module>", "update_actor"]
    assert cause.place.process == "WorkerDict pid=1"


def test_a_broken_pattern_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above hold: without its entry a log is explained otherwise."""
    without = [fault for fault in catalogue_module.catalogue() if fault.id != "token-budget-below-sequence"]
    explainer = Explainer(without)
    explainer.read(log("token_budget"))
    assert fault_of(explainer.answer()) == "unknown"
