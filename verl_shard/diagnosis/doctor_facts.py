"""What the doctor looks at: facts of one machine, and what a check says of them. Nothing here asks the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]
VERDICTS: tuple[Verdict, ...] = ("ok", "warning", "fault")
"""From good to bad; the index is the exit code."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table.

    found: what is there. why: what is wrong with it. fix: what to do. code: a stable short name of what is wrong.
    source: where the rule comes from. All but `found` are there for a warning and a fault, and empty when all is well.
    """

    name: str
    verdict: Verdict
    found: str
    why: str = ""
    fix: str = ""
    code: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        said = (self.why, self.fix, self.code, self.source)
        assert all(said) if self.verdict != "ok" else not any(said), self


def ok(name: str, found: str) -> Check:
    """A check that passed."""
    return Check(name, "ok", found)


def bad(verdict: Verdict, name: str, code: str, found: str, *, why: str, fix: str, source: str) -> Check:
    """A warning or a fault."""
    return Check(name, verdict, found, why, fix, code, source)


@dataclass(frozen=True)
class Trouble:
    """Why something could not be found out.

    kind: "missing" (it is not installed), "failed" (it answered with an error) or "hung" (no answer in the time limit).
    """

    kind: Literal["missing", "failed", "hung"]
    text: str


@dataclass(frozen=True)
class Package:
    """An installed distribution: its version, what it requires, and of which Python, in its own words."""

    version: str
    requires: tuple[str, ...] = ()
    python: str = ""


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver lists it (nvidia-smi); what it would not say is None or empty. Memory in bytes."""

    index: int
    uuid: str
    name: str
    driver: str
    compute_mode: str = "Default"
    mig: bool = False
    memory: int | None = None
    used: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it. Memory in bytes; error: what a small computation on it ended with."""

    index: int
    name: str
    memory: int
    free: int
    capability: tuple[int, int]
    error: str = ""


@dataclass(frozen=True)
class Torch:
    """torch's build and what it sees.

    cuda: the CUDA version of the build, None for a CPU build. driver_cuda: the newest CUDA the driver takes, as
    1000 * major + 10 * minor; 0 without a driver. archs: what its kernels are compiled for. peers: every GPU reaches
    every other one directly; None with fewer than two. pin_error: what pinning host memory ended with, None if not tried.
    """

    version: str
    cuda: str | None = None
    rocm: str | None = None
    archs: tuple[str, ...] = ()
    driver_cuda: int = 0
    error: str = ""
    gpus: tuple[Gpu, ...] = ()
    nccl: str | None = None
    peers: bool | None = None
    pin_error: str | None = None


@dataclass(frozen=True)
class Flash:
    """flash_attn imported; errors: by GPU, what its kernels ended with where they did not give sdpa's result."""

    version: str
    ran_on: tuple[int, ...] = ()
    errors: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RayNode:
    """A machine that a Ray cluster counts."""

    host: str
    gpus: float
    cpus: float


@dataclass(frozen=True)
class Ray:
    """Ray: what it would count on this machine, and the cluster that ray.init() would join.

    address: of that cluster, as given; "" when it would start one of its own. error: why it could not be joined.
    nodes: that are alive. free_gpus: of the whole cluster.
    """

    version: str
    local_gpus: int | None = None
    local_cpus: float | None = None
    address: str = ""
    address_from: str = ""
    error: str = ""
    nodes: tuple[RayNode, ...] = ()
    free_gpus: float = 0.0


@dataclass(frozen=True)
class Disk:
    """A place that is written to. device: equal for places on one file system. Sizes in bytes."""

    use: str
    path: str
    device: int = 0
    total: int = 0
    free: int = 0
    writable: bool = True
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """One machine, read once. Sizes in bytes; None is not known, and of a limit (cpu, ram, files ...) that there is none.

    packages by normalized name (PEP 503). env: of the variables, those that matter here, without secrets.
    pci_gpus: NVIDIA display controllers on the PCI bus. kernel_driver: version of the loaded kernel module.
    """

    python: str
    system: str = "Linux"
    packages: Mapping[str, Package] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    pci_gpus: int = 0
    kernel_driver: str | None = None
    driver: tuple[DriverGpu, ...] | Trouble = Trouble("missing", "nvidia-smi is not installed")
    torch: Torch | Trouble = Trouble("missing", "torch is not installed")
    flash: Flash | Trouble = Trouble("missing", "flash_attn is not installed")
    ray: Ray | Trouble = Trouble("missing", "ray is not installed")

    cpus: int = 1
    cpu_limit: float | None = None
    ram: int | None = None
    ram_available: int | None = None
    ram_limit: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    memlock: int | None = None
    open_files: int | None = None
    processes: int | None = None
    overcommit: int | None = None
    disks: tuple[Disk, ...] = ()

    host: str = ""
    host_address: str | None = None
    reaches_itself: bool | None = None
    interfaces: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    nccl_files: tuple[str, ...] = ()
    ports_taken: tuple[int, ...] = ()

    def set_to(self, variable: str) -> str | None:
        """The value of an environment variable, None where it is not set or empty."""
        return self.env.get(variable) or None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that torch sees."""
        return self.torch.gpus if isinstance(self.torch, Torch) else ()

    @property
    def driver_gpus(self) -> tuple[DriverGpu, ...]:
        """The GPUs that the driver lists, whether torch sees them or not."""
        return self.driver if isinstance(self.driver, tuple) else ()

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU in the machine, usable or not."""
        return bool(self.gpus or self.driver_gpus or self.pci_gpus or self.kernel_driver)
