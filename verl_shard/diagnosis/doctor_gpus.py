"""GPUs: the driver, torch's build against it, which GPUs are visible, whether each computes, and flash attention on them."""

from __future__ import annotations

from collections.abc import Iterator

from verl_shard.common.units import format_bytes
from verl_shard.diagnosis.doctor_facts import Check, Facts, Flash, Gpu, Torch, Trouble, bad, ok

_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
# The oldest driver branch for a major version of CUDA, from the table there.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_VISIBLE = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables"
_FLASH = "https://github.com/Dao-AILab/flash-attention"
_USED_BY_OTHERS = 2**30
"""Bytes in use on a GPU, beyond which somebody else must be at work: an idle card and our own look at it take less."""


def driver(facts: Facts) -> Iterator[Check]:
    """The driver: one version, loaded, and answering."""
    versions = {gpu.driver for gpu in facts.driver_gpus if gpu.driver} | ({facts.kernel_driver} - {None})
    if len(versions) > 1 or (isinstance(facts.driver, Trouble) and "version mismatch" in facts.driver.text):
        # nvidia-smi gives the library's version and /proc/driver/nvidia/version the module's.
        named = " and ".join(sorted(str(version) for version in versions))
        yield bad(
            "fault", "driver", "driver-mixed", named or "versions differ",
            why="the kernel module and the driver's libraries are of different versions, so CUDA does not start",
            fix="Reboot, or load the nvidia kernel modules anew; start a container again after an update of the host's driver",
            source="NVML: Driver/library version mismatch",
        )  # fmt: skip
    elif isinstance(facts.driver, Trouble) and facts.driver.kind == "hung":
        yield bad(
            "fault", "driver", "driver-hung", f"nvidia-smi: {facts.driver.text}", why="the driver or a GPU does not answer",
            fix="Look for Xid in dmesg; stop what hangs on the GPU, reset it (nvidia-smi --gpu-reset) or reboot",
            source="https://docs.nvidia.com/deploy/xid-errors/",
        )  # fmt: skip
    elif isinstance(facts.driver, Trouble) and facts.driver.kind == "failed":
        yield bad(
            "fault", "driver", "driver-failed", f"nvidia-smi: {facts.driver.text}", why="the driver does not work",
            fix="Install the driver or load its kernel module; in a container start it with --gpus all",
            source="https://docs.nvidia.com/deploy/nvidia-smi/",
        )  # fmt: skip
    elif versions:
        yield ok("driver", str(versions.pop()))
    elif facts.pci_gpus and not facts.gpus:
        yield bad(
            "fault", "driver", "driver-missing", f"none, with {_count(facts.pci_gpus, 'NVIDIA GPU')} on the PCI bus",
            why="nothing can use a GPU without its driver",
            fix="Install the driver; in a container start it with --gpus all (nvidia-container-toolkit)",
            source="/sys/bus/pci/devices: vendor 0x10de",
        )  # fmt: skip


def build(facts: Facts) -> Iterator[Check]:
    """torch's CUDA build against the driver's CUDA."""
    torch = facts.torch
    if isinstance(torch, Trouble):
        missing = torch.kind == "missing"
        hung = "importing it, or a GPU's first answer, takes too long: a hung GPU, or a slow disk"
        yield bad(
            "fault", "torch", f"torch-{torch.kind}", torch.text,
            why="all but declared plans needs it" if missing else hung if torch.kind == "hung" else "torch cannot be imported",
            fix="pip install torch" if missing else
            "Run nvidia-smi and look for Xid in dmesg; else give more time: --time-limit 120" if torch.kind == "hung" else
            "Install torch anew; LD_LIBRARY_PATH may bring libraries of another CUDA",
            source="a process of its own that imports torch and asks each GPU",
        )  # fmt: skip
        return
    if torch.rocm:
        yield bad(
            "warning", "torch", "rocm", f"{torch.version} for ROCm {torch.rocm}", why="nothing here was tried on AMD GPUs",
            fix="Expect rough edges; the numbers of estimates hold, the times do not", source="setup.cfg, docs",
        )  # fmt: skip
    elif torch.cuda is None and facts.has_gpu:
        yield bad(
            "fault", "torch", "torch-cpu-build", f"{torch.version}, built without CUDA",
            why="there are NVIDIA GPUs here, and this build sees none of them",
            fix=_other_build(facts, "pip install --force-reinstall torch") or "Update the driver, and install a CUDA build",
            source="torch.version.cuda",
        )  # fmt: skip
    elif torch.cuda is None:
        yield ok("torch", f"{torch.version}, built for CPUs")
    else:
        yield from _cuda(facts, torch, torch.cuda)


