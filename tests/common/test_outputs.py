"""What a command will write is looked at before it works: every path at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError, MissingExtraError
from verl_shard.common.outputs import check_outputs
from verl_shard.common.pictures import new_figure, save_png


def _said(**paths: Path | None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_outputs(**paths)
    return [str(finding) for finding in caught.value.findings]


def test_every_path_is_said_with_its_flag(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    make = f"Make it first (mkdir -p {absent}), or name a file in another."
    assert _said(picture=absent / "a.png", save_as=tmp_path, out=None) == [
        f"--picture = {absent}/a.png: there is no folder {absent}. {make}",
        f"--save-as = {tmp_path}: it is a folder. Name a file in it.",
    ]


@pytest.mark.parametrize(
    ("name", "what", "better"),
    [("a.jpg", 'ends in ".jpg"', "a.png"), ("a", "has no ending", "a.png"), ("a.b.svg", 'ends in ".svg"', "a.b.png")],
)
def test_a_picture_is_a_png(name: str, what: str, better: str, tmp_path: Path) -> None:
    why = f"the picture is a PNG, and this name {what}. Name it {tmp_path / better}."
    assert _said(picture=tmp_path / name) == [f"--picture = {tmp_path / name}: {why}"]
    check_outputs(out=tmp_path / name)
    with pytest.raises(ConfigError, match="the picture is a PNG"):
        save_png(new_figure(1, 1), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    twice = "--picture names the same file, which would be written twice. Name two files."
    assert _said(picture=Path("a.png"), save=tmp_path / "a.png") == [f"--save = {tmp_path}/a.png: {twice}"]


def test_what_can_be_written_passes_and_is_not_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_outputs(picture=tmp_path / "a.PNG", save=tmp_path / "a.json", fit=None)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'the picture needs the extra "plots"'):
        check_outputs(picture=tmp_path / "a.png")
    check_outputs(out=tmp_path / "a.json")


def test_a_picture_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = new_figure(1, 1)

    def fail(path: Path, **_: object) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        save_png(figure, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
