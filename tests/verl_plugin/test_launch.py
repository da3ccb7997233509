"""Launching: what is logged, what is said of a bad end, and that nothing of a launch stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_shard.common.errors import RunError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.config.run_folder import RunFolder
from verl_shard.verl_plugin import launch as module
from verl_shard.verl_plugin.fork_server import LAUNCH_MARK
from verl_shard.verl_plugin.launch import end_launch, environment, explain_end, marked_processes, run_verl


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.start(tmp_path / "run", {}, {})


def _explain(run: RunFolder, text: str, code: int = 1) -> str:
    launch = run.new_launch()
    launch.log_file.write_bytes(text.encode())
    message, where = explain_end(launch, run, code).rsplit("\n", 1)
    assert where == f"Its output is in {launch.log_file}"
    return message


RAY = """\
\x1b[36m(TaskRunner pid=123)\x1b[0m step 1 ends
Error executing job with overrides: ['a=1']
(WorkerDict pid=77) Traceback (most recent call last):
(WorkerDict pid=77)   File "/a/b.py", line 3, in f
(WorkerDict pid=77) torch.OutOfMemoryError: tried to allocate 2.00 GiB
Traceback (most recent call last):
  File "/a/main.py", line 9, in <module>
ray.exceptions.RayTaskError(OutOfMemoryError): ray::main() (pid=77, ip=1.2.3.4)
ValueError: the last word
"""


def test_the_first_error_of_the_log_is_told(run: RunFolder) -> None:
    assert _explain(run, RAY) == "verl ended with exit code 1: torch.OutOfMemoryError: tried to allocate 2.00 GiB"


def test_an_error_of_our_own_comes_before_all_others_with_all_its_lines(run: RunFolder) -> None:
    text = RAY + (
        "verl_shard.common.errors.ConfigError: trainer.nnodes = 2: too many. Set it to 1.\n"
        "critic.model.use_liger = True: not there. Set it to false.\n"
        "\nDuring handling of the above exception, another exception occurred:\n"
        "verl_shard.common.errors.RunError: later\n"
    )
    assert _explain(run, text) == (
        "verl ended with exit code 1: trainer.nnodes = 2: too many. Set it to 1.\n"
        "critic.model.use_liger = True: not there. Set it to false."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it printed nothing"),
        ("one\nthe last line\n", "the last line"),
        ("KeyError: 'x'\n", "KeyError: 'x'"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("  raise ValueError: no\nthis is no Error: at all, since it stands in a line\nend\n", "end"),
        ("RuntimeError: größe\n", "RuntimeError: größe"),
    ],
)  # fmt: skip
def test_without_more_the_last_line_is_told(text: str, message: str, run: RunFolder) -> None:
    assert _explain(run, text) == f"verl ended with exit code 1: {message}"


def test_a_signal_is_told_as_one(run: RunFolder) -> None:
    assert _explain(run, "", -9) == "verl ended with signal 9: it printed nothing"


def test_the_environment_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "x")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cpu, gpu = environment(cpu=True, threads=3), environment(cpu=False, threads=3)
    assert (cpu["MINE"], cpu["OMP_NUM_THREADS"], cpu["RAY_AUTH_MODE"], cpu["VERL_PLATFORM"]) == (
        "x",
        "3",
        "disabled",
        "cpu",
    )
    assert "VERL_PLATFORM" not in gpu
    assert gpu["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert cpu[LAUNCH_MARK] != gpu[LAUNCH_MARK]


# Ends in order at SIGINT, as verl's main program does; its child minds no signal and is in a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
     "print('up', flush=True); time.sleep(120)"], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
%s
time.sleep(120)
"""


@pytest.fixture
def marked() -> Iterator[Any]:
    """marked(text): a process with this program and a mark of its own, and the mark; ended with the test."""
    started = []

    def start(text: str) -> tuple[subprocess.Popen[bytes], str, int]:
        env = environment(cpu=True, threads=1)
        process = subprocess.Popen(
            [sys.executable, "-c", text], env=env, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append((process, env[LAUNCH_MARK]))
        assert process.stdout is not None
        return process, env[LAUNCH_MARK], int(process.stdout.readline())

    yield start
    for process, mark in started:
        for pid in marked_processes(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_a_launch_is_ended_with_all_that_it_started(marked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 1.0)
    process, mark, child = marked(STUBBORN % "")
    other, other_mark, _ = marked("import time; print(0, flush=True); time.sleep(120)")
    assert sorted(marked_processes(mark)) == sorted([process.pid, child])
    end_launch(process, mark)
    assert process.returncode == -signal.SIGINT
    deadline = time.monotonic() + 10
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked_processes(mark) == []
    assert marked_processes(other_mark) == [other.pid]


def test_a_main_program_that_does_not_listen_is_killed(marked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    process, mark, _ = marked(
        "import signal, time; signal.signal(2, signal.SIG_IGN); print(0, flush=True); time.sleep(120)"
    )
    end_launch(process, mark)
    assert process.returncode == -signal.SIGKILL
    assert marked_processes(mark) == []


def test_what_a_launch_that_ended_left_is_ended(marked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    process, mark, child = marked(STUBBORN % "sys.exit(3)")
    assert process.wait(20) == 3
    assert marked_processes(mark) == [child]
    end_launch(process, mark)
    time.sleep(0.1)
    assert marked_processes(mark) == []


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """verl(text): has a launch run this program in the place of verl's main program."""

    def set_program(text: str) -> None:
        (tmp_path / "verl.py").write_text(text)
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$1" = -S ] && exec {sys.executable} "$@"\nexec {sys.executable} {tmp_path}/verl.py "$@"\n'
        )
        python.chmod(0o755)
        monkeypatch.setattr(module.sys, "executable", str(python))

    monkeypatch.setattr(module, "GRACE_S", 2.0)
    return set_program


LOGGING = """
import json, os, sys, time
print("arguments", json.dumps(sys.argv[1:]), os.environ["VERL_SHARD_RUN_DIR"])
with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as log:
    for step in range(3):
        log.write(json.dumps({"step": step, "data": {"timing_s/step": 1.0} if step else {}}) + "\\n")
        log.flush()
        time.sleep(0.1)
"""


def test_a_run_is_watched_to_its_end(run: RunFolder, verl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    verl(LOGGING)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    seen: list[int] = []
    looks: list[int] = []
    launch = run.new_launch()
    run_verl(
        ["a=1", "b='x y'"], run, env=environment(cpu=True, threads=1), launch=launch,
        on_record=lambda record: seen.append(record["step"]), on_look=lambda: looks.append(len(seen)),
    )  # fmt: skip
    assert seen == [0, 1, 2]
    assert looks[-1] == 3
    assert looks == sorted(looks)
    expected = ["-m", "verl.trainer.main_ppo", "a=1", "b='x y'"]
    assert launch.log_file.read_text() == f"arguments {json.dumps(expected)} {run.path.resolve()}\n"
    events = list(read_json_lines(run.path / "events.jsonl"))
    assert [(event["kind"], event["number"]) for event in events] == [
        ("launch", 1), ("first-step", 1), ("launch-ended", 1),
    ]  # fmt: skip
    assert events[0]["after_step"] == 0
    assert events[1]["step"] == 1
    assert events[2]["code"] == 0


def _launch(run: RunFolder, on_record: Any = lambda record: None, on_look: Any = lambda: None) -> dict[str, str]:
    env = environment(cpu=True, threads=1)
    run_verl([], run, env=env, launch=run.new_launch(), on_record=on_record, on_look=on_look)
    return env


def test_a_run_that_fails_says_why(run: RunFolder, verl: Any) -> None:
    verl("import sys\nsys.exit('ValueError: too long')")
    with pytest.raises(
        RunError, match=r"^verl ended with exit code 1: ValueError: too long\nIts output is in .*1\.log$"
    ):
        _launch(run)
    assert [event["kind"] for event in read_json_lines(run.path / "events.jsonl")] == ["launch", "launch-ended"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_however_it_is_left_no_process_stays(
    error: type[BaseException], run: RunFolder, verl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verl(STUBBORN % "")
    marks: list[str] = []
    make = module.environment

    def remembered(**given: Any) -> dict[str, str]:
        env = make(**given)
        marks.append(env[LAUNCH_MARK])
        return env

    monkeypatch.setitem(globals(), "environment", remembered)

    def look() -> None:
        if (run.path / "launches" / "1.log").read_text().strip():
            assert len(marked_processes(marks[0])) == 2
            raise error

    with pytest.raises(error):
        _launch(run, on_look=look)
    time.sleep(0.1)
    assert marked_processes(marks[0]) == []


def test_ctrl_c_while_all_is_being_ended_is_not_heard() -> None:
    with module._no_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_a_launch_whose_parent_is_killed_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "verl.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(120)")
    text = (
        "import os, sys, time\n"
        "from verl_shard.verl_plugin.launch import _started, environment\n"
        "with _started([sys.executable, sys.argv[1]], None, environment(cpu=True, threads=1)):\n"
        "    time.sleep(120)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", text, str(tmp_path / "verl.py")], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        # The pipe ends with the last process that holds it.
        began = time.monotonic()
        assert parent.stdout.read() == b""
        assert time.monotonic() - began < 60, pid
