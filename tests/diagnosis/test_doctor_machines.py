"""Machines that are not here: a sound one with eight GPUs, and all that may be wrong with it, each found and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verl_shard.diagnosis.doctor import examine
from verl_shard.diagnosis.doctor_facts import (
    Check,
    Disk,
    DriverGpu,
    Facts,
    Flash,
    Gpu,
    Package,
    Ray,
    RayNode,
    Torch,
    Trouble,
)  # fmt: skip

GIB = 2**30
VERL = (
    "ray[default]>=2.41.0", "tensordict!=0.9.0,<=0.10.0,>=0.8.0", "transformers!=5.6.0,<5.11,>=5.5.3", "numpy>=2.0.0",
    'vllm==0.24.0; extra == "vllm"', 'torch==2.11.0; extra == "vllm"', 'TransferQueue>=0.1.10; extra == "verl-core"',
)  # fmt: skip
US = (
    "torch>=2.11", "transformers!=5.6.0,>=5.5.3", "accelerate>=1.10", 'verl<0.10,>=0.9.1; extra == "verl"',
    'transformers<5.11; extra == "verl"', 'TransferQueue>=0.1.10; extra == "verl"', 'flash-attn>=2.8.3; extra == "flash-attn"',
)  # fmt: skip
PACKAGES = {
    "verl-shard": Package("0.1.0", US, "<3.13,>=3.11"),
    "verl": Package("0.9.1", VERL, "<3.13,>=3.10"),
    "torch": Package("2.11.0"),
    "transformers": Package("5.10.4"),
    "accelerate": Package("1.15.0"),
    "ray": Package("2.60.0"),
    "tensordict": Package("0.10.0"),
    "transferqueue": Package("0.1.11"),
    "numpy": Package("2.4.6"),
    "flash-attn": Package("2.8.3"),
    "nvidia-nccl-cu13": Package("2.28.9"),
}
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB + GIB // 2, (9, 0))
GPUS = tuple(replace(H100, index=index) for index in range(8))
DRIVER = tuple(DriverGpu(index, f"GPU-{index}a{index}b", H100.name, "580.65.06") for index in range(8))
TORCH = Torch(
    "2.11.0+cu130", "13.0", archs=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"), driver_cuda=13000, gpus=GPUS,
    nccl="2.28.9", peers=True, pin_error="",
)  # fmt: skip
SOUND = Facts(
    python="3.12.3", packages=PACKAGES, plugins=("verl_shard",), pci_gpus=8, kernel_driver="580.65.06", driver=DRIVER,
    torch=TORCH, flash=Flash("2.8.3", tuple(range(8))), ray=Ray("2.60.0", 8, 192.0), cpus=192, ram=2048 * GIB,
    ram_available=2000 * GIB, shm=1024 * GIB, shm_free=1024 * GIB, open_files=1048576, overcommit=0,
    disks=(
        Disk("models", "/data/hf", 1, 8000 * GIB, 4000 * GIB), Disk("temporary files", "/tmp", 2, 1000 * GIB, 900 * GIB),
        Disk("this folder", "/data/run", 1, 8000 * GIB, 4000 * GIB),
    ),
    host="node1", host_address="10.0.0.1", reaches_itself=True, interfaces=("eth0", "eth1", "lo"),
)  # fmt: skip
NO_GPU = replace(
    SOUND, pci_gpus=0, kernel_driver=None, driver=Trouble("missing", "nvidia-smi is not installed"), torch=Torch("2.11.0+cpu"),
    flash=Trouble("missing", "flash_attn is not installed"), ray=Ray("2.60.0", 0, 192.0),
)  # fmt: skip


def bad(facts: Facts) -> list[Check]:
    """What is not well with a machine."""
    return [check for check in examine(facts).checks if check.verdict != "ok"]


def torch(**changes: Any) -> dict[str, Any]:
    return {"torch": replace(TORCH, **changes)}


def packages(**versions: str | None) -> dict[str, Any]:
    """Other versions by name ("_" for "-"); None is not installed."""
    changed: dict[str, Package] = dict(PACKAGES)
    for name, version in versions.items():
        key = name.replace("_", "-")
        before = changed.pop(key, Package(""))
        if version is not None:
            changed[key] = replace(before, version=version)
    return {"packages": changed}


def one_gpu(**changes: Any) -> tuple[Gpu, ...]:
    return (replace(H100, **changes), *GPUS[1:])


def cluster(*nodes: tuple[str, float, float], free: float | None = None, **more: Any) -> dict[str, Any]:
    made = tuple(RayNode(*node) for node in nodes)
    free_gpus = sum(node.gpus for node in made) if free is None else free
    ray = Ray("2.60.0", 8, 192.0, "10.0.0.1:6379", "RAY_ADDRESS", nodes=made, free_gpus=free_gpus, **more)
    return {"ray": ray, "env": {"RAY_ADDRESS": "10.0.0.1:6379"}}


V100 = {"name": "Tesla V100-SXM2-32GB", "capability": (7, 0), "memory": 32 * GIB, "free": 32 * GIB}
V100S = tuple(replace(gpu, **V100) for gpu in GPUS)  # type: ignore[arg-type]

WRONG: dict[str, tuple[dict[str, Any], list[tuple[str, str, str]], str]] = {
    # name: what is other than on the sound machine, what is found (verdict, code, name), a part of the first fix
    "python 3.13": ({"python": "3.13.1"}, [("fault", "python-version", "Python")], "3.11 or 3.12"),
    "transformers 5.11": (
        packages(transformers="5.11.0"),
        [("fault", "package-version", "transformers")], '"transformers>=5.5.3,<5.11,!=5.6.0"'),
    "transformers 5.6.0": (packages(transformers="5.6.0"), [("fault", "package-version", "transformers")], "!=5.6.0"),
    "tensordict 0.11": (
        packages(tensordict="0.11.0"),
        [("fault", "package-version", "tensordict")], '"tensordict>=0.8.0,<=0.10.0,!=0.9.0"'),
    "TransferQueue missing": (
        packages(transferqueue=None),
        [("fault", "package-missing", "TransferQueue")], '"transferqueue>=0.1.10"'),
    "verl 0.10": (packages(verl="0.10.0"), [("fault", "package-version", "verl")], '"verl>=0.9.1,<0.10"'),
    "an old torch": (packages(torch="2.9.1+cu128"), [("fault", "package-version", "torch")], '"torch>=2.11"'),
    "numpy 1": (packages(numpy="1.26.4"), [("fault", "package-version", "numpy")], '"numpy>=2.0.0"'),
    "an old flash-attn": (packages(flash_attn="2.6.3"), [("fault", "package-version", "flash-attn")], ">=2.8.3"),
    "vllm that verl does not pin": (
        packages(vllm="0.25.0"),
        [("warning", "package-version", "vllm")], '"vllm==0.24.0"'),
    "torch that verl's vllm does not pin": (
        packages(vllm="0.24.0", torch="2.13.0"), [("warning", "package-version", "torch")], '"torch==2.11.0"'),
    "no verl, no ray": (
        {**packages(verl=None, ray=None, tensordict=None, transferqueue=None), "ray": Trouble("missing", "ray is not installed")},
        [("warning", "verl-not-installed", "verl")], '"verl_shard[verl]"'),
    "verl without ray": (
        {**packages(ray=None), "ray": Trouble("missing", "ray is not installed")},
        [("fault", "package-missing", "ray"), ("fault", "ray-missing", "Ray")], '"ray>=2.41.0"'),
    "not installed": (
        {"packages": {k: v for k, v in PACKAGES.items() if k != "verl-shard"}},
        [("warning", "not-installed", "verl_shard")], "--editable"),
    "no entry point": ({"plugins": ()}, [("fault", "plugin-not-loaded", "verl_shard")], "Install verl_shard again"),
    "plugins off": (
        {"env": {"VERL_USE_EXTERNAL_PLUGINS": "none"}},
        [("fault", "plugin-not-loaded", "verl_shard")], "VERL_USE_EXTERNAL_PLUGINS"),
    "pynvml": (packages(pynvml="13.0.1"), [("warning", "pynvml", "pynvml")], "nvidia-ml-py"),

    "a mixed driver on eight GPUs": (
        {"kernel_driver": "570.124.06"},
        [("fault", "driver-mixed", "driver")], "Reboot"),
    "nvidia-smi says mismatch": (
        {"driver": Trouble("failed", "Failed to initialize NVML: Driver/library version mismatch")},
        [("fault", "driver-mixed", "driver")], "Reboot"),
    "nvidia-smi hangs": (
        {"driver": Trouble("hung", "no answer in 60 s")},
        [("fault", "driver-hung", "driver")], "Xid"),
    "a GPU is lost": (
        {"driver": Trouble("failed", "Unable to determine the device handle for GPU0: GPU is lost")},
        [("fault", "driver-failed", "driver")], "driver"),
    "GPUs without a driver": (
        {"kernel_driver": None, "driver": Trouble("missing", ""), **torch(gpus=(), driver_cuda=0, nccl=None, peers=None),
         "ray": Ray("2.60.0", 0, 192.0),
         "flash": Flash("2.8.3")},
        [("fault", "driver-missing", "driver"), ("fault", "cuda-does-not-start", "torch")], "--gpus all"),
    "torch hangs": (
        {"torch": Trouble("hung", "torch 2.11.0: no answer in 60 s, after GPU 3")},
        [("fault", "torch-hung", "torch")], "--time-limit"),
    "torch does not import": (
        {"torch": Trouble("failed", "libcudart.so.13: cannot open")},
        [("fault", "torch-failed", "torch")], "LD_LIBRARY_PATH"),
    "a CPU build": ({"torch": Torch("2.11.0+cpu")}, [("fault", "torch-cpu-build", "torch")], "/whl/cu130"),
    "a CPU build, driver 570": (
        {"torch": Torch("2.11.0+cpu"), "kernel_driver": "570.1", "driver": tuple(replace(gpu, driver="570.1") for gpu in DRIVER)},
        [("fault", "torch-cpu-build", "torch")], "/whl/cu128"),
    "CUDA 13 on a driver of CUDA 12.8": (
        torch(gpus=(), driver_cuda=12080),
        [("fault", "driver-too-old", "torch")], "branch 580 or newer"),
    "CUDA 13 by forward compatibility": (torch(driver_cuda=12080), [("warning", "driver-older", "torch")], "PTX"),
    "CUDA 13.0 on 13.1": (torch(driver_cuda=13010), [], ""),
    "CUDA 12.8 on 12.4": (torch(cuda="12.8", driver_cuda=12040), [("warning", "driver-older", "torch")], "PTX"),
    "CUDA does not start": (
        torch(gpus=(), error="CUDA unknown error"),
        [("fault", "cuda-does-not-start", "torch")], "LD_LIBRARY_PATH"),
    "ROCm": (torch(rocm="7.1"), [("warning", "rocm", "torch")], "numbers of estimates"),

    "an id that is not there": (
        {"env": {"CUDA_VISIBLE_DEVICES": "0,9,1"}, **torch(gpus=GPUS[:1])},
        [("fault", "visible-unknown", "visible")], "CUDA_VISIBLE_DEVICES=0,1"),
    "an id twice": (
        {"env": {"CUDA_VISIBLE_DEVICES": "2,2"}, **torch(gpus=(), error="Error 101: invalid device ordinal")},
        [("fault", "visible-twice", "visible")], "CUDA_VISIBLE_DEVICES=2"),
    "a UUID's beginning": ({"env": {"CUDA_VISIBLE_DEVICES": "GPU-3a3"}, **torch(gpus=GPUS[:1])}, [], ""),
    "a UUID that two GPUs begin with": (
        {"env": {"CUDA_VISIBLE_DEVICES": "GPU-"}, **torch(gpus=())},
        [("fault", "visible-unknown", "visible")], "=0"),
    "a UUID that CUDA does not take": (
        {"env": {"CUDA_VISIBLE_DEVICES": "GPU-0"}, **torch(gpus=(), error="No CUDA GPUs are available")},
        [("fault", "visible-lost", "visible")], "nvidia-smi -L"),
    "all GPUs hidden": (
        {"env": {"CUDA_VISIBLE_DEVICES": ""}, **torch(gpus=(), error="No CUDA GPUs are available")},
        [("warning", "gpus-hidden", "visible")], "unset"),
    "torch sees fewer": (torch(gpus=GPUS[:6]), [("warning", "gpus-not-visible", "visible")], "--gpus all"),
    "an order that differs": (
        {"driver": (replace(DRIVER[0], name="NVIDIA T4"), *DRIVER[1:])},
        [("warning", "device-order", "order")], "PCI_BUS_ID"),
    "a card too new": (
        torch(gpus=one_gpu(capability=(13, 0))),
        [("fault", "card-not-in-build", "GPU 0")], "pytorch.org"),
    "a card that does not compute": (
        torch(gpus=one_gpu(error="CUDA error: uncorrectable ECC error encountered")),
        [("fault", "card-does-not-compute", "GPU 0")], "ECC"),
    "somebody on GPU 0": (torch(gpus=one_gpu(free=50 * GIB)), [("warning", "card-in-use", "GPU 0")], "--gpu-memory"),
    "cards that differ": (
        torch(gpus=one_gpu(memory=94 * GIB, free=94 * GIB)),
        [("warning", "cards-differ", "equal")], "device_map"),
    "exclusive": (
        {"driver": (replace(DRIVER[0], compute_mode="Exclusive_Process"), *DRIVER[1:])},
        [("warning", "compute-mode", "mode")], "-i 0 -c DEFAULT"),
    "prohibited": (
        {"driver": (replace(DRIVER[0], compute_mode="Prohibited"), *DRIVER[1:])},
        [("fault", "compute-mode", "mode")], "-i 0"),
    "MIG": ({"driver": (*DRIVER[:7], replace(DRIVER[7], mig=True))}, [("warning", "mig", "MIG")], "-mig 0"),
    "flash_attn of another torch": (
        {"flash": Trouble("failed", "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E")},
        [("fault", "flash-attn-abi", "flash-attn")], "--no-build-isolation"),
    "flash_attn crashes": (
        {"flash": Trouble("failed", "flash_attn: the process ended with SIGSEGV")},
        [("fault", "flash-attn-failed", "flash-attn")], "--force-reinstall"),
    "flash_attn is wrong": (
        {"flash": Flash("2.8.3", tuple(range(7)), {7: "no kernel image is available"})},
        [("fault", "flash-attn-does-not-run", "flash-attn")], "Build it"),
    "no flash_attn": (
        {"flash": Trouble("missing", "")},
        [("warning", "flash-attn-missing", "flash-attn")], "[flash-attn]"),
    "V100s": (
        {**torch(gpus=V100S, archs=("sm_70",)), "flash": Trouble("missing", "")},

        [("warning", "card-without-bf16", f"GPU {index}") for index in range(8)]
        + [("warning", "flash-attn-missing", "flash-attn")], "fp32"),

    "few CPUs": ({"cpus": 16}, [("warning", "few-cpus", "CPUs")], "num_cpus=24"),
    "few CPUs in a container": ({"cpu_limit": 23.5}, [("warning", "few-cpus", "CPUs")], "num_cpus=24"),
    "a container's memory": (
        {"ram_limit": 64 * GIB, "ram_available": 60 * GIB},
        [("warning", "ram-limited", "RAM")], '--host-memory "64GiB"'),
    "memory is full": ({"ram_available": 40 * GIB}, [("fault", "ram-full", "RAM")], "ps aux"),
    "no overcommit": ({"overcommit": 2}, [("warning", "no-overcommit", "overcommit")], "sysctl"),
    "memlock without RDMA": ({"memlock": 64 * 1024}, [], ""),
    "memlock 64 KiB with RDMA": (
        {"memlock": 64 * 1024, "infiniband": ("mlx5_0",)},
        [("fault", "memlock", "pinning")], "memlock=-1"),
    "cannot pin": (torch(pin_error="CUDA error: out of memory"), [("fault", "cannot-pin", "pinning")], "ulimit -l"),
    "/dev/shm of 64 MB": ({"shm": 2**26, "shm_free": 2**26}, [("fault", "small-shm", "/dev/shm")], "--shm-size=187g"),
    "/dev/shm of 64 MB, no Ray, one GPU": (
        {"shm": 2**26, "shm_free": 2**26, **packages(verl=None, ray=None), "ray": Trouble("missing", ""), **torch(gpus=GPUS[:1])},

        [("warning", "verl-not-installed", "verl"), ("warning", "gpus-not-visible", "visible"),
         ("warning", "small-shm", "/dev/shm")], "verl"),
    "/dev/shm below the object store": (
        {"shm_free": 100 * GIB},
        [("warning", "shm-below-store", "/dev/shm")], "--shm-size=188g"),
    "few files": ({"open_files": 1024}, [("warning", "few-files", "files")], "ulimit -n"),
    "few processes": ({"processes": 1024}, [("warning", "few-processes", "processes")], "ulimit -u"),
    "models on a full disk": (
        {"disks": (Disk("models", "/home/me/.cache/huggingface/hub", 1, 50 * GIB, 2**20),)},
        [("fault", "disk-full", "models")], "HF_HOME"),
    "little room for a run": (
        {"disks": (Disk("this folder", "/run", 1, 500 * GIB, 19 * GIB),)},
        [("warning", "disk-little", "this folder")], "larger disk"),
    "/tmp over 95 %": (
        {"disks": (Disk("temporary files", "/tmp", 1, 1000 * GIB, 49 * GIB),)},
        [("fault", "disk-full", "temporary files")], "TMPDIR"),
    "models read-only": (
        {"disks": (Disk("models", "/ro", 1, 500 * GIB, 400 * GIB, False),)},
        [("fault", "not-writable", "models")], "HF_HOME"),
    "a dead mount": (
        {"disks": (Disk("models", "/nfs", error="no answer in 5 s"),)},
        [("fault", "disk-does-not-answer", "models")], "HF_HOME"),

    "no such interface": (
        {"env": {"NCCL_SOCKET_IFNAME": "ib"}},
        [("fault", "no-such-interface", "interface")], "unset NCCL_SOCKET_IFNAME"),
    "gloo takes whole names": (
        {"env": {"GLOO_SOCKET_IFNAME": "eth"}},
        [("fault", "no-such-interface", "interface")], "unset GLOO_SOCKET_IFNAME"),
    "an interface": ({"env": {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}}, [], ""),
    "P2P off": (
        {"env": {"NCCL_P2P_DISABLE": "1"}},
        [("warning", "nccl-p2p-disabled", "variable")], "unset NCCL_P2P_DISABLE"),
    "P2P not off": ({"env": {"NCCL_P2P_DISABLE": "0"}}, [], ""),
    "SHM off": ({"env": {"NCCL_SHM_DISABLE": "1"}}, [("warning", "nccl-shm-disabled", "variable")], "unset"),
    "InfiniBand off": (
        {"env": {"NCCL_IB_DISABLE": "1"}, "infiniband": ("mlx5_0",)},
        [("warning", "nccl-ib-disabled", "variable")], "unset"),
    "InfiniBand off where there is none": ({"env": {"NCCL_IB_DISABLE": "1"}}, [], ""),
    "launches that block": (
        {"env": {"CUDA_LAUNCH_BLOCKING": "1"}},
        [("warning", "launch-blocking", "variable")], "unset"),
    "one connection": (
        {"env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
        [("warning", "max-connections", "variable")], "unset"),
    "expandable segments without vllm": ({"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, [], ""),
    "expandable segments with vllm": (
        {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, **packages(vllm="0.24.0")},
        [("warning", "expandable-segments", "variable")], "unset"),
    "an old name": (
        {"env": {"NCCL_BLOCKING_WAIT": "1"}},
        [("warning", "old-name", "variable")], "TORCH_NCCL_BLOCKING_WAIT=1"),
    "another NCCL": (torch(nccl="2.21.5"), [("warning", "other-nccl", "NCCL")], "LD_LIBRARY_PATH"),
    "no NCCL": (torch(nccl=None), [("fault", "no-nccl", "NCCL")], "wheel"),
    "a host without an address": (
        {"host_address": None, "reaches_itself": None},
        [("warning", "host-name", "host name")], "/etc/hosts"),
    "a host closed to itself": ({"reaches_itself": False}, [("fault", "host-closed", "host name")], "/etc/hosts"),
    "MASTER_PORT is taken": (
        {"env": {"MASTER_PORT": "29500"}, "ports_taken": (29500,)},
        [("warning", "master-port", "port")], "MASTER_PORT"),

    "RAY_ADDRESS pointing nowhere": (
        {"ray": Ray("2.60.0", 8, 192.0, "10.0.0.9:6379", "RAY_ADDRESS", "Connection refused"),
         "env": {"RAY_ADDRESS": "10.0.0.9:6379"}},
        [("fault", "ray-unreachable", "Ray")], "unset RAY_ADDRESS"),
    "what a dead cluster left": (
        {"ray": Ray("2.60.0", 8, 192.0, "10.0.0.1:6379", "/tmp/ray/ray_current_cluster", "Connection refused")},
        [("fault", "ray-unreachable", "Ray")], "ray stop"),
    "a cluster that asks for a token": (
        {"ray": Ray("2.60.0", 8, 192.0, "10.0.0.1:6379", "RAY_ADDRESS", "InvalidAuthToken: Authentication token is missing")},
        [("fault", "ray-token", "Ray")], "RAY_AUTH_MODE=token"),
    "the dashboard's address": (
        {"ray": Ray("2.60.0", 8, 192.0, "http://head:8265", "RAY_ADDRESS"), "env": {"RAY_ADDRESS": "http://head:8265"}},
        [("fault", "ray-address-http", "Ray")], "head:6379"),
    "ray hangs": (
        {"ray": Trouble("hung", "ray: no answer in 60 s")},
        [("fault", "ray-hung", "Ray")], "ray stop --force"),
    "a cluster": (cluster(("node1", 8, 192), ("node2", 8, 192)), [], ""),
    "Ray counts fewer than there are": (
        cluster(("node1", 4, 192)),
        [("fault", "ray-fewer-gpus", "counts")], "ray stop"),
    "Ray would count fewer": (
        {"ray": Ray("2.60.0", 0, 192.0)},
        [("fault", "ray-fewer-gpus", "counts")], "num_gpus=8"),
    "Ray counts more than are visible": (
        {**cluster(("node1", 8, 192)), **torch(gpus=GPUS[:4]), "driver": DRIVER[:4]},
        [("fault", "ray-more-gpus", "counts")], "ray stop"),
    "a cluster of others": (cluster(("node7", 8, 192)), [("warning", "not-in-cluster", "counts")], "10.0.0.1:6379"),
    "a cluster with few CPUs": (cluster(("node1", 8, 23)), [("fault", "ray-few-cpus", "counts")], "--num-cpus 24 on each"),
    "nodes that differ": (
        cluster(("node1", 8, 192), ("node2", 4, 192)),
        [("warning", "uneven-nodes", "counts")], "n_gpus_per_node=4"),
    "GPUs that others hold": (
        cluster(("node1", 8, 192), free=2),
        [("warning", "ray-gpus-taken", "counts")], "ray status"),
    "redis on Ray's port": ({"ports_taken": (6379,)}, [("warning", "ray-port", "port")], "--port 6380"),
    "Ray on Ray's port": ({**cluster(("node1", 8, 192)), "ports_taken": (6379,)}, [], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_nothing_else(name: str) -> None:
    changes, expected, fix = WRONG[name]
    diagnosis = examine(replace(SOUND, **changes))
    found = [check for check in diagnosis.checks if check.verdict != "ok"]
    assert [(check.verdict, check.code, check.name) for check in found] == expected
    assert fix in (found[0].fix if found else "")
    verdicts = [verdict for verdict, _, _ in expected]
    assert diagnosis.exit_code == (2 if "fault" in verdicts else 1 if verdicts else 0)
