"""NCCL and its variables, CUDA's and torch's variables that change how a run goes, the host's name, and ports."""

from __future__ import annotations

from collections.abc import Iterator

from verl_shard.diagnosis.doctor_facts import Check, Facts, Torch, bad, ok

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
RAY_PORT = 6379
"""Where `ray start --head` listens."""


def nccl(facts: Facts) -> Iterator[Check]:
    """The NCCL that torch has, and files that set its variables."""
    torch = facts.torch
    if not isinstance(torch, Torch) or not torch.gpus:
        return
    if torch.nccl is None:
        yield bad(
            "fault" if len(torch.gpus) > 1 else "warning", "NCCL", "no-nccl", "this torch is built without it",
            why="processes on several GPUs cannot talk", fix="Install the ordinary torch wheel", source="torch.cuda.nccl",
        )  # fmt: skip
        return
    direct = {None: "", True: ", GPUs reach each other directly", False: ", GPUs do not all reach each other directly"}
    installed = [name for name in facts.packages if name.startswith("nvidia-nccl-cu")]
    versions = {name: facts.packages[name].version for name in installed}
    other = [f"{name} {version}" for name, version in versions.items() if not _same(version, torch.nccl)]
    if other and len(installed) == len(other):
        yield bad(
            "warning", "NCCL", "other-nccl", f"{torch.nccl} is loaded, {' and '.join(other)} is installed",
            why="another library comes first, and torch was not tested with it",
            fix="Take other NCCLs off LD_LIBRARY_PATH and LD_PRELOAD", source="torch.cuda.nccl.version()",
        )  # fmt: skip
    else:
        yield ok("NCCL", f"{torch.nccl}{direct[torch.peers]}")
    if facts.nccl_files:
        yield ok("NCCL files", f"{', '.join(facts.nccl_files)} set variables too")


def _same(version: str, loaded: str) -> bool:
    return version.split(".")[:3] == loaded.split(".")[:3]


def interfaces(facts: Facts) -> Iterator[Check]:
    """Interfaces that NCCL and gloo are told to use."""
    there = facts.interfaces
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        names = facts.set_to(variable)
        if names is None or not there:
            continue
        chosen = nccl_interfaces(names, there) if variable.startswith("NCCL") else gloo_interfaces(names, there)
        found, list_ = f"{variable}={names}", ", ".join(there)
        if not chosen:
            yield bad(
                "fault", "interface", "no-such-interface", found, why=f"no interface here goes by that: there are {list_}",
                fix=f"unset {variable}, or set it on each node to one that is there (ip -br address)",
                source=_ENV if variable.startswith("NCCL") else "https://docs.pytorch.org/docs/stable/distributed.html",
            )  # fmt: skip
        else:
            yield ok("interface", f"{found}: {', '.join(chosen)}")


def nccl_interfaces(names: str, there: tuple[str, ...]) -> list[str]:
    """Which interfaces NCCL takes for a value: prefixes, or names after "="; all others after "^"."""
    excludes, rest = names.startswith("^"), names.lstrip("^")
    exact = rest.startswith("=")
    wanted = [one.strip() for one in rest.lstrip("=").split(",") if one.strip()]
    return [
        name for name in there
        if excludes != any(name == one if exact else name.startswith(one) for one in wanted)
    ]  # fmt: skip


def gloo_interfaces(names: str, there: tuple[str, ...]) -> list[str]:
    """Which interfaces gloo takes: names as they are, and all of them must be there."""
    wanted = [one.strip() for one in names.split(",") if one.strip()]
    return wanted if set(wanted) <= set(there) else []


def variables(facts: Facts) -> Iterator[Check]:
    """Variables that switch something off, each only where it matters; the rest of NCCL's are named."""
    said = {"NCCL_SOCKET_IFNAME", "NCCL_VERSION"}  # the latter is the word of NVIDIA's images, which NCCL does not read
    for check in _switched_off(facts):
        said.add(check.found.split("=")[0])
        yield check
    rest = [
        f"{name}={value}" for name, value in sorted(facts.env.items()) if name.startswith("NCCL_") and name not in said
    ]
    if rest:
        yield ok("variables", ", ".join(rest))


