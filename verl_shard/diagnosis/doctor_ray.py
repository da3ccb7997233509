"""Ray: the cluster that a run would join or start, and what it counts."""

from __future__ import annotations

from collections.abc import Iterator

from verl_shard.diagnosis.doctor_child import WRONG_TOKEN
from verl_shard.diagnosis.doctor_facts import Check, Facts, Ray, Trouble, bad, ok
from verl_shard.diagnosis.doctor_host import CPUS_PER_GPU
from verl_shard.diagnosis.doctor_network import RAY_PORT

_INIT = "https://docs.ray.io/en/latest/ray-core/api/doc/ray.init.html"
_LOCAL = "+ray_kwargs.ray_init.address=local makes verl start a Ray of its own"


def cluster(facts: Facts) -> Iterator[Check]:
    """Ray itself, and whether the cluster that ray.init() would join answers."""
    ray = facts.ray
    address = facts.set_to("RAY_ADDRESS")
    if isinstance(ray, Trouble):
        if ray.kind != "missing":
            yield bad(
                "fault", "Ray", f"ray-{ray.kind}", ray.text, why="runs on verl's trainer need it",
                fix="Try python -c 'import ray' and ray status; ray stop --force ends a Ray that hangs",
                source="tried in a process of its own",
            )  # fmt: skip
        elif "verl" in facts.packages:
            yield bad(
                "fault", "Ray", "ray-missing", "not installed", why="verl's trainer runs on it",
                fix='pip install "verl_shard[verl]"', source="metadata of verl",
            )  # fmt: skip
        else:
            yield ok("Ray", "not installed; it comes with the extra [verl]")
        return
    if address and address.startswith(("http://", "https://")):
        yield bad(
            "fault", "Ray", "ray-address-http", f"RAY_ADDRESS={address}",
            why="that is the dashboard, for ray job submit; ray.init, which verl calls, refuses it",
            fix=f"unset RAY_ADDRESS on a machine of the cluster, or give the head's port: {_host(address)}:{RAY_PORT}",
            source="Ray 2.60: ValueError: Invalid Ray address; tried",
        )  # fmt: skip
    elif WRONG_TOKEN in ray.error:
        yield bad(
            "fault", "Ray", "ray-token", f"{ray.address}: {ray.error}",
            why="this cluster asks for a token, as ray start chooses by itself",
            fix="export RAY_AUTH_MODE=token; on another machine also copy the token there (~/.ray/auth_token)",
            source="https://docs.ray.io/en/latest/ray-security/token-auth.html; tried with Ray 2.60",
        )  # fmt: skip
    elif ray.error:
        given = ray.address_from == "RAY_ADDRESS"
        yield bad(
            "fault", "Ray", "ray-unreachable", f"{ray.address_from}{'=' if given else ' says '}{ray.address}: {ray.error}",
            why="ray.init joins this cluster and no other: it waits, and ends the program after 40 s",
            fix=f"unset RAY_ADDRESS, or start the cluster; {_LOCAL}" if given else
            f"ray stop removes what is left of a cluster that is gone; {_LOCAL}",
            source=f"{_INIT}; tried with Ray 2.60",
        )  # fmt: skip
    elif ray.address:
        gpus, cpus = sum(node.gpus for node in ray.nodes), sum(node.cpus for node in ray.nodes)
        nodes = f"{len(ray.nodes)} node{'' if len(ray.nodes) == 1 else 's'}"
        yield ok("Ray", f"{ray.version}, cluster {ray.address}: {nodes}, {gpus:g} GPUs, {cpus:g} CPUs")
    else:
        yield ok("Ray", f"{ray.version}; a run starts one of its own")