def _cuda(facts: Facts, torch: Torch, built: str) -> Iterator[Check]:
    major, minor = (int(part) for part in built.split(".")[:2])
    takes = f"{torch.driver_cuda // 1000}.{torch.driver_cuda % 1000 // 10}"
    found = f"{torch.version}, CUDA {built}"
    if not torch.driver_cuda and not facts.has_gpu:
        yield ok("torch", f"{found}; no driver here, so it runs on the CPU")
    elif torch.driver_cuda and major > torch.driver_cuda // 1000 and not torch.gpus:
        oldest = f" (branch {_OLDEST_DRIVER[major]} or newer)" if major in _OLDEST_DRIVER else ""
        yield bad(
            "fault", "torch", "driver-too-old", f"{found}; the driver takes CUDA {takes}",
            why="a build of a newer major version does not start on this driver",
            fix=f"Update the driver{oldest}" + _other_build(facts, ", or pip install torch"),
            source=_COMPATIBILITY,
        )  # fmt: skip
    elif not torch.gpus and torch.error and _hides_all(facts, torch.error):
        yield ok("torch", f"{found}; no GPU is visible to it")
    elif torch.error or not torch.driver_cuda:
        yield bad(
            "fault", "torch", "cuda-does-not-start", found, why=torch.error or "torch finds no driver (libcuda.so)",
            fix="Run nvidia-smi: if it lists the GPUs, look at LD_LIBRARY_PATH (an old libcuda or cuda-compat) and "
            "CUDA_VISIBLE_DEVICES; in a container start it with --gpus all",
            source="torch.cuda.init()",
        )  # fmt: skip
    elif 1000 * major + 10 * minor > torch.driver_cuda:
        yield bad(
            "warning", "torch", "driver-older", f"{found}; the driver takes CUDA {takes}",
            why="it runs by minor-version compatibility, without features of the newer driver; code compiled to PTX may not load",
            fix="Update the driver if a kernel fails to load (unsupported PTX version)", source=_COMPATIBILITY,
        )  # fmt: skip
    else:
        yield ok("torch", f"{found}; the driver takes CUDA {takes}")


def _hides_all(facts: Facts, error: str) -> bool:
    """Whether CUDA says what it says when CUDA_VISIBLE_DEVICES leaves no GPU; `visible` then says what is wrong with that."""
    return "CUDA_VISIBLE_DEVICES" in facts.env and ("No CUDA GPUs" in error or "invalid device ordinal" in error)


def visible(facts: Facts) -> Iterator[Check]:
    """CUDA_VISIBLE_DEVICES against the GPUs there are, and torch's count against the driver's."""
    chosen, there, seen = facts.env.get("CUDA_VISIBLE_DEVICES"), facts.driver_gpus, len(facts.gpus)
    if chosen is not None:
        yield from _chosen(facts, chosen)
    elif 0 < seen < len(there):
        yield bad(
            "warning", "visible", "gpus-not-visible", f"torch sees {seen} of the driver's {len(there)} GPUs",
            why="GPUs in MIG mode without an instance, or without a device file in this container, cannot be used",
            fix="nvidia-smi -L shows MIG; in a container pass all GPUs: --gpus all", source="torch.cuda.device_count()",
        )  # fmt: skip
    if len({gpu.name for gpu in there}) > 1 and facts.set_to("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield bad(
            "warning", "order", "device-order", "different cards, and CUDA_DEVICE_ORDER is not PCI_BUS_ID",
            why="CUDA numbers the fastest card first and nvidia-smi goes by the bus: GPU 0 of one may not be GPU 0 of the other",
            fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID", source=_VISIBLE,
        )  # fmt: skip


