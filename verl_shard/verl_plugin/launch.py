"""Starts verl's own main program, watches what it logs, and ends it with everything that it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl_shard.common.errors import RunError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE, record_event
from verl_shard.config.run_folder import Launch, RunFolder
from verl_shard.verl_plugin.fork_server import ForkServer

MARK = "VERL_SHARD_LAUNCH_ID"
"""Environment variable by which the processes of a launch are known, however they were started."""

LOOK_S = 0.2
GRACE_S = 15.0


def environment(run: RunFolder, launch: Launch, *, cpu: bool, threads: int) -> dict[str, str]:
    """The environment of verl's processes. Ray hands it on to its workers on this machine."""
    env = dict(os.environ)
    env[RUN_DIR_VARIABLE] = str(run.path.resolve())
    env[MARK] = uuid.uuid4().hex
    env["VERL_FILE_LOGGER_PATH"] = str(launch.metrics_file.resolve())
    # Ray changes neither the number of threads nor, below, which GPUs a worker sees.
    env["OMP_NUM_THREADS"] = str(threads)
    env["RAY_DEDUP_LOGS"] = "0"
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    env["HYDRA_FULL_ERROR"] = "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    # What Ray chooses by itself for a cluster of its own, and then warns of.
    env.setdefault("RAY_AUTH_MODE", "token")
    if cpu:
        env["VERL_PLATFORM"] = "cpu"
    else:
        env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    return env


def run_verl(
    overrides: Sequence[str],
    run: RunFolder,
    *,
    env: Mapping[str, str],
    launch: Launch,
    on_record: Callable[[dict[str, Any]], None],
    on_look: Callable[[], None] = lambda: None,
    server: ForkServer | None = None,
) -> None:
    """Runs `python -m verl.trainer.main_ppo` to its end. on_record gets each line of metrics, on_look runs several times a second.

    server: starts verl's processes as forks of one that has imported verl already.

    Raises RunError with what went wrong when it fails. However it is left, none of its processes stays.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    if server is not None:
        interpreter = f"+ray_kwargs.ray_init.runtime_env.py_executable='{server.interpreter}'"
        command = [*server.command, *command[1:], interpreter]
    record_event("launch", number=launch.number, after_step=launch.after_step)
    with launch.log_file.open("wb") as log, _started(command, log, env) as process:
        seen = 0
        while True:
            # Asked before reading, so that what was written just before the end is read too.
            ended = process.poll() is not None
            records = list(read_json_lines(launch.metrics_file))
            for record in records[seen:]:
                on_record(record)
            seen = len(records)
            on_look()
            if ended:
                break
            time.sleep(LOOK_S)
        code = process.returncode
    record_event("launch-ended", number=launch.number, code=code)
    if code != 0:
        raise RunError(explain_end(launch, run, code))


@contextmanager
def _started(command: Sequence[str], log: Any, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    # Its own session: Ctrl-C in the terminal reaches this process alone, which then ends the others in order.
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True)
    try:
        yield process
    finally:
        end_launch(process, env[MARK])


def end_launch(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends verl's main program, which shuts down its Ray; then whatever of the launch is still there."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    deadline = time.monotonic() + GRACE_S
    # Ray's own processes follow their driver within moments; only what does not is killed.
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def marked_processes(mark: str) -> list[int]:
    """The ids of the processes whose environment carries the launch's mark."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def explain_end(launch: Launch, run: RunFolder, code: int) -> str:
    """What is known of a run that ended badly: the error that was raised first, and where to read more."""
    with launch.log_file.open(encoding="utf-8", errors="replace") as lines:
        tail = deque((re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines), maxlen=4000)
    # Ray repeats an error at each process it passes; the innermost comes first. "(pid=...)" marks a worker's output.
    pattern = re.compile(r"^(?:\(.*?pid=.*?\) )?([\w.]*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
    errors = [match[1] for line in tail if (match := pattern.match(line))]
    ours = [error for error in errors if error.startswith("verl_shard.")]
    chosen = (ours or errors or [tail[-1] if tail else "it printed nothing"])[0]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"verl ended with {how}: {re.sub(r'^verl_shard[.\w]*: ', '', chosen)}\nIts output is in {launch.log_file}"
