"""A folder is as it was saved, or what differs is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.manifest import MANIFEST, check_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "model.pt").write_bytes(b"abc")
    (tmp_path / "actor" / "optim.pt").write_bytes(b"")
    (tmp_path / "data.pt").write_bytes(b"x" * 100_000)
    write_manifest(tmp_path)
    return tmp_path


def said(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_manifest(folder)
    (finding,) = caught.value.findings
    return finding.why


def test_it_lists_sizes_and_hashes_of_every_file(folder: Path) -> None:
    found = json.loads((folder / MANIFEST).read_text())
    assert found["schema"] == "verl_shard/manifest/1"
    # FIPS 180-4's own examples: the hashes of "abc" and of nothing.
    assert found["files"]["actor/model.pt"] == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert found["files"]["actor/optim.pt"]["sha256"][:16] == "e3b0c44298fc1c14"
    assert sorted(found["files"]) == ["actor/model.pt", "actor/optim.pt", "data.pt"]
    check_manifest(folder)
    write_manifest(folder)
    check_manifest(folder)


def test_all_that_is_wrong_is_one_message(folder: Path) -> None:
    (folder / "actor" / "optim.pt").unlink()
    (folder / "actor" / "model.pt").write_bytes(b"abd")  # as long as before
    (folder / "data.pt").write_bytes(b"x" * 99_999)  # cut short
    (folder / "more.pkl").touch()
    (folder / "notes.txt").touch()  # runs nothing
    assert said(folder) == "actor/optim.pt is missing; actor/model.pt, data.pt are not as saved; more.pkl is new"


def test_what_nobody_listed_is_refused_where_it_may_run_code(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    check_manifest(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(ConfigError, match=r"it has no MANIFEST\.json.*-m verl_shard\.common\.manifest"):
        check_manifest(tmp_path)
    subprocess.run([sys.executable, "-m", "verl_shard.common.manifest", str(tmp_path)], check=True)
    check_manifest(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "x"}', '{"schema": "verl_shard/manifest/1", "files": {"a": 1}}']
)
def test_a_manifest_that_is_none_is_refused(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(text)
    assert "cannot be read" in said(folder)
