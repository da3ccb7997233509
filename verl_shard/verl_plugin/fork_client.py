"""Stands in for a Python interpreter: has the fork server run a program, and is that program to whoever started this one.

Run as `python -S fork_client.py SOCKET PROGRAM [ARGUMENT ...]`; without a server it becomes an ordinary interpreter.
It imports nothing of this package, since it is started once for each worker of Ray and should cost milliseconds.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def main() -> int:
    path, arguments = sys.argv[1], sys.argv[2:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        request = {"argv": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(data)
        # A line for each answer: a short program's end may be there with its id.
        answers = connection.makefile("rb")
        child = int(answers.readline())
    except (OSError, ValueError):
        # No server, or one that ended before it answered.
        connection.close()
        os.execv(sys.executable, [sys.executable, *arguments])

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    # The server answers with the program's wait status, and hangs up if it goes before it.
    answer = answers.readline()
    if not answer:
        return 1
    status = int(answer)
    if os.WIFSIGNALED(status):
        death = os.WTERMSIG(status)
        if death != signal.SIGKILL:
            signal.signal(death, signal.SIG_DFL)
        os.kill(os.getpid(), death)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
