import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.quickstart.checks import check_data, check_model

ROW: dict[str, Any] = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def codes(check: Callable[[], None]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check()
    assert all(finding.why and finding.fix for finding in caught.value.findings)
    return [finding.code for finding in caught.value.findings]


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pandas.DataFrame(list(rows)).to_parquet(path)
    return path


def test_good_data_passes(tmp_path: Path) -> None:
    check_data([parquet(tmp_path / "a.parquet", ROW, ROW), parquet(tmp_path / "b.parquet", ROW | {"more": 1})])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({key: ROW[key] for key in ROW if key != "prompt"}, ["missing-column"]),
        ({"question": "1 + 1 ="}, ["missing-column"] * 3),
        (ROW | {"prompt": "1 + 1 ="}, ["bad-column"]),
        (ROW | {"prompt": [{"role": "user"}]}, ["bad-column"]),
        (ROW | {"prompt": []}, ["bad-column"]),
        (ROW | {"reward_model": {"style": "rule"}}, ["bad-column"]),
        (ROW | {"reward_model": "2", "data_source": None}, ["bad-column"] * 2),
    ],
)
def test_bad_columns_are_all_named(row: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", row)
    assert codes(lambda: check_data([path])) == expected


def test_the_first_bad_row_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet", ROW, ROW | {"data_source": ""}, ROW | {"data_source": None})
    with pytest.raises(ConfigError, match=r"in 2 of 3 rows data_source .* first in row 1"):
        check_data([path])


def test_files_that_are_no_data(tmp_path: Path) -> None:
    text = tmp_path / "text.parquet"
    text.write_text("no parquet")
    files = [tmp_path / "missing.parquet", tmp_path, text, parquet(tmp_path / "empty.parquet")]
    expected = ["no-data-file", "no-data-file", "not-parquet", "no-rows"]
    assert codes(lambda: check_data(files)) == expected
    assert codes(lambda: check_data([])) == ["no-data"]


def test_a_good_folder_and_hub_ids_pass(model_dir: Path) -> None:
    check_model(model_dir)
    for hub_id in ("gpt2", "Qwen/Qwen2.5-0.5B-Instruct"):
        check_model(hub_id)


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "../model", "a/b/c", "~/no such folder", ""])
def test_a_folder_that_is_not_there(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert codes(lambda: check_model(path)) == ["no-model-folder"]


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    assert codes(lambda: check_model(tmp_path)) == ["empty-model-folder"]
    (tmp_path / "notes.txt").touch()
    assert codes(lambda: check_model(tmp_path)) == ["no-model-config", "no-tokenizer", "no-weights"]
    assert codes(lambda: check_model(tmp_path / "notes.txt")) == ["not-a-folder"]
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    assert codes(lambda: check_model(tmp_path)) == ["bad-model-config", "no-chat-template"]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    check_model(tmp_path)