def counts(facts: Facts) -> Iterator[Check]:
    """What Ray counts against what there is: too few GPUs are refused, too few CPUs are waited for without end."""
    ray, seen = facts.ray, len(facts.gpus)
    if isinstance(ray, Trouble) or ray.error:
        return
    if not ray.nodes:
        local = [f"{ray.local_gpus} GPUs"] if ray.local_gpus is not None else []
        local += [f"{ray.local_cpus:g} CPUs"] if ray.local_cpus is not None else []
        if ray.local_gpus is not None and ray.local_gpus < seen:
            yield bad(
                "fault", "counts", "ray-fewer-gpus", f"Ray would count {ray.local_gpus} of {seen} GPUs",
                why="it asks NVML, not torch; verl refuses to start with fewer than it was told",
                fix=f"+ray_kwargs.ray_init.num_gpus={seen}, and see why nvidia-smi lists fewer",
                source="Ray 2.60: accelerators/nvidia_gpu.py; verl 0.9.1: single_controller/ray/base.py",
            )  # fmt: skip
        elif local:
            yield ok("counts", f"it would count {' and '.join(local)} here")
    else:
        yield from _cluster_counts(facts, ray, seen)
    if RAY_PORT in facts.ports_taken and not ray.address:
        yield bad(
            "warning", "port", "ray-port", f"{RAY_PORT} is taken, and not by Ray",
            why="ray start --head listens there (so does Redis); runs that start a Ray of their own are not touched by it",
            fix=f"ray start --head --port {RAY_PORT + 1}", source="https://docs.ray.io/en/latest/ray-core/configure.html",
        )  # fmt: skip


def _cluster_counts(facts: Facts, ray: Ray, seen: int) -> Iterator[Check]:
    here = next((node for node in ray.nodes if node.host == facts.host), None)
    gpus, cpus = sum(node.gpus for node in ray.nodes), sum(node.cpus for node in ray.nodes)
    most = CPUS_PER_GPU * max(node.gpus for node in ray.nodes)
    restart = f"ray stop, then ray start --num-gpus {seen}"
    if here is None:
        hosts = ", ".join(node.host for node in ray.nodes)
        yield bad(
            "warning", "counts", "not-in-cluster", f"{facts.host} is not one of its nodes ({hosts})",
            why="verl's workers run elsewhere, and what was looked at here is not where they run",
            fix=f"Run verl-shard doctor on its nodes, or join: ray start --address {ray.address}", source="ray.nodes()",
        )  # fmt: skip
    elif here.gpus < seen:
        yield bad(
            "fault", "counts", "ray-fewer-gpus", f"{here.gpus:g} GPUs here, and torch sees {seen}",
            why="Ray counted when it was started: other visible GPUs, or --num-gpus", fix=restart, source="ray.nodes()",
        )  # fmt: skip
    elif here.gpus > seen and facts.has_gpu:  # without a GPU, verl on CPUs is given one that is made up
        yield bad(
            "fault", "counts", "ray-more-gpus", f"{here.gpus:g} GPUs here, and torch sees {seen}",
            why="workers placed on one that is not there fail", fix=restart, source="ray.nodes()",
        )  # fmt: skip
    if gpus and cpus < CPUS_PER_GPU * gpus:
        yield bad(
            "fault", "counts", "ray-few-cpus", f"{cpus:g} CPUs for {gpus:g} GPUs",
            why=f"verl asks for {CPUS_PER_GPU} CPUs with each GPU, and waits for ever when they are not there",
            fix=f"ray start --num-cpus {most:g} on each node (Ray only counts them)",
            source="verl 0.9.1: single_controller/ray/base.py, max_colocate_count=3",
        )  # fmt: skip
    uneven = {node.gpus for node in ray.nodes if node.gpus}
    if len(uneven) > 1:
        yield bad(
            "warning", "counts", "uneven-nodes", "nodes of " + ", ".join(f"{count:g}" for count in sorted(uneven)) + " GPUs",
            why="stock verl takes the same number of each (trainer.n_gpus_per_node)",
            fix=f"trainer.n_gpus_per_node={min(uneven):g}, or nodes alike", source="https://github.com/verl-project/verl/issues/2596",
        )  # fmt: skip
    if ray.free_gpus < gpus:
        yield bad(
            "warning", "counts", "ray-gpus-taken", f"{ray.free_gpus:g} of {gpus:g} GPUs are free",
            why="verl asks for free ones, and refuses to start with fewer than it was told",
            fix="ray status shows who holds them", source="verl 0.9.1: ResourcePoolManager._check_resource_available",
        )  # fmt: skip


def _host(address: str) -> str:
    return address.split("://", 1)[1].split("/")[0].rsplit(":", 1)[0] or "<head>"


CHECKS = (cluster, counts)
