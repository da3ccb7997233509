"""The host: CPUs, memory and what may be pinned, shared memory, limits of a process, disks."""

from __future__ import annotations

from collections.abc import Iterator

from verl_shard.common.units import GIB, format_bytes
from verl_shard.diagnosis.doctor_facts import Check, Disk, Facts, Torch, Verdict, bad, ok

CPUS_PER_GPU = 3
"""verl 0.9.1: single_controller/ray/base.py asks for {"CPU": max_colocate_count = 3, "GPU": 1} in each bundle."""

# Ray 2.60: _private/ray_constants.py (30 % of the memory, 200 GB at most), RAY_memory_usage_threshold and
# RAY_local_fs_capacity_threshold (0.95 each).
_OBJECT_STORE_PART, _OBJECT_STORE_MOST = 0.3, 200 * 10**9
_RAY_FULL = 0.95
_NCCL_SHM = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_RAY_FILES = 4096  # Ray 2.60: _private/worker.py warns below this, and advises 8192
_SMALL_SHM = GIB  # what NCCL's troubleshooting page gives a container: --shm-size=1g
_FEW_PROCESSES = 4096
_FULL, _LITTLE = GIB, 20 * GIB
"""A bf16 model of 7B parameters is 14 GiB, and its checkpoint with fp32 weights and Adam's states 85 GiB."""


def cpus(facts: Facts) -> Iterator[Check]:
    """CPUs that this process may use, against what verl asks Ray for."""
    usable = facts.cpus if facts.cpu_limit is None else min(facts.cpus, facts.cpu_limit)
    found = f"{usable:g}" + (f" (the container's share of {facts.cpus})" if usable < facts.cpus else "")
    wanted = CPUS_PER_GPU * len(facts.gpus)
    if usable < wanted:
        yield bad(
            "warning", "CPUs", "few-cpus", f"{found} for {len(facts.gpus)} GPUs",
            why=f"verl asks Ray for {CPUS_PER_GPU} CPUs with each GPU, {wanted} in all, and waits for ever without them",
            fix=f"ray_kwargs.ray_init.num_cpus={wanted} (Ray only counts them), or ray start --num-cpus {wanted}",
            source="verl 0.9.1: single_controller/ray/base.py, max_colocate_count=3; RayResourcePool waits without a limit",
        )  # fmt: skip
    else:
        yield ok("CPUs", found)


def memory(facts: Facts) -> Iterator[Check]:
    """RAM: what is there, what a container may have of it, what is left."""
    if facts.ram is None:
        return
    limited = facts.ram_limit is not None and facts.ram_limit < facts.ram
    holds = facts.ram_limit if limited and facts.ram_limit is not None else facts.ram
    left = facts.ram_available if facts.ram_available is not None else holds
    found = f"{format_bytes(left)} of {format_bytes(holds)} available"
    if left < (1 - _RAY_FULL) * holds + GIB:
        yield bad(
            "fault", "RAM", "ram-full", found, why="Ray kills workers when 95 % is in use, and the system may kill any process",
            fix="End what holds it (ps aux --sort=-rss), or give the container more",
            source="https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html",
        )  # fmt: skip
    elif limited:
        yield bad(
            "warning", "RAM", "ram-limited", f"{found}; the host has {format_bytes(facts.ram)}",
            why="this container may use only a part, and a process over its limit is killed; plans count the host's",
            fix=f'verl-shard plan --host-memory "{holds // GIB}GiB", or a higher limit (docker run --memory)',
            source="cgroup memory.max; verl_shard/resources/probe.py",
        )  # fmt: skip
    else:
        yield ok("RAM", found)
    if facts.overcommit == 2:
        yield bad(
            "warning", "overcommit", "no-overcommit", "vm.overcommit_memory=2",
            why="CUDA and Ray reserve far more address space than they use, and are refused it",
            fix="sysctl vm.overcommit_memory=0", source="https://docs.kernel.org/mm/overcommit-accounting.html",
        )  # fmt: skip


def pinning(facts: Facts) -> Iterator[Check]:
    """What may be pinned. CUDA's own pinning does not count against the limit, RDMA's does."""
    error = facts.torch.pin_error if isinstance(facts.torch, Torch) else None
    limit = "no limit" if facts.memlock is None else f"memlock {format_bytes(facts.memlock)}"
    if error:
        yield bad(
            "fault", "pinning", "cannot-pin", limit, why=f"pinning 64 MiB for copies to a GPU failed: {error}",
            fix="offload=stream then copies at a fraction of the speed; free host memory, and ulimit -l unlimited",
            source="tried: torch.empty(pin_memory=True)",
        )  # fmt: skip
    elif facts.memlock is not None and facts.infiniband:
        yield bad(
            "fault", "pinning", "memlock", f"{limit}, with {', '.join(facts.infiniband)}",
            why="RDMA counts its buffers against it, and NCCL fails to register them (ibv_reg_mr)",
            fix="ulimit -l unlimited (docker run --ulimit memlock=-1; limits.conf: memlock; a service: LimitMEMLOCK=infinity)",
            source=_NCCL_SHM,
        )  # fmt: skip
    else:
        free = ", which CUDA does not count" if facts.memlock is not None else ""
        tried = ", 64 MiB pinned" if error == "" else ""
        yield ok("pinning", f"{limit}{free}{tried}")


