"""The fork server and its client: to whoever starts it, the client is the interpreter that runs the program."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_shard.verl_plugin import fork_server as module
from verl_shard.verl_plugin.fork_server import CLIENT, LAUNCH_MARK, ForkServer, fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")

# The server with one module to import instead of verl and all that it imports.
SERVER = """
from verl_shard.verl_plugin import fork_server
fork_server.MODULES = ("numpy",)
fork_server.main()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    script = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(SERVER)
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "verl_shard.verl_plugin.fork_server"]
        return popen([command[0], str(script), *command[3:]], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.subprocess, "Popen", start)
        with fork_server({**os.environ, LAUNCH_MARK: "a-launch", "OMP_NUM_THREADS": "1"}) as running:
            patch.undo()
            yield running


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """program(text): a file with this program."""

    def make(text: str) -> str:
        file = tmp_path / "program.py"
        file.write_text(text)
        return str(file)

    return make


def _run(server: ForkServer, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*server.command, *arguments], capture_output=True, text=True, timeout=60, **options)


def _wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text().strip()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _alive(pid)


def test_a_program_sees_what_it_would_from_an_interpreter(server: ForkServer, program: Any, tmp_path: Path) -> None:
    file = program(
        "import json, os, sys\n"
        "import beside\n"
        "print(json.dumps([__name__, __file__, sys.argv, os.getcwd(), dict(os.environ), beside.value, sys.stdin.read()]))\n"
        "print('to stderr', file=sys.stderr)\n"
        "print('numpy' in sys.modules)\n"
    )
    (tmp_path / "beside.py").write_text("value = 7\n")
    (tmp_path / "folder").mkdir()
    env = {"PATH": os.environ["PATH"], "ONLY": "this", "RAY_JOB_ID": "01000000"}
    ours = _run(server, "-u", file, "a b", "--flag", cwd=tmp_path / "folder", env=env, input="typed")
    options: dict[str, Any] = {"cwd": tmp_path / "folder", "env": env, "input": "typed"}
    plain = subprocess.run(
        [sys.executable, "-u", file, "a b", "--flag"], capture_output=True, text=True, timeout=60, **options
    )
    assert ours.stdout == plain.stdout.replace("False\n", "True\n")
    assert ours.stderr == plain.stderr == "to stderr\n"
    assert ours.returncode == plain.returncode == 0