def _chosen(facts: Facts, chosen: str) -> Iterator[Check]:
    there, seen = facts.driver_gpus, len(facts.gpus)
    ids = [one.strip() for one in chosen.split(",")] if chosen.strip() else []
    found = f"CUDA_VISIBLE_DEVICES={chosen}"
    if not ids or ids[0] == "-1" or chosen == "NoDevFiles":
        if facts.has_gpu:
            yield bad(
                "warning", "visible", "gpus-hidden", found, why="it hides every GPU",
                fix="unset CUDA_VISIBLE_DEVICES, unless this is meant to run on the CPU", source=_VISIBLE,
            )  # fmt: skip
        return
    names = {str(gpu.index) for gpu in there}
    known = [
        one in names or (one.startswith("GPU-") and sum(gpu.uuid.startswith(one) for gpu in there) == 1)
        or (one.startswith("MIG-") and any(gpu.mig for gpu in there))
        for one in ids
    ]  # fmt: skip
    if there and not all(known):
        first = known.index(False)
        kept = ",".join(one for one, there_is in zip(ids, known, strict=True) if there_is) or "0"
        ignored = f"CUDA stops at the first that is not there: of {len(ids)} ids {first} count"
        yield bad(
            "fault", "visible", "visible-unknown", f"{found}, with {_range(len(there))} here",
            why=f"there is no GPU {ids[first]}, and {ignored}",
            fix=f"export CUDA_VISIBLE_DEVICES={kept}",
            source=_VISIBLE,
        )  # fmt: skip
    elif len(set(ids)) < len(ids):
        yield bad(
            "fault", "visible", "visible-twice", found, why="an id is given twice, and then CUDA sees no GPU at all",
            fix=f"export CUDA_VISIBLE_DEVICES={','.join(dict.fromkeys(ids))}", source="torch.cuda._parse_visible_devices",
        )  # fmt: skip
    elif not there and not seen:
        yield bad(
            "warning", "visible", "visible-without-gpus", found, why="there are no GPUs here", fix="unset CUDA_VISIBLE_DEVICES",
            source=_VISIBLE,
        )  # fmt: skip
    elif seen < len(ids) and isinstance(facts.torch, Torch) and facts.torch.cuda:
        yield bad(
            "fault", "visible", "visible-lost", found, why=f"of {_count(len(ids), 'id')} torch sees {_count(seen, 'GPU')}",
            fix="Give ids as nvidia-smi -L shows them: 0, 1 ..., or whole UUIDs", source="torch.cuda.device_count()",
        )  # fmt: skip
    else:
        yield ok("visible", f"{found}: {seen} of {len(there)} GPUs" if there else f"{found}: {_count(seen, 'GPU')}")


def cards(facts: Facts) -> Iterator[Check]:
    """Each GPU; equal ones without a fault share a line."""
    torch = facts.torch
    if not isinstance(torch, Torch) or not torch.gpus:
        if not facts.has_gpu:
            yield bad(
                "warning", "GPUs", "no-gpu", "none", why="all that runs a model runs on the CPU here",
                fix="Plan for other machines with --gpus 8 --gpu h100-80g; quickstart and small models run without a GPU",
                source="torch.cuda, nvidia-smi, /sys/bus/pci/devices",
            )  # fmt: skip
        return
    well: dict[tuple[str, int, tuple[int, int]], list[Gpu]] = {}
    for gpu in torch.gpus:
        wrong = _card(gpu, torch)
        if wrong is None:
            well.setdefault((gpu.name, gpu.memory, gpu.capability), []).append(gpu)
        else:
            yield wrong
    for (name, memory, (major, minor)), gpus in well.items():
        what = f"{len(gpus)} x {name}" if len(gpus) > 1 else name
        free = format_bytes(min(gpu.free for gpu in gpus))
        yield ok(_ids(gpus), f"{what}, sm_{major}{minor}, {free} of {format_bytes(memory)} free")
    if len({(gpu.name, gpu.memory) for gpu in torch.gpus}) > 1:
        smallest = min(torch.gpus, key=lambda gpu: gpu.memory)
        yield bad(
            "warning", "equal", "cards-differ", "the GPUs differ",
            why=f"stock verl gives every GPU the same share, so all count as the smallest ({format_bytes(smallest.memory)})",
            fix="Use equal cards, or backend device_map, which gives each GPU what fits on it",
            source="FSDP cuts weights and batches evenly over ranks",
        )  # fmt: skip


