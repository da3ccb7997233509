"""Looks that may hang or crash, each in a process of its own: `python -m verl_shard.diagnosis.doctor_child torch`.

What was found is printed as it is found, one line of JSON after a mark, so that a process that is ended for taking too long
has still said something. Nothing is imported at the top that may be missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

MARK = "@doctor "
WRONG_TOKEN = "InvalidAuthToken"
CONNECT_S = 3.0
Tell = Callable[[dict[str, Any]], None]


def tell(found: dict[str, Any]) -> None:
    """Prints some of what was found."""
    print(f"\n{MARK}{json.dumps(found)}", flush=True)


def look_at_torch(say: Tell) -> None:
    """torch's build, each GPU and a small product on it, direct access, NCCL, pinning."""
    torch: Any = import_module("torch")
    say({"version": torch.__version__, "cuda": torch.version.cuda, "rocm": getattr(torch.version, "hip", None)})
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return
    driver = _or(0, driver_cuda)
    say({"driver_cuda": driver})
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        if driver or torch.cuda.device_count():
            say({"error": _first_line(error)})
        return
    count = torch.cuda.device_count()
    say({"archs": list(torch.cuda.get_arch_list()), "nccl": _or(None, lambda: _nccl(torch))})
    gpus: list[dict[str, Any]] = []
    for index in range(count):
        there = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        error = _error_of(lambda index=index: _product(torch, index))  # type: ignore[misc]
        gpus.append(
            {
                "index": index,
                "name": there.name,
                "memory": there.total_memory,
                "free": free,
                "capability": [there.major, there.minor],
                "error": error,
            }
        )
        say({"gpus": gpus})
    if count > 1:
        pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
        say({"peers": _or(None, lambda: all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs))})
    if count:
        say({"pin_error": _error_of(lambda: torch.empty(2**26, dtype=torch.uint8, pin_memory=True))})


def driver_cuda() -> int:
    """The newest CUDA that the driver's library takes, as 1000 * major + 10 * minor. Raises OSError without a driver."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _product(torch: Any, index: int) -> None:
    ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
    assert float((ones @ ones).sum()) == 64.0**3, "a product of ones came out wrong"


def _nccl(torch: Any) -> str:
    return ".".join(str(part) for part in import_module("torch.cuda.nccl").version())


def look_at_flash(say: Tell) -> None:
    """flash_attn imported, and its forward and backward pass against sdpa's on each GPU."""
    torch: Any = import_module("torch")
    flash = import_module("flash_attn")
    attend = import_module("flash_attn.flash_attn_interface").flash_attn_func
    say({"version": str(getattr(flash, "__version__", ""))})
    ran, errors = [], {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        error = _error_of(lambda index=index: _attention(torch, attend, index))  # type: ignore[misc]
        if error:
            errors[index] = error
        else:
            ran.append(index)
        say({"ran_on": ran, "errors": errors})


def _attention(torch: Any, attend: Any, index: int) -> None:
    torch.manual_seed(0)
    shape, device = (1, 128, 4, 64), f"cuda:{index}"  # batch, tokens, heads, size of a head
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ours = attend(query, key, value, causal=True)
    (mine,) = torch.autograd.grad(ours.float().sum(), query)
    turned = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    sdpa = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
    (theirs,) = torch.autograd.grad(sdpa.float().sum(), query)
    assert torch.allclose(ours, sdpa, atol=0.05, rtol=0.05), "its result is not sdpa's"
    assert torch.allclose(mine, theirs, atol=0.05, rtol=0.05), "its gradient is not sdpa's"


def look_at_ray(say: Tell, address: str) -> None:
    """What Ray counts here, and the cluster at an address ("" for none): reached by TCP first, since ray.init waits long."""
    ray = import_module("ray")
    say({"version": ray.__version__})
    # Private, and only what is not known without it is lost when it is gone.
    utils = _or(None, lambda: import_module("ray._private.utils"))
    say({"local_cpus": _or(None, lambda: float(utils.get_num_cpus(override_docker_cpu_warning=True)))})
    say({"local_gpus": _or(None, _ray_gpus)})
    if not address or address.startswith(("http://", "https://")):
        return
    # Where the cluster is given and does not answer, ray.init ends the process after 40 s.
    error = "no cluster was started here" if address == "auto" else reach(address)
    if error:
        say({"error": error})
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        nodes = [
            {
                "host": node["NodeManagerHostname"],
                "gpus": node["Resources"].get("GPU", 0.0),
                "cpus": node["Resources"].get("CPU", 0.0),
            }
            for node in ray.nodes()
            if node["Alive"]
        ]
        say({"nodes": nodes, "free_gpus": ray.available_resources().get("GPU", 0.0)})
        ray.shutdown()
    except SystemExit:
        say({"error": "something listens there that is no Ray cluster"})
    except Exception as failed:  # noqa: BLE001 - whatever it is, it is the answer
        say({"error": " ".join(str(failed).split())[:300]})  # of other versions: those are on lines of their own


def _ray_gpus() -> int:
    manager = import_module("ray._private.accelerators").get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    count = int(manager.get_current_node_num_accelerators())
    return count if visible is None else min(count, len(visible))


def reach(address: str) -> str:
    """Why no connection to "host:port" (with or without "ray://") can be made; "" if one can."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return "not of the form host:port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return _first_line(error)
    return ""


def _error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return _first_line(error) or type(error).__name__
    return ""


def _or(other: Any, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception:  # noqa: BLE001 - not known, then
        return other


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def main(argv: list[str]) -> int:
    """Looks at one thing; an import that fails is told, and is no crash."""
    looks: dict[str, Callable[[Tell], None]] = {"torch": look_at_torch, "flash": look_at_flash}
    looks["ray"] = lambda say: look_at_ray(say, argv[1] if len(argv) > 1 else "")
    packages = {"torch": "torch", "flash": "flash_attn", "ray": "ray"}
    try:
        looks[argv[0]](tell)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == packages[argv[0]]
        tell({"trouble": "missing" if missing else "failed", "text": _first_line(error)})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        tell({"trouble": "failed", "text": f"{type(error).__name__}: {_first_line(error)}"})
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # what a broken driver or Ray does at exit is not waited for
