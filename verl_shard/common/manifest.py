"""Which files a folder had, with their hashes: written when it is whole, checked before anything in it is loaded.

verl's checkpoints are pickles, and loading a pickle runs what is in it. A manifest says that the files are those which
were saved: it finds what was damaged, cut short, exchanged or added since. It is no signature; whoever can write the
folder can write a manifest too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_shard.common.errors import config_error
from verl_shard.common.files import write_whole

MANIFEST = "MANIFEST.json"
SCHEMA = "verl_shard/manifest/1"
_RUNS = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".py", ".so"}
"""Suffixes of files that run code, or may, when they are loaded; one that came later is refused."""
_MOST_THREADS = 8


def write_manifest(folder: Path) -> None:
    """Lists every file under `folder` with its size in bytes and SHA-256. To be called when all of them are written."""
    paths = _files(folder)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        hashes = pool.map(_sha256, (folder / name for name in paths))
        files = {
            name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
            for name, digest in zip(paths, hashes, strict=True)
        }
    write_whole(folder / MANIFEST, json.dumps({"schema": SCHEMA, "files": files}, indent=2) + "\n")


def check_manifest(folder: Path, where: str = "checkpoint") -> None:
    """Raises ConfigError, naming the files that differ, miss or came later, unless `folder` is as its manifest says.

    Every listed file is read once. Without a manifest a folder with files that may run code is refused as well: nobody
    knows who wrote them.
    """
    there = _files(folder)
    if not (folder / MANIFEST).is_file() and not any(Path(name).suffix in _RUNS for name in there):
        return
    listed = _read(folder, where)
    missing = [name for name in listed if name not in there]
    later = [name for name in there if name not in listed and Path(name).suffix in _RUNS]
    # A size says it without reading the file.
    sized = {name: (folder / name).stat().st_size == entry["bytes"] for name, entry in listed.items() if name in there}
    same_size = [name for name, same in sized.items() if same]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        hashes = dict(zip(same_size, pool.map(_sha256, (folder / name for name in same_size)), strict=True))
    differing = [name for name in sized if name not in hashes or hashes[name] != listed[name]["sha256"]]
    said = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {what}"
        for names, what in ((missing, "missing"), (differing, "not as saved"), (later, "new"))
        if names
    ]
    if said:
        raise config_error(
            "not-as-saved", where, folder, "; ".join(said),
            "Its files run code when they are loaded, so it is not. Delete the folder to go on from the one before, or copy "
            "it again from where it was written",
        )  # fmt: skip


def _read(folder: Path, where: str) -> dict[str, dict[str, object]]:
    file = folder / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']}")
        return {
            str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in found["files"].items()
        }
    except FileNotFoundError:
        why = f"it has no {MANIFEST}, so nobody knows whether it is as it was saved, and its files run code when they are loaded"
        fix = f"If you trust who wrote it: {Path(sys.executable).name} -m verl_shard.common.manifest {folder}"
        raise config_error("no-manifest", where, folder, why, fix) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
        raise config_error(
            "bad-manifest", where, folder, why, "Delete the folder to go on from the one before"
        ) from None


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    for given in sys.argv[1:]:
        write_manifest(Path(given))
