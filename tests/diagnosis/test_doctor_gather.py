"""Reading a machine: what hangs or crashes is ended, what is missing is said, and files are read as the kernel writes them."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import verl_shard
from verl_shard.diagnosis.doctor_child import MARK, look_at_flash, look_at_ray, main, reach
from verl_shard.diagnosis.doctor_facts import DriverGpu, Flash, Gpu, Ray, RayNode, Torch, Trouble
from verl_shard.diagnosis.doctor_gather import as_flash, as_ray, as_torch, child, parse_driver, read_driver, run
from verl_shard.diagnosis.doctor_machine import (
    kernel_driver,
    matters,
    pci_gpus,
    places,
    ray_address,
    reaches,
    read_disk,
    read_machine,
    taken,
    within,
)  # fmt: skip

ROOT = str(Path(verl_shard.__file__).parent.parent)
ROW = "0, GPU-43d821bf-ba08, NVIDIA H200, 580.159.04, Default, Disabled, 143771, 21007\n"  # as an H200 wrote it


def bare(*folders: Path) -> dict[str, str]:
    """The environment of a Python that has this package, what is in some folders, and nothing else."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), ROOT])}


def fake(folder: Path, name: str, source: str) -> Path:
    """A package of that name, in a folder of its own."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


@pytest.mark.parametrize("look", ["torch", "flash", "ray"])
def test_without_the_package_it_is_missing(look: str) -> None:
    found = child([look, ""], 20, bare(), flags=("-S",))
    # flash_attn needs torch, and says that torch is not there.
    assert found == Trouble(
        "failed" if look == "flash" else "missing", f"No module named '{'ray' if look == 'ray' else 'torch'}'"
    )


def test_one_that_hangs_is_ended_and_has_said_what_it_found(tmp_path: Path) -> None:
    source = f"print('\\n{MARK}' + '{{\"version\": \"9.9\"}}', flush=True)\nimport time\ntime.sleep(60)\n"
    before = time.monotonic()
    found = child(["torch"], 1.5, bare(fake(tmp_path, "torch", source)), flags=("-S",))
    assert time.monotonic() - before < 30
    assert as_torch(found) == Trouble("hung", "torch 9.9: no answer in 1.5 s")


def test_one_that_crashes_is_no_crash_here(tmp_path: Path) -> None:
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    found = child(["torch"], 20, bare(fake(tmp_path, "torch", source)), flags=("-S",))
    assert as_torch(found) == Trouble("failed", "torch: the process ended with SIGSEGV")


def test_a_flash_attn_of_another_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
    fake(tmp_path, "torch", "")
    found = child(["flash"], 20, bare(fake(tmp_path, "flash_attn", source)), flags=("-S",))
    assert as_flash(found) == Trouble("failed", "flash_attn_2_cuda.so: undefined symbol: _ZN3c10")


def test_a_command_that_is_ended_takes_what_it_started_with_it(tmp_path: Path) -> None:
    printed, code = run(["sh", "-c", f"echo begun; sleep 60 & echo $! > {tmp_path}/pid; wait"], 1.0)
    assert (printed, code) == ("begun\n", None)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while (state := _state(pid)) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state in ("", "Z")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def test_an_answer_that_does_not_come() -> None:
    assert within(5, lambda: 7) == 7
    assert within(0.05, lambda: time.sleep(1)) == Trouble("hung", "no answer in 0.05 s")
    assert within(5, lambda: os.stat("/nowhere/at/all")) == Trouble("failed", "No such file or directory")


def test_nvidia_smi() -> None:
    gpu = DriverGpu(
        0, "GPU-43d821bf-ba08", "NVIDIA H200", "580.159.04", "Default", False, 143771 * 2**20, 21007 * 2**20
    )
    assert parse_driver(ROW, 0) == (gpu,)
    assert parse_driver("1, GPU-1, NVIDIA A100, 570.1, [N/A], Enabled, [N/A], [N/A]\n", 0) == (
        DriverGpu(1, "GPU-1", "NVIDIA A100", "570.1", "[N/A]", True, None, None),
    )
    assert parse_driver("No devices were found\n", 6) == ()
    lost = (
        "Unable to determine the device handle for GPU0000:4F:00.0: GPU is lost. Reboot the system to recover this GPU"
    )
    assert parse_driver(lost + "\n", 15) == Trouble("failed", lost)
    assert parse_driver(ROW + lost + "\n", 0) == Trouble("failed", lost)
    assert parse_driver("", 9) == Trouble("failed", "exit code 9")


def test_an_nvidia_smi_that_hangs(tmp_path: Path) -> None:
    script = tmp_path / "smi"
    script.write_text("#!/bin/sh\nsleep 60\n")
    script.chmod(0o755)
    assert read_driver(0.3, str(script)) == Trouble("hung", "no answer in 0.3 s")
    assert read_driver(0.3, str(tmp_path / "none")) == Trouble("missing", "nvidia-smi is not installed")


def test_what_the_looks_say_becomes_facts() -> None:
    gpu = {"index": 0, "name": "NVIDIA H200", "memory": 150, "free": 149, "capability": [9, 0], "error": ""}
    said = {
        "version": "2.11.0+cu130",
        "cuda": "13.0",
        "rocm": None,
        "driver_cuda": 13000,
        "archs": ["sm_90"],
        "gpus": [gpu],
    }
    seen = Gpu(0, "NVIDIA H200", 150, 149, (9, 0))
    assert as_torch(dict(said)) == Torch("2.11.0+cu130", "13.0", None, ("sm_90",), 13000, "", (seen,))
    assert as_torch({**said, "hung": "no answer in 60 s"}) == Trouble(
        "hung", "torch 2.11.0+cu130: no answer in 60 s, after GPU 0"
    )
    assert as_torch({}) == Trouble("failed", "torch: said nothing")
    assert as_flash({"version": "2.8.3", "ran_on": [0], "errors": {"1": "no kernel image"}}) == Flash(
        "2.8.3", (0,), {1: "no kernel image"}
    )
    nodes = [{"host": "a", "gpus": 8.0, "cpus": 64.0}]
    made = as_ray(
        {"version": "2.60.0", "local_gpus": 8, "local_cpus": 64.0, "nodes": nodes, "free_gpus": 8.0},
        "a:6379",
        "RAY_ADDRESS",
    )
    assert made == Ray("2.60.0", 8, 64.0, "a:6379", "RAY_ADDRESS", "", (RayNode("a", 8.0, 64.0),), 8.0)
    hung = {"version": "2.60.0", "hung": "no answer in 60 s"}
    assert as_ray(dict(hung), "a:6379", "RAY_ADDRESS") == Ray(
        "2.60.0", address="a:6379", address_from="RAY_ADDRESS", error="no answer in 60 s"
    )
    assert as_ray(dict(hung), "", "") == Trouble("hung", "ray: no answer in 60 s")


def test_an_address_that_nobody_listens_on() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert "refused" in reach(f"127.0.0.1:{port}")
        server.listen(1)
        assert reach(f"127.0.0.1:{port}") == reach(f"ray://127.0.0.1:{port}") == ""
        assert taken(port)
    assert reach("6379") == reach("head") == "not of the form host:port"


class Say(dict[str, Any]):
    """Takes what a look says."""

    def __call__(self, found: dict[str, Any]) -> None:
        self.update(found)


def test_ray_is_not_asked_to_join_what_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "ray", "__version__ = '2.60.0'\ndef init(**_): raise AssertionError('joined')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    with socket.socket() as server:  # bound, and not listening
        server.bind(("127.0.0.1", 0))
        say = Say()
        look_at_ray(say, f"127.0.0.1:{server.getsockname()[1]}")
    assert (say["version"], say["local_cpus"], say["local_gpus"]) == ("2.60.0", None, None)
    assert "refused" in say["error"]
    say = Say()
    look_at_ray(say, "auto")
    assert say["error"] == "no cluster was started here"
    say = Say()
    look_at_ray(say, "http://127.0.0.1:8265")
    assert "error" not in say
    monkeypatch.delitem(sys.modules, "ray")


def test_a_cluster_that_asks_for_a_token_says_so_on_stderr_only(tmp_path: Path) -> None:
    # What Ray 2.60 writes when it is to join a cluster that `ray start` began, and then raises.
    source = (
        "import sys\n__version__ = '2.60.0'\n"
        "def init(**_):\n"
        "    print('gcs_client.cc:210: Failed to get cluster ID from GCS server: RPC error: InvalidAuthToken: '\n"
        "          'Authentication token is missing or incorrect', file=sys.stderr)\n"
        "    raise ConnectionError('Failed to connect to Ray cluster at ...')\n"
    )
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = child(["ray", address], 20, bare(fake(tmp_path, "ray", source)), flags=("-S",))
    assert as_ray(found, address, "RAY_ADDRESS") == Ray(
        "2.60.0", address=address, address_from="RAY_ADDRESS",
        error="InvalidAuthToken: Authentication token is missing or incorrect",
    )  # fmt: skip


def test_a_cluster_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "__version__ = '2.60.0'\n"
        "def init(**given): assert given['address'].startswith('127.0.0.1:')\n"
        "def nodes(): return [{'Alive': True, 'NodeManagerHostname': 'a', 'Resources': {'GPU': 8.0, 'CPU': 64.0}},\n"
        "    {'Alive': True, 'NodeManagerHostname': 'b', 'Resources': {'CPU': 4.0}},\n"
        "    {'Alive': False, 'NodeManagerHostname': 'c', 'Resources': {'GPU': 8.0}}]\n"
        "def available_resources(): return {'GPU': 6.0}\n"
        "def shutdown(): pass\n"
    )
    fake(tmp_path, "ray", source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    say = Say()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        look_at_ray(say, f"127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.delitem(sys.modules, "ray")
    assert (say["free_gpus"], "error" in say) == (6.0, False)
    assert say["nodes"] == [{"host": "a", "gpus": 8.0, "cpus": 64.0}, {"host": "b", "gpus": 0.0, "cpus": 4.0}]


def test_a_look_that_fails_is_told_and_ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert main(["flash"]) == 0
    assert capsys.readouterr().out.startswith(f'\n{MARK}{{"trouble": "missing", "text": "import of flash_attn halted')
    with pytest.raises(ImportError):
        look_at_flash(Say())


def test_which_cluster_ray_would_join(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    left = tmp_path / "ray" / "ray_current_cluster"
    env = {"RAY_TMPDIR": str(tmp_path)}
    assert ray_address(env) == ("", "")
    assert ray_address({**env, "RAY_ADDRESS": "auto"}) == ("auto", "RAY_ADDRESS")
    left.write_text("10.0.0.1:6379\n")
    assert ray_address(env) == ray_address({**env, "RAY_ADDRESS": "auto"}) == ("10.0.0.1:6379", str(left))
    assert ray_address({**env, "RAY_ADDRESS": "10.0.0.2:6379"}) == ("10.0.0.2:6379", "RAY_ADDRESS")
    assert ray_address({**env, "RAY_ADDRESS": "local"}) == ("", "")


def test_the_kernel_module_and_the_bus(tmp_path: Path) -> None:
    version = tmp_path / "version"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)"
    version.write_text(f"{line}\nGCC version:  gcc 15.3.0\n")
    assert kernel_driver(version) == "580.159.04"
    assert kernel_driver(tmp_path / "none") is None
    for name, vendor, kind in [
        ("a", "0x10de", "0x030200"),
        ("b", "0x10de", "0x040300"),
        ("c", "0x8086", "0x030000"),
        ("d", "0x10de", "0x030000"),
    ]:
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n")
    assert (pci_gpus(tmp_path / "pci"), pci_gpus(tmp_path / "none")) == (2, 0)


def test_a_disk_is_read_at_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    disk = read_disk("models", tmp_path / "not" / "yet")
    assert (disk.path, disk.device, disk.writable, disk.error) == (
        f"{tmp_path}/not/yet",
        tmp_path.stat().st_dev,
        True,
        "",
    )
    assert 0 < disk.free <= disk.total


def test_places_follow_the_variables(tmp_path: Path) -> None:
    env = {"HF_HOME": "/big/hf", "TMPDIR": "/big/tmp"}
    assert [(use, str(path)) for use, path in places(env)][:2] == [
        ("models", "/big/hf/hub"),
        ("temporary files", "/big/tmp"),
    ]
    assert str(places({**env, "HF_HUB_CACHE": "/hub"})[0][1]) == "/hub"
    assert str(places({"XDG_CACHE_HOME": "/cache"})[0][1]) == "/cache/huggingface/hub"


def test_secrets_are_left_out() -> None:
    assert [
        name for name in ("NCCL_DEBUG", "HF_TOKEN", "HF_HOME", "RAY_AUTH_MODE", "PATH", "VLLM_API_KEY") if matters(name)
    ] == [
        "NCCL_DEBUG",
        "HF_HOME",
    ]


def test_this_machine() -> None:
    found = read_machine({"NCCL_DEBUG": "INFO", "MASTER_PORT": "none", "HOME": "/root"})
    assert found["env"] == {"NCCL_DEBUG": "INFO", "MASTER_PORT": "none"}
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert 0 < found["ram_available"] <= found["ram"]
    assert "lo" in found["interfaces"]
    assert found["packages"]["pytest"].version == pytest.__version__
    assert reaches("127.0.0.1")
    assert found["packages"]["verl-shard"].python == "<3.13,>=3.11"
    assert "torch>=2.11" in found["packages"]["verl-shard"].requires
