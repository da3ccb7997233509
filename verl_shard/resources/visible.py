"""From the ids that torch counts to the GPUs that the driver knows by UUID."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from verl_shard.common.notices import notice


def visible_uuids(uuids: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The UUIDs of the GPUs that torch sees in this process, in its order.

    uuids, names: of all GPUs of the machine in the driver's order, that of the PCI bus. A torch that is at work is asked;
    before, what CUDA_VISIBLE_DEVICES says is what it will see.
    """
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        found = [_uuid_of(torch, ordinal) for ordinal in range(torch.cuda.device_count())]
        if all(uuid in uuids for uuid in found):
            return tuple(found)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len(set(names)) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        why = "there are several kinds, and CUDA counts the fastest first unless it is told otherwise"
        notice(
            "gpu-order",
            "GPU ids",
            ", ".join(dict.fromkeys(names)),
            why,
            "the order of the bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    if listed is None:
        return tuple(uuids)
    found = []
    for entry in (part.strip() for part in listed.split(",")):
        uuid = _named(entry, uuids)
        if uuid is None or uuid in found:
            break  # as CUDA does: what stands after a name that is none is not seen
        found.append(uuid)
    return tuple(found)


def _named(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    fitting = [uuid for uuid in uuids if uuid.startswith(entry)] if entry.startswith("GPU-") else []
    return fitting[0] if len(fitting) == 1 else None


def _uuid_of(torch: Any, ordinal: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
