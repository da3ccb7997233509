"""What benches measure on and with: this machine's GPUs, processes of their own, a limit of memory, models by name."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

import psutil

from verl_shard.bench.maps import zoo
from verl_shard.bench.record import machine
from verl_shard.common.errors import ConfigError, config_error
from verl_shard.common.units import parse_bytes
from verl_shard.config.cards import Card, card_of_memory, find_card

T = TypeVar("T")
TINY = "tiny"
"""A model of a few thousand parameters, which is what a CPU gets by default."""
_TINY = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """gpus: how many torch sees. memory: bytes of the smallest that torch may allocate, 0 without. facts: of the record."""

    gpus: int
    memory: int
    facts: Mapping[str, Any]
    no_flash: str | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class Died(Generic[T]):
    """What a process of its own came to: what it returned, or in words why it did not."""

    made: T | None
    why: str = ""


def in_a_process(run: Callable[[], T]) -> Died[T]:
    """Runs something in a process of its own, so that whatever it leaves on a GPU goes with it. Where there is no GPU there
    is nothing to leave, and it runs here. run: can be pickled.

    What it raises comes back as words.
    """
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asked otherwise, CUDA starts and nothing can fork
    if not torch.cuda.is_available():
        return Died(run())
    # Where CUDA runs here, or was started as NVML does not answer, another process begins anew, which takes it seconds.
    forks = torch.cuda._device_count_nvml() >= 0 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    how = multiprocessing.get_context("fork" if forks else "spawn")
    here, there = multiprocessing.Pipe(duplex=False)
    child: Any = how.Process(target=_run_and_send, args=(run, there))  # type: ignore[attr-defined]
    child.start()
    there.close()
    try:
        answer: Died[T] = here.recv()
    except EOFError:
        answer = Died(None, "its process died; the system kills one that takes more memory than the host has")
    child.join()
    return answer


def _run_and_send(run: Callable[[], T], there: Any) -> None:
    try:
        answer = Died(run())
    except Exception as error:  # noqa: BLE001 - one process must not cost the others, and its words are told
        answer = Died(None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    there.send(answer)


def look(model: Any, *, autocast: bool = True) -> Machine:
    """This machine, as a process of its own sees it. model: a configuration, asked whether flash_attention_2 can run it."""
    found = in_a_process(partial(_look, model, autocast))
    if found.made is None:
        raise config_error(
            "no-machine", "bench", None, f"the GPUs cannot be used: {found.why}", "See verl-shard doctor"
        )
    return found.made


def _look(model: Any, autocast: bool) -> Machine:
    import torch

    from verl_shard.runtime.attention import why_not_flash_attention

    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    totals = [torch.cuda.mem_get_info(gpu)[1] - _context(gpu) for gpu in range(n)]
    devices: list[Any] = list(range(n)) or ["cpu"]
    mixed = torch.bfloat16 if autocast else None
    why = why_not_flash_attention(model, dtype=torch.float32, devices=devices, autocast_dtype=mixed)
    return Machine(n, min(totals, default=0), machine(), why)


def _context(gpu: int) -> int:
    """Bytes of the driver's own, in a process that has touched the GPU and allocated nothing."""
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    return total - free


def card_for(found: Machine, room: int) -> Card:
    """The card there is, with so many bytes for torch. One that is not known by name has the speeds of a like one."""
    from verl_shard.memory.constants import CUDA_CONTEXT

    memory = room + CUDA_CONTEXT.n_bytes
    try:
        known = find_card(found.facts["gpus"][0])
    except ConfigError:
        known = card_of_memory(memory)
    return replace(known, memory=memory)


def cap_memory(limit: int | None, gpus: int) -> None:
    """Lets torch take no more than so many bytes of each GPU, as if it were a smaller one."""
    import torch

    for gpu in range(gpus if limit is not None else 0):
        assert limit is not None, "the range is empty otherwise"
        total = torch.cuda.get_device_properties(gpu).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), gpu)


def read_limit(given: str | None, found: Machine) -> int | None:
    """Bytes of --gpu-memory. Raises ConfigError for more than the GPUs have, and where there is none."""
    if given is None:
        return None
    limit = parse_bytes(given, "--gpu-memory")
    if not found.gpus:
        raise config_error("no-gpu", "--gpu-memory", given, "torch sees no GPU here", "Leave it out")
    if limit > found.memory:
        why = f"the GPU has {found.memory} bytes for torch"
        raise config_error("gpu-memory", "--gpu-memory", given, why, "Give less, or leave it out")
    return limit


def named_config(model: str) -> Any:
    """The configuration of a model by its name in the zoo, of "llama-1b", or of "tiny". Raises ConfigError for others."""
    from transformers import AutoConfig

    from verl_shard.bench.stock_cells import config_of

    if model == TINY:
        fields: dict[str, Any] = dict(_TINY)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        config.architectures = ["Qwen2ForCausalLM"]
        return config
    known = [entry["name"] for entry in zoo() if entry["auto"] == "AutoModelForCausalLM"] + ["llama-1b", TINY]
    if model not in known:
        raise config_error("model", "--model", model, "no such language model", f"Use one of {', '.join(known)}")
    return config_of(model)


class HostPeak:
    """The most memory that this process has on the host (its resident set) while the block runs, looked at every 10 ms."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = 0

    def __enter__(self) -> HostPeak:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss)
