"""Leases on GPUs: files of this machine, one a GPU, locked by the process that has it.

A lock goes with its process, however that ends, so that there is nothing to clean up. A file says who has it. The
folder is the machine's and not the user's, for two users must not take the same GPU either.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from verl_shard.common.errors import ConfigError, Finding, config_error

FOLDER_VARIABLE = "VERL_SHARD_LEASES"
"""Environment variable that names another folder for the files."""
_FOLDER = "/tmp/verl_shard-leases"
_GUARD = ".guard"
_LONGEST = 200
_SAME_START_S = 2.0
"""Clocks of process starts differ by so much at most; a later process with the same id is another."""


@dataclass(frozen=True)
class Owner:
    """Who has a lease. started: when the process began, since: when it took the lease (seconds of the epoch).

    space: the namespace that its pid is of; pids of another say nothing here.
    """

    pid: int
    user: str
    command: str
    started: float
    since: float
    space: str

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        process = psutil.Process()
        command = " ".join(process.cmdline())[:_LONGEST]
        return cls(process.pid, _user(), command, process.create_time(), time.time(), _space())

    @property
    def words(self) -> str:
        """For people."""
        at = time.strftime("%H:%M on %d %b", time.localtime(self.since))
        return f"pid {self.pid} of {self.user} ({self.command}), since {at}"

    @property
    def dead(self) -> bool:
        """Whether that process is known to be gone."""
        if self.space != _space():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > _SAME_START_S
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    @property
    def started_me(self) -> bool:
        """Whether it is this process, or one that started it: a launcher leases for its workers."""
        if self.space != _space():
            return False
        mine = {process.pid: process for process in (psutil.Process(), *psutil.Process().parents())}
        found = mine.get(self.pid)
        return found is not None and abs(found.create_time() - self.started) <= _SAME_START_S


class Lease:
    """GPUs that this process has, until `release` or its end. A context manager."""

    def __init__(self, device_ids: tuple[int, ...], uuids: Iterable[str]) -> None:
        self.device_ids = device_ids
        self._uuids = list(uuids)

    def release(self) -> None:
        """Gives them back; to be called again is nothing."""
        for uuid in self._uuids:
            _give_back(uuid)
        self._uuids = []

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({list(self.device_ids)}{'' if self._uuids else ', released'})"


@dataclass
class _Held:
    descriptor: int
    times: int


_held: dict[str, _Held] = {}


def _forget_in_child() -> None:
    """A forked child does not keep its parent's leases alive: it closes its copies, and unlocks nothing."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def take(gpus: Mapping[int, str]) -> Lease:
    """Leases GPUs, given as UUIDs by id, all or none. What this process has already, or what a process that started it
    has, is shared. Raises ConfigError that says of each who has it."""
    faults: list[Finding] = []
    taken: list[str] = []
    with _guarded() as folder:
        for id, uuid in gpus.items():
            if uuid in _held:
                _held[uuid].times += 1
                taken.append(uuid)
                continue
            owner = _try_to_take(folder / uuid)
            if owner is None:
                taken.append(uuid)
            elif not owner.started_me:
                fix = "Name another GPU, or wait until that run has ended"
                faults.append(Finding("error", "gpu-leased", f"GPU {id}", uuid, f"leased by {owner.words}", fix))
        if faults:
            for uuid in taken:
                _give_back(uuid)
            raise ConfigError(faults)
    return Lease(tuple(gpus), taken)


def owners() -> dict[str, Owner]:
    """Who has which GPU on this machine, by UUID."""
    if not _folder().is_dir():
        return {}
    found = {}
    with _guarded() as folder:
        for path in folder.iterdir():
            if path.name != _GUARD and path.name in _held:
                found[path.name] = Owner.me() if (own := _record(path)) is None else own
            elif path.name != _GUARD and (owner := _owner(path)) is not None:
                found[path.name] = owner
    return found


def _owner(path: Path) -> Owner | None:
    """Who has the lock of a file that is not ours; None when nobody has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        record = _record(path)
        return None if record is not None and record.dead else record
    finally:
        os.close(descriptor)
    return None


def _try_to_take(path: Path) -> Owner | None:
    """Locks the file for this process, or says who has it. To be called under the guard."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        owner = _record(path) or Owner(0, "somebody", "which does not say what it is", 0.0, time.time(), "")
        if not owner.dead:
            return owner
        # The process is gone and something it started holds its lock on: the file is replaced, and the old lock is of nothing.
        try:
            path.unlink()
        except PermissionError:
            return owner
        descriptor = _open(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Owner.me())).encode(), 0)
    _held[path.name] = _Held(descriptor, 1)
    return None


def _give_back(uuid: str) -> None:
    held = _held.get(uuid)
    if held is None:  # in a child of the process that took it
        return
    held.times -= 1
    if held.times == 0:
        del _held[uuid]
        os.ftruncate(held.descriptor, 0)
        os.close(held.descriptor)


def _record(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)


@contextmanager
def _guarded() -> Iterator[Path]:
    """The folder, made where it is not, while nobody else looks at its files or changes them."""
    folder = _folder()
    try:
        folder.mkdir(parents=True)
        folder.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise _no_folder(folder, error) from error
    descriptor = _open(folder / _GUARD)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Opens a file that every user of the machine can lock and write, made where it is not."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        while True:
            try:
                return os.open(path, flags)
            except FileNotFoundError:
                pass
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            os.fchmod(descriptor, 0o666)  # whatever this user's umask is
            return descriptor
    except OSError as error:
        raise _no_folder(path, error) from error


def _no_folder(path: Path, error: OSError) -> ConfigError:
    why = f"leases on GPUs cannot be written ({error.strerror})"
    fix = f"Set {FOLDER_VARIABLE} to a folder that everybody on this machine can write"
    return config_error("no-leases", str(path), None, why, fix)


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        return str(os.getuid())
