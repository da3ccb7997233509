"""How far memory was over: the numbers in PyTorch's, vLLM's and Ray's messages."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields

from verl_shard.common.units import GIB

_UNITS = {
    "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB, "TiB": 1 << 40, "KB": 1 << 10, "MB": 1 << 20, "GB": GIB,
    "TB": 1 << 40,
}  # fmt: skip
"""PyTorch wrote GB for 2^30 bytes until it wrote GiB, and Ray does."""
_SIZE = r"([\d.,]+) ?(bytes|[KMGT]i?B)\b"

# Each version of PyTorch words its message anew; a number is looked for in all the ways it was said.
_SAYS = {
    "tried": (rf"Tried to allocate {_SIZE}", rf"requested? {_SIZE}"),
    "total": (rf"total capacity of {_SIZE}", rf"; {_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"; {_SIZE} free", r"Free memory on device[^(]*\(([\d.]+)/[\d.]+ ()GiB\)"),
    "allocated": (rf"Of the allocated memory {_SIZE} is allocated by PyTorch", rf"; {_SIZE} already allocated"),
    "unused": (rf"and {_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"; {_SIZE} reserved in total by PyTorch", rf"; {_SIZE} cached"),
    "process": (rf"this process has {_SIZE} memory in use",),
    "wanted": (r"desired GPU memory utilization \([\d.]+, ([\d.]+) ()GiB\)",),
}
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_GPU = re.compile(r"\bGPU (\d+)[ ;]")


@dataclass(frozen=True)
class MemoryShort:
    """What a message says of a GPU's memory, in bytes; None for what it does not say.

    tried: the allocation that failed. total, free: of the GPU. allocated: tensors of this process; unused: reserved by
    PyTorch and holding none. process: all that this process has, other: what the other processes named there have.
    wanted: what an engine asked for as its share.
    """

    gpu: int | None = None
    tried: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    unused: int | None = None
    reserved: int | None = None
    process: int | None = None
    other: int | None = None
    wanted: int | None = None

    @property
    def over(self) -> int | None:
        """By how much it did not fit: what was tried beyond what was free."""
        asked = self.tried if self.tried is not None else self.wanted
        return None if asked is None or self.free is None else asked - self.free

    @property
    def fragmented(self) -> bool:
        """Enough was reserved and unused, in pieces that were too small."""
        return self.tried is not None and self.unused is not None and self.unused + (self.free or 0) >= self.tried

    @property
    def said(self) -> dict[str, int]:
        """The numbers that there are."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        shown = []
        if self.tried is not None:
            shown.append(f"{_gib(self.tried)} more were asked for")
        if self.wanted is not None:
            shown.append(f"{_gib(self.wanted)} were asked for")
        if self.free is not None:
            shown.append(f"{_gib(self.free)} were free" + (f" of {_gib(self.total)}" if self.total else ""))
        if self.over is not None and self.over > 0:
            shown.append(f"{_gib(self.over)} too little")
        if self.allocated is not None:
            shown.append(f"this process held {_gib(self.allocated)} in tensors")
        if self.unused:
            shown.append(f"{_gib(self.unused)} reserved and unused")
        if self.other:
            shown.append(f"{_gib(self.other)} in other processes on the GPU")
        gpu = f"GPU {self.gpu}: " if self.gpu is not None and shown else ""
        return gpu + ", ".join(shown)


def read_memory(text: str) -> MemoryShort | None:
    """The numbers in a message, or None if there are none."""
    found: dict[str, int] = {}
    for name, patterns in _SAYS.items():
        for pattern in patterns:
            if match := re.search(pattern, text):
                found[name] = _bytes(match[1], match[2] or "GiB")
                break
    others = {match[1]: _bytes(match[2], match[3]) for match in _OTHERS.finditer(text)}
    if others:
        # Without a line of its own, the process that failed is one of those that are named.
        found["other" if "process" in found else "process"] = sum(others.values())
    if not found:
        return None
    gpu = _GPU.search(text)
    return MemoryShort(gpu=int(gpu[1]) if gpu else None, **found)


def _bytes(number: str, unit: str) -> int:
    return round(float(number.replace(",", "")) * _UNITS[unit])


def _gib(size: int) -> str:
    if size < GIB / 16:
        return f"{size / (1 << 20):.0f} MiB"
    return f"{size / GIB:.2f} GiB"


assert set(_SAYS) < {field.name for field in fields(MemoryShort)}