def shared_memory(facts: Facts) -> Iterator[Check]:
    """/dev/shm, where NCCL, Ray's object store and data loaders exchange what they have."""
    if facts.system != "Linux":
        return
    docker = (
        "docker run --shm-size={0} (Kubernetes: an emptyDir of medium Memory), or mount -o remount,size={0} /dev/shm"
    )
    if facts.shm is None or facts.shm_free is None:
        yield bad(
            "fault", "/dev/shm", "no-shm", "not there", why="NCCL, Ray and data loaders share memory through it",
            fix="mount -t tmpfs -o size=50% tmpfs /dev/shm", source=_NCCL_SHM,
        )  # fmt: skip
        return
    found = f"{format_bytes(facts.shm_free)} of {format_bytes(facts.shm)} free"
    ram = min(size for size in (facts.ram, facts.ram_limit, 2**63) if size is not None)
    store = int(min(_OBJECT_STORE_PART * ram, _OBJECT_STORE_MOST))
    if facts.shm_free < _SMALL_SHM:
        # Docker gives 64 MiB.
        severe = len(facts.gpus) > 1 or "ray" in facts.packages
        yield bad(
            "fault" if severe else "warning", "/dev/shm", "small-shm", found,
            why="NCCL's processes and data loaders die when it is full (bus error), and Ray puts its objects on disk",
            fix=docker.format(f"{max(1, -(-store // GIB))}g"), source=_NCCL_SHM,
        )  # fmt: skip
    elif facts.shm_free * _RAY_FULL < store:
        yield bad(
            "warning", "/dev/shm", "shm-below-store", found,
            why=f"Ray's object store would be 30 % of the RAM, {format_bytes(store)}; with less it is smaller, or on disk",
            fix=docker.format(f"{-(-store // GIB) + 1}g"), source="Ray 2.60: _private/utils.py, resolve_object_store_memory",
        )  # fmt: skip
    else:
        yield ok("/dev/shm", found)


def limits(facts: Facts) -> Iterator[Check]:
    """Open files and processes that one may have. open_files is the hard limit: Ray raises the soft one by itself."""
    if facts.open_files is not None and facts.open_files < _RAY_FILES:
        yield bad(
            "warning", "files", "few-files", f"{facts.open_files} open files", why="Ray's connections fail when they run out",
            fix="ulimit -n 65536 (limits.conf: nofile; docker run --ulimit nofile=65536:65536)",
            source="Ray 2.60: _private/worker.py; https://github.com/ray-project/ray/issues/11239",
        )  # fmt: skip
    else:
        yield ok("files", "no limit of open files" if facts.open_files is None else f"{facts.open_files} may be open")
    if facts.processes is not None and facts.processes < _FEW_PROCESSES:
        yield bad(
            "warning", "processes", "few-processes", f"{facts.processes} processes and threads",
            why="a run of Ray, verl and vLLM has thousands of threads (Resource temporarily unavailable)",
            fix="ulimit -u 65536 (limits.conf: nproc)", source="setrlimit(2): RLIMIT_NPROC counts threads",
        )  # fmt: skip


def disks(facts: Facts) -> Iterator[Check]:
    """Room and rights where models, temporary files and runs go; one line a file system that is well."""
    well: dict[tuple[int, int], list[Disk]] = {}
    for disk in facts.disks:
        wrong = _disk(disk)
        if wrong is None:
            well.setdefault((disk.device, disk.total), []).append(disk)
        else:
            yield wrong
    for together in well.values():
        one = together[0]
        room = f"{format_bytes(one.free)} of {format_bytes(one.total)} free"
        yield ok("disk", f"{room}: {', '.join(disk.use for disk in together)}")


def _disk(disk: Disk) -> Check | None:
    found = f"{disk.path}: {format_bytes(disk.free)} of {format_bytes(disk.total)} free"
    where = {
        "models": "export HF_HOME=<a larger disk>", "temporary files": "export TMPDIR=<a larger disk> (Ray: RAY_TMPDIR too)",
    }.get(disk.use, "Run in a folder on a larger disk, or set trainer.default_local_dir")  # fmt: skip
    if disk.error:
        return bad(
            "fault", disk.use, "disk-does-not-answer", f"{disk.path}: {disk.error}", why="a dead mount, or a folder out of reach",
            fix=where, source="statvfs",
        )  # fmt: skip
    if not disk.writable:
        return bad(
            "fault",
            disk.use,
            "not-writable",
            disk.path,
            why="this user cannot write to it",
            fix=where,
            source="access(2)",
        )
    full = disk.total > 0 and disk.free < (1 - _RAY_FULL) * disk.total and disk.use == "temporary files"
    if disk.free >= _LITTLE and not full:
        return None
    verdict: Verdict = "fault" if disk.free < _FULL or full else "warning"
    why = "a bf16 model of 7B parameters takes 14 GiB, and its checkpoint for training 85 GiB"
    if full:
        why = "over 95 % full: Ray stops spilling objects there, and tasks fail"
    return bad(
        verdict, disk.use, "disk-full" if verdict == "fault" else "disk-little", found, why=why, fix=f"Free some, or {where}",
        source="https://docs.ray.io/en/latest/ray-core/objects/object-spilling.html" if full else "2 and 12 bytes a parameter",
    )  # fmt: skip


CHECKS = (cpus, memory, pinning, shared_memory, limits, disks)
