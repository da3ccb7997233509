"""GPUs for this process: leased, looked at, and made current."""

from __future__ import annotations

from collections.abc import Iterable

from verl_shard.resources.leases import Lease, take
from verl_shard.resources.usage import check_idle, gpu_uuids, read_ids


def pin_to_device(device_ids: Iterable[int] | str | int) -> Lease:
    """Leases GPUs for this process and makes the first of them torch's current one.

    device_ids: as torch counts them: 2, [0, 1], "0-3" or "cuda:2". They are leased until the process ends or the lease is
    released, so that no other run on this machine that asks takes them; what they already hold is not looked at.
    Raises ConfigError without a driver, for ids that are not there, and for GPUs that another run has, with who it is.
    """
    ids = read_ids(device_ids)
    lease = take(gpu_uuids(ids))
    try:
        import torch

        torch.cuda.set_device(ids[0])
    except BaseException:
        lease.release()
        raise
    return lease


def reserve(device_ids: Iterable[int] | str | int) -> Lease:
    """Leases GPUs that are idle, to be called before a run starts. Raises ConfigError that says of each who uses it.

    The lease comes first: of two runs that start at once one gets them, and the other is told.
    """
    ids = read_ids(device_ids)
    lease = take(gpu_uuids(ids))
    try:
        check_idle(ids)
    except BaseException:
        lease.release()
        raise
    return lease