def _card(gpu: Gpu, torch: Torch) -> Check | None:
    """What is wrong with a GPU, or None."""
    (major, minor), name = gpu.capability, f"GPU {gpu.index}"
    if not _compiled_for(torch.archs, gpu.capability):
        return bad(
            "fault", name, "card-not-in-build", f"{gpu.name}, sm_{major}{minor}",
            why=f"this torch is compiled for {' '.join(torch.archs)}",
            fix="Install a torch build for this card: https://pytorch.org/get-started/locally/",
            source="torch.cuda.get_arch_list(), as torch.cuda._check_cubins reads it",
        )  # fmt: skip
    if gpu.error:
        return bad(
            "fault", name, "card-does-not-compute", gpu.name, why=f"a product of two small matrices on it failed: {gpu.error}",
            fix="Look for Xid and ECC errors (dmesg, nvidia-smi -q -d ECC); leave it out with CUDA_VISIBLE_DEVICES meanwhile",
            source="tried",
        )  # fmt: skip
    taken = gpu.memory - gpu.free
    if taken > _USED_BY_OTHERS:
        return bad(
            "warning", name, "card-in-use", f"{gpu.name}, {format_bytes(gpu.free)} of {format_bytes(gpu.memory)} free",
            why=f"{format_bytes(taken)} are in use; plans and gpu_memory_utilization count on the whole card",
            fix="End what runs there (nvidia-smi shows it), or plan with less: --gpu-memory", source="torch.cuda.mem_get_info()",
        )  # fmt: skip
    if gpu.capability < (8, 0):
        return bad(
            "warning", name, "card-without-bf16", f"{gpu.name}, sm_{major}{minor}",
            why="bf16, verl's default, is emulated before sm_80, and flash attention does not run",
            fix="Use fp32, or fp16 for scoring, and attn_implementation=sdpa",
            source="https://docs.nvidia.com/cuda/cuda-c-programming-guide/ (compute capabilities)",
        )  # fmt: skip
    return None


