"""A path that cannot be written is refused by every command before it works, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_shard.cli.main import run

BENCHES = (
    "start", "maps", "memory", "stock", "rates", "times", "offload", "offload --phases", "pipeline", "attention",
    "generate", "ladder", "elastic", "offload-advice",
)  # fmt: skip
WORKS = (
    "start.bench_start", "maps.bench_maps", "memory.bench_memory", "stock.bench_stock", "rates.bench_rates",
    "times.bench_times", "offload.bench_offload", "offload_phases.bench_offload_phases", "pipeline.bench_pipeline",
    "attention.bench_attention", "generate.bench_generate", "frame.look", "report.section",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(*_: Any, **__: Any) -> None:
        pytest.fail("the work was begun")

    for name in WORKS:
        monkeypatch.setattr(f"verl_shard.bench.{name}", begun)


def _no_folder(flag: str, path: Path) -> str:
    fix = f"Make it first (mkdir -p {path.parent}), or name a file in another."
    return f"error: {flag} = {path}: there is no folder {path.parent}. {fix}\n"


@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench(bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "absent" / "x.json"
    assert run(["bench", *bench.split(), "--out", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", _no_folder("--out", path))
    assert list(tmp_path.iterdir()) == []


def test_all_paths_and_other_faults_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent, folder = tmp_path / "absent" / "x", f"error: --out = {tmp_path}: it is a folder. Name a file in it.\n"
    for argv, more in (
        (["times", "--fit", str(absent)], _no_folder("--fit", absent)),
        (
            ["maps", "--other-transformers", "abc"],
            "error: --other-transformers = abc: it is no version. Give one such as 5.24.0, or leave it out.\n",
        ),
        (
            ["stock", "--compare", str(absent), "--large"],
            "error: bench stock = --large: the configurations are those of the file that --compare names, and none is run. "
            "Leave out --large, or --compare.\n",
        ),
        (
            ["ladder", "--gpu-memory", "80"],
            "error: --gpu-memory = 80: less than 1 GiB holds no model that is trained. Give its size, such as 80GiB.\n",
        ),
        (
            ["elastic", "--picture", str(absent.with_suffix(".png"))],
            _no_folder("--picture", absent.with_suffix(".png")),
        ),
    ):
        assert run(["bench", *argv, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == folder + more


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "absent" / "page.html"
    (tmp_path / "result.json").write_text("{}")
    assert run(["bench", "report", str(tmp_path), "--out", str(page)]) == 2
    assert capsys.readouterr().err == _no_folder("--out", page)
    nowhere = f"error: DIR = {tmp_path}/nowhere: there is no such folder. Name one with results in it.\n"
    assert run(["bench", "report", str(tmp_path / "nowhere"), "--out", str(page)]) == 2
    assert capsys.readouterr().err == nowhere + _no_folder("--out", page)
    (tmp_path / "report.html").mkdir()
    assert run(["bench", "report", str(tmp_path)]) == 2
    said = f"error: DIR = {tmp_path}/report.html: it is a folder. Name a file in it.\n"
    assert capsys.readouterr().err == said


def test_a_map(
    small_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, absent = str(tmp_path / "model"), tmp_path / "absent" / "map.json"
    small_config("llama").save_pretrained(model)
    monkeypatch.setattr("verl_shard.mapping.build.build_device_map", lambda *_, **__: pytest.fail("the work was begun"))
    picture = tmp_path / "map.jpg"
    assert run(["map", model, "--gpus", "2", "--picture", str(picture), "--save", str(absent)]) == 2
    captured = capsys.readouterr()
    why = f'the picture is a PNG, and this name ends in ".jpg". Name it {tmp_path}/map.png.'
    assert (captured.out, captured.err) == ("", f"error: --picture = {picture}: {why}\n" + _no_folder("--save", absent))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "absent" / "memory.png"
    assert run(["memory", str(tmp_path), "--picture", str(picture)]) == 2
    nothing = f"error: run = {tmp_path}: it is no run's folder. Name a run's folder, such as runs/ppo-1.\n"
    assert capsys.readouterr().err == _no_folder("--picture", picture) + nothing


def test_a_version_is_looked_at_before_maps_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    from verl_shard.bench.maps import check_version
    from verl_shard.common.errors import ConfigError

    check_version(None)
    check_version("5.24.0")
    check_version("5.0.0rc1")
    with pytest.raises(ConfigError, match="--other-transformers = latest: it is no version"):
        check_version("latest")