def _switched_off(facts: Facts) -> Iterator[Check]:
    several = len(facts.gpus) > 1
    off = facts.set_to
    if several and (off("NCCL_P2P_DISABLE") or "0") != "0":
        yield _variable(
            facts, "NCCL_P2P_DISABLE", "nccl-p2p-disabled",
            "GPUs then exchange everything through host memory, several times slower, although they reach each other"
            if isinstance(facts.torch, Torch) and facts.torch.peers else "GPUs then exchange everything through host memory",
        )  # fmt: skip
    if several and (off("NCCL_SHM_DISABLE") or "0") != "0":
        yield _variable(
            facts, "NCCL_SHM_DISABLE", "nccl-shm-disabled", "GPUs without direct access then talk over sockets"
        )
    if facts.infiniband and (off("NCCL_IB_DISABLE") or "0") != "0":
        why = f"nodes then talk over sockets, although there is {', '.join(facts.infiniband)}"
        yield _variable(facts, "NCCL_IB_DISABLE", "nccl-ib-disabled", why)
    if facts.has_gpu and (off("CUDA_LAUNCH_BLOCKING") or "0") != "0":
        yield _variable(
            facts, "CUDA_LAUNCH_BLOCKING", "launch-blocking", "every kernel is waited for, and nothing overlaps",
            "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
        )  # fmt: skip
    if facts.has_gpu and off("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield _variable(
            facts, "CUDA_DEVICE_MAX_CONNECTIONS", "max-connections",
            "copies and kernels then queue up behind each other; it is for Megatron, and FSDP must not have it",
            "verl 0.9.1: trainer/constants_ppo.py",
        )  # fmt: skip
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in (off(name) or "") and "vllm" in facts.packages:
            yield _variable(
                facts, name, "expandable-segments", "vLLM's sleep mode, which verl uses, refuses expandable segments",
                "vllm: device_allocator/cumem.py; verl switches them on by itself where they may be",
            )  # fmt: skip
    for old in ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"):
        if off(old):
            yield bad(
                "warning", "variable", "old-name", f"{old}={off(old)}", why="torch has another name for it",
                fix=f"export TORCH_{old}={off(old)}, and unset {old}",
                source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
            )  # fmt: skip


def _variable(facts: Facts, name: str, code: str, why: str, source: str = _ENV) -> Check:
    fix = f"unset {name}, unless a fault of this machine needs it"
    return bad("warning", "variable", code, f"{name}={facts.env[name]}", why=why, fix=fix, source=source)


def names_and_ports(facts: Facts) -> Iterator[Check]:
    """The host's name, whether it reaches itself, and ports that are taken."""
    if facts.host and facts.host_address is None:
        yield bad(
            "warning", "host name", "host-name", f"{facts.host} has no address",
            why="gloo and torchrun look the host's own name up, and fail or wait for it",
            fix=f"Add a line for {facts.host} to /etc/hosts, or export GLOO_SOCKET_IFNAME=<interface>",
            source="https://docs.pytorch.org/docs/stable/distributed.html; getaddrinfo",
        )  # fmt: skip
    elif facts.reaches_itself is False:
        yield bad(
            "fault", "host name", "host-closed", f"{facts.host} ({facts.host_address})",
            why="a port opened here is not reached under this address: a firewall, or an old entry of /etc/hosts",
            fix="Let connections of this host to itself through, and correct /etc/hosts", source="tried",
        )  # fmt: skip
    elif facts.host:
        yield ok("host name", f"{facts.host} ({facts.host_address}), reaches itself")
    master = facts.set_to("MASTER_PORT")
    for port in facts.ports_taken:
        if str(port) == master:
            yield bad(
                "warning", "port", "master-port", f"MASTER_PORT={port} is taken",
                why="torchrun and accelerate launch cannot listen there",
                fix="unset MASTER_PORT, or choose a free one", source="tried",
            )  # fmt: skip


CHECKS = (nccl, interfaces, variables, names_and_ports)