def _compiled_for(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Machine code runs on cards of its major version that are not older; PTX (compute_) on all that are not older."""
    wanted = 10 * capability[0] + capability[1]
    for arch in archs:
        kind, _, digits = arch.partition("_")
        number = int(digits.rstrip("af") or 0)
        if number <= wanted and (kind == "compute" or number // 10 == capability[0]):
            return True
    return not archs


def modes(facts: Facts) -> Iterator[Check]:
    """Compute mode and MIG, which say how processes share a GPU."""
    closed = [gpu for gpu in facts.driver_gpus if gpu.compute_mode not in ("Default", "", "[N/A]")]
    if closed:
        which = ",".join(str(gpu.index) for gpu in closed)
        prohibited = any(gpu.compute_mode == "Prohibited" for gpu in closed)
        yield bad(
            "fault" if prohibited else "warning", "mode", "compute-mode", f"GPU {which}: {closed[0].compute_mode}",
            why="no process may use it" if prohibited else
            "one process a GPU: verl's roles and vLLM, which share GPUs, are refused (all CUDA-capable devices are busy)",
            fix=f"nvidia-smi -i {which} -c DEFAULT (as root)", source="man nvidia-smi: --compute-mode",
        )  # fmt: skip
    split = [gpu for gpu in facts.driver_gpus if gpu.mig]
    if split:
        yield bad(
            "warning", "MIG", "mig", f"on, GPU {','.join(str(gpu.index) for gpu in split)}",
            why="CUDA sees one MIG instance in a process, and NCCL and direct copies do not join instances",
            fix="Use one instance a run, or turn MIG off: nvidia-smi -mig 0 (as root)",
            source="https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
        )  # fmt: skip


def flash_attention(facts: Facts) -> Iterator[Check]:
    """flash_attn: importable, and right on every GPU here."""
    flash, name = facts.flash, "flash-attn"
    if isinstance(facts.torch, Trouble):
        return
    old = [gpu.index for gpu in facts.gpus if gpu.capability < (8, 0)]
    if isinstance(flash, Flash) and flash.errors:
        which = ",".join(str(gpu) for gpu in flash.errors)
        yield bad(
            "warning" if set(flash.errors) <= set(old) else "fault", name, "flash-attn-does-not-run",
            f"{flash.version}, not on GPU {which}", why=next(iter(flash.errors.values())),
            fix="Set attn_implementation=sdpa; it needs sm_80 or newer" if old else
            "Build it for this card (pip install --no-build-isolation --no-cache-dir flash-attn), or take sdpa",
            source=f"tried: forward and backward against sdpa; {_FLASH}",
        )  # fmt: skip
    elif isinstance(flash, Flash):
        where = f"ran on {_range(len(flash.ran_on))}" if flash.ran_on else "no GPU to run it on"
        yield ok(name, f"{flash.version}, {where}")
    elif flash.kind == "missing" and not facts.gpus:
        yield ok(name, "not installed, and not needed without a GPU")
    elif flash.kind == "missing":
        yield bad(
            "warning", name, "flash-attn-missing", "not installed",
            why="we take sdpa and say so, but verl's default is flash_attention_2, and its critic knows no other",
            fix="+actor_rollout_ref.model.override_config.attn_implementation=sdpa" if len(old) == len(facts.gpus) else
            'pip install --no-build-isolation "verl_shard[flash-attn]", or set attn_implementation=sdpa',
            source="verl 0.9.1: workers/config/model.py:185, utils/model.py:649",
        )  # fmt: skip
    else:
        # transformers asks only whether the package is there, so a broken one fails on the worker.
        abi = "undefined symbol" in flash.text or "cannot open shared object" in flash.text
        yield bad(
            "fault", name, f"flash-attn-{'abi' if abi else flash.kind}", flash.text,
            why="it was compiled for another torch or CUDA, and transformers will still choose it" if abi else
            "it does not load, and transformers will still choose it",
            fix="pip install --force-reinstall --no-deps --no-build-isolation --no-cache-dir flash-attn, which compiles it",
            source=f"{_FLASH}/issues/975; transformers/utils/import_utils.py",
        )  # fmt: skip


def _other_build(facts: Facts, install: str) -> str:
    """`install` with the index of the wheels for the driver's CUDA; "" where no torch that we take is built for it."""
    taken = facts.torch.driver_cuda // 1000 if isinstance(facts.torch, Torch) else 0
    if not taken and facts.kernel_driver and (branch := facts.kernel_driver.split(".")[0]).isdigit():
        taken = max((cuda for cuda, oldest in _OLDEST_DRIVER.items() if int(branch) >= oldest), default=0)
    wheels = {0: "cu130", 12: "cu128", 13: "cu130"}.get(taken)  # torch 2.11 and newer
    return f"{install} --index-url https://download.pytorch.org/whl/{wheels}" if wheels else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _range(number: int) -> str:
    return "GPU 0" if number == 1 else f"GPU 0-{number - 1}"


def _ids(gpus: list[Gpu]) -> str:
    first, last = gpus[0].index, gpus[-1].index
    if last - first == len(gpus) - 1:
        return f"GPU {first}" if first == last else f"GPU {first}-{last}"
    return f"GPU {','.join(str(gpu.index) for gpu in gpus)}"


CHECKS = (driver, build, visible, cards, modes, flash_attention)
