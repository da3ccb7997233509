"""Many GPUs on none: fake tensors on cuda:0..15 in a build of torch without CUDA.

`run_on_fake_gpus(code)` runs Python in a process of its own, in which the guard is loaded before torch. There
`torch.device("cuda", k)` works inside of FakeTensorMode, in forward and backward; `torch.cuda.is_available()` stays
False, and nothing is computed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("guard.cpp")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is installed"
    assert spec.origin is not None, "torch is a package on disk"
    return Path(spec.origin).parent


def build() -> Path:
    """The guard as a shared library, built with g++ once for each version of torch and of the source."""
    torch = _torch_folder()
    key = hashlib.sha256(_SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"verl_shard_fake_cuda_{os.getuid()}_{key}.so"
    if not made.exists():
        part = made.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-w", f"-I{torch}/include", str(_SOURCE)]
        command += ["-o", str(part), f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        part.replace(made)
    return made


def load() -> None:
    """Loads the guard. torch must not be imported yet."""
    assert "torch" not in sys.modules, "the guard has to be there before torch"
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)


def run_on_fake_gpus(code: str, **given: Any) -> Any:
    """Runs `code` with fake GPUs; it finds `given` as variables, and what it puts into `result` comes back by JSON."""
    script = f"from fake_cuda import load\nload()\nimport json\nglobals().update(json.loads({json.dumps(given)!r}))\n"
    script += textwrap.dedent(code) + "\nprint('RESULT ' + json.dumps(result))\n"
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