def test_a_module_is_run_by_name(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("import sys\nprint(__name__, sys.argv[0].endswith('here.py'), sys.argv[1:])\n")
    ran = _run(server, "-m", "here", "x", cwd=tmp_path)
    assert (ran.stdout, ran.returncode) == ("__main__ True ['x']\n", 0), ran.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('no')", 1),
        ("raise ValueError('no')", 1),
        ("import os; os._exit(255)", 255),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_exit_is_the_programs(text: str, code: int, server: ForkServer, program: Any) -> None:
    ran = _run(server, program(text))
    assert ran.returncode == code
    assert ("ValueError: no" in ran.stderr) == ("ValueError" in text)


def test_programs_run_side_by_side_and_apart(server: ForkServer, program: Any) -> None:
    file = program(
        "import random, sys, numpy\n"
        "sys.modules['numpy'].mark = getattr(numpy, 'mark', 0) + 1\n"
        "print(sys.argv[1], numpy.mark, numpy.random.rand())"
    )
    running = [subprocess.Popen([*server.command, file, str(n)], stdout=subprocess.PIPE, text=True) for n in range(6)]
    outputs = [process.communicate(timeout=60)[0].split() for process in running]
    assert [(number, mark) for number, mark, _ in outputs] == [(str(n), "1") for n in range(6)]
    assert len({drawn for *_, drawn in outputs}) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_program(number: int, server: ForkServer, program: Any, tmp_path: Path) -> None:
    file = program(
        "import signal, sys, time, pathlib\n"
        "def handle(number, frame):\n"
        "    print('got', number); sys.exit(3)\n"
        f"signal.signal({int(number)}, handle)\n"
        "pathlib.Path(sys.argv[1]).write_text('ready\\n')\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [*server.command, file, str(tmp_path / "ready")], stdout=subprocess.PIPE, text=True
    ) as client:
        _wait_for(tmp_path / "ready")
        client.send_signal(number)
        assert client.communicate(timeout=30)[0] == f"got {int(number)}\n"
    assert client.returncode == 3


def test_killing_the_client_kills_the_program(server: ForkServer, program: Any, tmp_path: Path) -> None:
    file = program(
        "import os, sys, time, pathlib\npathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}\\n')\ntime.sleep(60)\n"
    )
    with subprocess.Popen([*server.command, file, str(tmp_path / "pid")]) as client:
        pid = int(_wait_for(tmp_path / "pid"))
        assert pid != client.pid
        assert _alive(pid)
        client.kill()
    assert _gone(pid)
    assert _run(server, program("print(1)")).stdout == "1\n"


def test_a_worker_of_another_job_is_an_ordinary_interpreter(server: ForkServer, program: Any) -> None:
    file = program("import sys; print('numpy' in sys.modules, sys.argv[1:]); sys.exit(4)")
    ran = _run(server, file, "x", env={**os.environ, "RAY_JOB_ID": "02000000"})
    assert (ran.stdout, ran.returncode) == ("False ['x']\n", 4)


def test_the_server_does_not_carry_the_mark_of_a_launch(server: ForkServer, program: Any) -> None:
    text = f"import os; print(b'{LAUNCH_MARK}' in open(f'/proc/{{os.getppid()}}/environ', 'rb').read())"
    assert _run(server, program(text)).stdout == "False\n"


def test_without_a_server_the_client_is_an_ordinary_interpreter(program: Any, tmp_path: Path) -> None:
    ran = _run(ForkServer(str(tmp_path / "nobody")), program("import sys; print(sys.argv[1:]); sys.exit(5)"), "x")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("['x']\n", "", 5)


@pytest.mark.parametrize("before_the_request", [True, False])
def test_a_server_that_ends_before_it_answers_is_none(before_the_request: bool, program: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "fork"))
        listener.listen()

        def hang_up() -> None:
            connection, _ = listener.accept()
            if not before_the_request:
                connection.recv(1 << 20)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        ran = _run(ForkServer(str(tmp_path / "fork")), program("print('by itself')"))
        thread.join()
    assert (ran.stdout, ran.returncode) == ("by itself\n", 0)


def _request(connection: socket.socket) -> dict[str, Any]:
    """Reads all of a client's request."""
    header, fds, _, _ = socket.recv_fds(connection, 8, 3)
    for fd in fds:
        os.close(fd)
    size, data = int.from_bytes(header, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    request: dict[str, Any] = json.loads(data)
    return request


def test_an_answer_that_comes_with_the_programs_end_is_read_as_two(tmp_path: Path) -> None:
    """A short program ends before its client has read its id: both numbers are there at once."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "fork"))
        listener.listen()
        wait_status = 6 << 8
        client = subprocess.Popen([sys.executable, "-S", str(CLIENT), str(tmp_path / "fork"), "program.py"])
        connection, _ = listener.accept()
        with connection:
            _request(connection)
            connection.sendall(f"{client.pid}\n{wait_status}\n".encode())
            assert client.wait(30) == 6


def test_a_server_that_hangs_up_while_the_program_runs_is_a_failure(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "fork"))
        listener.listen()
        client = subprocess.Popen([sys.executable, "-S", str(CLIENT), str(tmp_path / "fork"), "program.py"])
        connection, _ = listener.accept()
        with connection:
            _request(connection)
            connection.sendall(f"{client.pid}\n".encode())
        assert client.wait(30) == 1


def test_the_interpreter_for_ray_goes_through_a_shell(server: ForkServer, program: Any) -> None:
    ran = subprocess.run(
        f"{server.interpreter} {program('import sys; print(sys.argv[1])')} 'a b'",
        shell=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.stdout == "a b\n"


def test_programs_end_with_the_server(program: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    file = program(
        "import os, sys, time, pathlib\npathlib.Path(sys.argv[1]).write_text(f'{os.getpid()}\\n')\ntime.sleep(60)\n"
    )
    popen = subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.subprocess, "Popen", lambda c, **o: popen([c[0], str(script), *c[3:]], **o))
        with fork_server(os.environ) as running:
            patch.undo()
            client = popen([*running.command, file, str(tmp_path / "pid")])
            pid = int(_wait_for(tmp_path / "pid"))
    assert client.wait(30) == 1
    assert _gone(pid)
