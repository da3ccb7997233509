"""Starts verl's own main program, watches what it logs, and ends it with everything that it started."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_shard.common.errors import RunError
from verl_shard.common.files import JsonTail
from verl_shard.common.notices import RUN_DIR_VARIABLE, record_event
from verl_shard.config.run_folder import Launch, RunFolder
from verl_shard.resources.limits import usable_cores
from verl_shard.verl_plugin.fork_server import LAUNCH_MARK, ForkServer

if TYPE_CHECKING:
    from verl_shard.planning.plan import Plan

# A parent that is killed cannot end verl, so the kernel does it; Ray follows its driver. The program asks for that
# itself and then becomes verl: Python code between fork and exec (preexec_fn) may hang where the parent has threads.
# A shell starts background jobs with SIGINT ignored, which would go on to verl, and it could not be ended in order.
_WITH_PARENT = (
    "import ctypes, os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)

LOOK_S = 0.2
GRACE_S = 15.0


def environment(*, cpu: bool, threads: int) -> dict[str, str]:
    """The environment of verl's processes, of any launch. Ray hands it on to its workers on this machine."""
    env = dict(os.environ)
    env[LAUNCH_MARK] = uuid.uuid4().hex
    # Ray changes neither the number of threads nor, below, which GPUs a worker sees.
    env["OMP_NUM_THREADS"] = str(threads)
    # TransferQueue asks for eight, and warns several times a step when there are fewer.
    env.setdefault("TQ_NUM_THREADS", str(min(8, usable_cores())))
    # Ray gives its workers the lowest priority but four: beside anything else that runs they would starve.
    env.setdefault("RAY_worker_niceness", "0")
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
    """Runs `python -m verl.trainer.main_ppo` to its end.

    on_record gets each line of metrics, on_look runs several times a second.

    env: from `environment`. server: starts verl's processes as forks of one that has imported verl already.

    Raises RunError with what went wrong when it fails. However it is left, none of its processes stays.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    env = {
        **env,
        RUN_DIR_VARIABLE: str(run.path.resolve()),
        "VERL_FILE_LOGGER_PATH": str(launch.metrics_file.resolve()),
    }
    if server is not None:
        interpreter = f"+ray_kwargs.ray_init.runtime_env.py_executable='{server.interpreter}'"
        command = [*server.command, *command[1:], interpreter]
    record_event("launch", folder=run.path, number=launch.number, after_step=launch.after_step)
    with launch.log_file.open("wb") as log, _started(command, log, env) as process:
        metrics, stepped = JsonTail(launch.metrics_file), False
        while True:
            # Asked before reading, so that what was written just before the end is read too.
            ended = process.poll() is not None
            for record in metrics.new():
                if "timing_s/step" in record["data"] and not stepped:
                    stepped = True
                    record_event("first-step", folder=run.path, number=launch.number, step=record["step"])
                on_record(record)
            on_look()
            if ended:
                break
            time.sleep(LOOK_S)
        code = process.returncode
    record_event("launch-ended", folder=run.path, number=launch.number, code=code)
    if code != 0:
        raise RunError(explain_end(launch, run, code))


@contextmanager
def _started(command: Sequence[str], log: Any, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    # Its own session: Ctrl-C in the terminal reaches this process alone, which then ends the others in order.
    if sys.platform == "linux":
        command = [sys.executable, "-S", "-c", _WITH_PARENT, *command]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True
    )  # fmt: skip
    try:
        yield process
    finally:
        with _no_interrupts():
            end_launch(process, env[LAUNCH_MARK])


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C again while all is being ended would leave half of it running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
            if process.environ().get(LAUNCH_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def explain_end(launch: Launch, run: RunFolder, code: int) -> str:
    """What is known of a run that ended badly: the error that was raised first, and where to read more."""
    with launch.log_file.open(encoding="utf-8", errors="replace") as lines:
        tail = list(deque((re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines), maxlen=4000))
    # Ray repeats an error at each process it passes; the innermost comes first. "(pid=...)" marks a worker's output.
    pattern = re.compile(r"^(?:\(.*?pid=.*?\) )?([\w.]*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
    errors = [(number, match[1]) for number, line in enumerate(tail) if (match := pattern.match(line))]
    # One of our own says most, and may have a line for each finding.
    ours = [(number, error) for number, error in errors if error.startswith("verl_shard.")]
    if ours:
        number, chosen = ours[0]
        more = itertools.takewhile(
            lambda line: line and not line.startswith(("(", "[", "Traceback", "During")), tail[number + 1 :]
        )
        chosen = "\n".join([chosen, *more])
    else:
        chosen = errors[0][1] if errors else (tail[-1] if tail else "it printed nothing")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    message = re.sub(r"^verl_shard[.\w]*: ", "", chosen)
    return f"verl ended with {how}: {message}\nIts output is in {launch.log_file}"


def run_plan(plan: Plan, overrides: Sequence[str], run: RunFolder, on_record: Callable[[dict[str, Any]], None]) -> None:
    """Runs verl's main program on `overrides` in the folder of a run; on_record gets each line of metrics.

    Raises RunError with what went wrong when it fails.
    """
    ranks = 1 if plan.backend == "device_map" else len(plan.inventory.nodes[0].cards)
    env = environment(cpu=False, threads=max(1, usable_cores() // ranks))
    alone = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    if plan.backend != "device_map" and alone not in os.environ:
        del env[alone]  # there each process sees the one GPU that is its own
    launch = run.new_launch()
    (run.path / "overrides.txt").write_text("\n".join(overrides) + "\n", encoding="utf-8")
    hydra = [f"hydra.run.dir={run.path.resolve() / 'launches' / f'{launch.number}.hydra'}", "hydra.output_subdir=."]

    def keep(record: dict[str, Any]) -> None:
        run.append_metrics(record)
        on_record(record)

    run_verl([*overrides, *hydra], run, env=env, launch=launch, on_record=keep)


def overrides_of_run(run: Path) -> list[str]:
    """What a run in the folder `run` needs of verl: its metrics in a file, and its checkpoints in its folder."""
    from verl_shard.verl_plugin.overrides import hydra_value

    values: dict[str, object] = {
        "trainer.logger": ["file", "console"],
        "trainer.project_name": "verl_shard",
        "trainer.experiment_name": run.resolve().name,
        "trainer.default_local_dir": run.resolve() / "checkpoints",
        "trainer.checkpoint_callback_class": "verl_shard.verl_plugin.checkpoints.CheckpointKeeper",
        "trainer.resume_mode": "disable",
    }
    return [f"{key}={hydra_value(value)}" for key, value in values.items()]
