"""Reads the facts from this machine, without changing it. Whatever may hang is a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from typing import Any, Literal

from verl_shard.diagnosis.doctor_child import MARK, WRONG_TOKEN
from verl_shard.diagnosis.doctor_facts import DriverGpu, Facts, Flash, Gpu, Ray, RayNode, Torch, Trouble
from verl_shard.diagnosis.doctor_machine import ray_address, read_machine

TIME_LIMIT_S = 60.0
"""For each look in a process of its own; they run side by side. A cold start of torch from a slow disk takes half a minute."""
_SMI = ("index", "uuid", "name", "driver_version", "compute_mode", "mig.mode.current", "memory.total", "memory.used")


def gather(time_limit_s: float = TIME_LIMIT_S, env: Mapping[str, str] | None = None) -> Facts:
    """The facts of this machine.

    time_limit_s: for each of the looks that take a while (nvidia-smi, torch, flash_attn, Ray), which run side by side.
    env: the environment to look at instead of this process's.
    """
    env = dict(os.environ if env is None else env)
    address, address_from = ray_address(env)
    with ThreadPoolExecutor(3) as pool:
        driver = pool.submit(read_driver, time_limit_s)
        torch = pool.submit(child, ["torch"], time_limit_s, env)
        ray = pool.submit(child, ["ray", address], time_limit_s, env)
        machine = read_machine(env)
        seen = as_torch(torch.result())
        # After torch, which would count what this look takes of each GPU as in use; and not at all where it is not there.
        look = util.find_spec("flash_attn") is not None and isinstance(seen, Torch)
        return Facts(
            python=platform.python_version(),
            system=platform.system(),
            driver=driver.result(),
            torch=seen,
            flash=as_flash(
                child(["flash"], time_limit_s, env) if look else Trouble("missing", "flash_attn is not installed")
            ),
            ray=as_ray(ray.result(), address, address_from),
            **machine,
        )


def child(
    look: Sequence[str], time_limit_s: float, env: Mapping[str, str], flags: Sequence[str] = ("-P",)
) -> dict[str, Any] | Trouble:
    """What a look in a process of its own found. One that hangs has said all but what it hung on, under "hung"."""
    command = [sys.executable, *flags, "-m", "verl_shard.diagnosis.doctor_child", *look]
    printed, code = run(command, time_limit_s, env)
    found: dict[str, Any] = {}
    for line in printed.splitlines():
        if line.startswith(MARK):
            found.update(json.loads(line.removeprefix(MARK)))
    if WRONG_TOKEN in printed:  # Ray writes it to stderr again and again, and raises something vague after 20 s
        found["error"] = f"{WRONG_TOKEN}: Authentication token is missing or incorrect"
    if "trouble" in found:
        return Trouble(found["trouble"], found["text"])
    if code is None:
        found["hung"] = f"no answer in {time_limit_s:g} s"
    elif code != 0:
        signalled = -code in {one.value for one in signal.Signals}
        found["crashed"] = f"the process ended with {signal.Signals(-code).name if signalled else f'exit code {code}'}"
    return found


def run(command: Sequence[str], time_limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, int | None]:
    """What a command printed, and its exit code: None when it had to be ended. One that cannot even be killed is left."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=None if env is None else dict(env), start_new_session=True,
        )  # fmt: skip
        code: int | None
        try:
            code = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # a process in the driver's hands dies when the driver lets go of it
        output.seek(0)
        return output.read(), code


def read_driver(time_limit_s: float, command: str = "nvidia-smi") -> tuple[DriverGpu, ...] | Trouble:
    """The GPUs as nvidia-smi lists them."""
    if shutil.which(command) is None:
        return Trouble("missing", "nvidia-smi is not installed")
    printed, code = run([command, f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"], time_limit_s)
    if code is None:
        return Trouble("hung", f"no answer in {time_limit_s:g} s")
    return parse_driver(printed, code)


def parse_driver(printed: str, code: int) -> tuple[DriverGpu, ...] | Trouble:
    """nvidia-smi's table; a row that is no row is what it has to say of a GPU that it cannot reach."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines()) if row]
    wrong = [", ".join(row) for row in rows if len(row) != len(_SMI) or not row[0].isdigit()]
    # "No devices were found" is an answer, and no fault of the driver.
    if "No devices were found" in printed:
        return ()
    if wrong or code != 0:
        return Trouble("failed", wrong[0] if wrong else f"exit code {code}")
    return tuple(
        DriverGpu(int(row[0]), row[1], row[2], row[3], row[4], row[5] == "Enabled", _mib(row[6]), _mib(row[7]))
        for row in rows
    )


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def as_torch(found: dict[str, Any] | Trouble) -> Torch | Trouble:
    """What the look at torch found. One that hung or crashed is Trouble, whatever it had found by then."""
    lost = _lost(found, f"torch {found['version']}" if isinstance(found, dict) and "version" in found else "torch")
    if lost is not None or isinstance(found, Trouble):
        return lost or Trouble("failed", "")
    gpus = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in found.pop("gpus", ()))
    return Torch(**{**found, "archs": tuple(found.get("archs", ())), "gpus": gpus})


def as_flash(found: dict[str, Any] | Trouble) -> Flash | Trouble:
    """What the look at flash_attn found."""
    lost = _lost(found, "flash_attn")
    if lost is not None or isinstance(found, Trouble):
        return lost or Trouble("failed", "")
    errors = {int(gpu): error for gpu, error in found.get("errors", {}).items()}
    return Flash(found["version"], tuple(found.get("ran_on", ())), errors)


def as_ray(found: dict[str, Any] | Trouble, address: str, address_from: str) -> Ray | Trouble:
    """What the look at Ray found. A cluster that does not answer in time is one that cannot be joined."""
    if isinstance(found, dict) and address and "version" in found and ("hung" in found or "crashed" in found):
        found["error"] = found.pop("hung", None) or found.pop("crashed")
    lost = _lost(found, "ray")
    if lost is not None or isinstance(found, Trouble):
        return lost or Trouble("failed", "")
    nodes = tuple(RayNode(**node) for node in found.pop("nodes", ()))
    return Ray(**found, address=address, address_from=address_from, nodes=nodes)


def _lost(found: dict[str, Any] | Trouble, what: str) -> Trouble | None:
    if isinstance(found, Trouble):
        return found
    kinds: tuple[tuple[str, Literal["hung", "failed"]], ...] = (("hung", "hung"), ("crashed", "failed"))
    for key, kind in kinds:
        if key in found:
            on = len(found.get("gpus", ()))
            return Trouble(kind, f"{what}: {found[key]}" + (f", after GPU {on - 1}" if on else ""))
    return None if "version" in found else Trouble("failed", f"{what}: said nothing")
