"""A process that has imported verl once, and forks into each of verl's processes on this machine.

verl's trainer is nine processes, and each imports torch, transformers, Ray and verl anew: seven CPU-seconds apiece,
one after the other for the most part, so that a small machine is busy for most of a minute before the first step. A
fork of a process that has imported them takes milliseconds. Ray is told to start its workers through
`fork_client.py`, which is a stand-in for the interpreter.

For runs on the CPU only: torch and verl look for GPUs when they are imported, and CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = (
    "hydra",
    "transfer_queue",
    "verl.trainer.constants_ppo",
    "verl.utils.config",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.experimental.reward_loop",
    "verl_shard.verl_plugin.engine",
    "verl_shard.verl_plugin.rollout.replica",
    "verl_shard.verl_plugin.agent_loop",
    "verl_shard.verl_plugin.sampler",
)
LAUNCH_MARK = "VERL_SHARD_LAUNCH_ID"
"""Environment variable by which the processes of a launch are known, however they were started."""

FIRST_JOB = "01000000"
"""Ray's core reads the job that its process works for when it is imported. A cluster's first driver has this job, and the
launch that a fork server serves has a cluster of its own; a worker of any other job becomes an ordinary interpreter."""

CLIENT = Path(__file__).with_name("fork_client.py")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ForkServer:
    """A running fork server. `interpreter` starts a program through it."""

    socket: str

    @property
    def command(self) -> list[str]:
        """What stands in for a Python interpreter, as arguments."""
        return [sys.executable, "-S", str(CLIENT), self.socket]

    @property
    def interpreter(self) -> str:
        """The same, as Ray's `py_executable`, which goes through a shell."""
        return shlex.join(self.command)


def can_fork() -> bool:
    """Whether this machine can have a fork server: Linux, and no GPU in sight of torch."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


@contextmanager
def fork_server(env: Mapping[str, str]) -> Iterator[ForkServer]:
    """Starts a fork server with the environment `env`, at once; it serves as soon as it has imported. Ends it on exit."""
    with tempfile.TemporaryDirectory(prefix="verl_shard_") as folder:
        path = os.path.join(folder, "fork")
        # Listening before the process starts: a client that is early waits in the queue instead of failing.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(64)
            command = [sys.executable, "-m", "verl_shard.verl_plugin.fork_server", str(listener.fileno())]
            # It outlives a launch, so it does not carry a launch's mark; its programs are reached through their clients.
            own = {name: value for name, value in env.items() if name != LAUNCH_MARK}
            process = subprocess.Popen(
                command, env=own, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            yield ForkServer(path)
        finally:
            process.terminate()
            process.wait()


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class _Program:
    """A forked program and the connection of its client; `pid` is None until the request has come."""

    pid: int | None = None


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.programs: dict[socket.socket, _Program] = {}
        # A child's end wakes the selector through this pipe.
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        signal.set_wakeup_fd(self.wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(self.wake_read, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        """Answers clients for ever. In each forked child it returns the request to run."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.programs[connection] = _Program()
                    self.selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj == self.wake_read:
                    os.read(self.wake_read, 4096)
                    self._reap()
                elif (request := self._read(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return request

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        program = self.programs.get(connection)
        if program is None:
            return None
        header, fds, _, _ = socket.recv_fds(connection, 8, 3)
        if len(header) < 8 or program.pid is not None:
            # The client is gone: whoever wanted the program does not want it any more.
            if program.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(program.pid, signal.SIGKILL)
            self._forget(connection)
            return None
        size, data = int.from_bytes(header, "big"), b""
        while len(data) < size and (piece := connection.recv(size - len(data))):
            data += piece
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            self.listener.close()
            for other in self.programs:
                other.close()
            self.selector.close()
            request: dict[str, Any] = json.loads(data)
            return request
        for fd in fds:
            os.close(fd)
        program.pid = pid
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % pid)
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for connection, program in list(self.programs.items()):
                if program.pid == pid:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"%d\n" % status)
                    self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        del self.programs[connection]
        connection.close()


def _run(request: dict[str, Any]) -> None:
    """Becomes the program: `-m MODULE ...` or `[flags] FILE ...`, as an interpreter would."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if os.environ.get("RAY_JOB_ID", FIRST_JOB) != FIRST_JOB:
        os.execv(sys.executable, [sys.executable, *request["argv"]])
    import numpy as np

    np.random.seed(int.from_bytes(os.urandom(4), "big"))
    argv: list[str] = request["argv"]
    while argv[0].startswith("-") and argv[0] != "-m":
        argv = argv[1:]
    # As an interpreter does: imports are looked for first in the working directory, or in the program's folder.
    if argv[0] == "-m":
        sys.argv = [argv[1], *argv[2:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    """Imports, then serves the listening socket whose number is the argument."""
    die_with_parent()
    os.environ.update(RAY_JOB_ID=FIRST_JOB, RAY_RAYLET_PID=str(os.getpid()))
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        importlib.import_module(module)
    _run(_Server(listener).serve())


if __name__ == "__main__":
    main()
