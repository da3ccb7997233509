"""Who owns which GPU: the leases of a run, and the table that says it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.table import Table

from verl_shard.common.tables import err, table
from verl_shard.mapping.devices import DeviceId, device_label
from verl_shard.resources.leases import Lease, take
from verl_shard.resources.pin import reserve
from verl_shard.resources.usage import gpu_uuids
from verl_shard.training.placement import Places
from verl_shard.verl_plugin.local.group import Processes


class Leases:
    """The GPUs that a run has of this process's, each leased by itself: a role that moves takes some and leaves others."""

    def __init__(self) -> None:
        self._held: dict[int, Lease] = {}

    @property
    def gpus(self) -> tuple[int, ...]:
        """Those that are held."""
        return tuple(sorted(self._held))

    def take(self, gpus: Iterable[int]) -> None:
        """Leases more, all or none. Raises ConfigError that says of each who has it or uses it."""
        new = [gpu for gpu in gpus if gpu not in self._held]
        # The driver may not say whose memory is used (in a container), and ours must not look like another's.
        ours = [gpu for gpu in new if _has_memory(gpu)]
        if not new:
            return
        with take(gpu_uuids(new)):
            if others := [gpu for gpu in new if gpu not in ours]:
                reserve(others).release()
            self._held |= {gpu: take(gpu_uuids([gpu])) for gpu in new}

    def keep(self, gpus: Iterable[int]) -> None:
        """Gives all others back."""
        kept = set(gpus)
        for gpu in [gpu for gpu in self._held if gpu not in kept]:
            self._held.pop(gpu).release()

    def own(self, places: Places, processes: Processes, *, shown: bool) -> None:
        """Takes the GPUs of a run and no others, before anything is loaded on them. shown: with a table of who owns which.

        Raises ConfigError, in all processes, that says who has them.
        """

        def lease() -> list[None]:
            self.take(places.gpus)
            self.keep(places.gpus)
            return []

        processes.gather(lease)
        if shown:
            made = owners(places, processes)
            if processes.first:
                err.print(made)

    @contextmanager
    def until_failure(self) -> Iterator[None]:
        """Gives all back when what is in here fails."""
        try:
            yield
        except BaseException:
            self.keep(())
            raise


def _has_memory(gpu: int) -> bool:
    """Whether this process has some of a GPU already."""
    import torch

    return torch.cuda.memory_reserved(gpu) > 0


def owners(places: Places, processes: Processes) -> Table:
    """Who owns which GPU, of all processes: a row for each, and what is on the CPU."""
    by_device: dict[str, list[str]] = {}
    for device, name in processes.gather(lambda: list(_owned(places))):
        names = by_device.setdefault(device_label(device) if isinstance(device, int) else "CPU", [])
        if name not in ("", *names):  # of several processes all have the same on the CPU
            names.append(name)
    rows = [(label, ", ".join(names) or "nobody") for label, names in sorted(by_device.items(), key=_place)]
    made = table("Who owns which GPU", ("", "components"), rows)
    for column in made.columns:
        column.justify = "left"
    return made


def _owned(places: Places) -> Iterator[tuple[DeviceId, str]]:
    yield from ((device, "") for device in places.share)
    for role, place in places.roles.items():
        how = " (a copy on each)" if place.copies else " (device_map)" if len(place.devices) > 1 else ""
        # The rollout generates on the actor's own module.
        for name in ("actor", "rollout") if role == "actor" else (role,):
            yield from ((device, name + how) for device in place.devices)


def _place(row: tuple[str, object]) -> tuple[bool, int]:
    kind, _, number = row[0].partition(" ")
    return kind != "GPU", int(number or 0)
