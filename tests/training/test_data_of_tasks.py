"""Prompts of checkable tasks: files that verl reads, the same for the same seed."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.checks import check_data
from verl_shard.training.data_of_tasks import entry_of, read_rows, write_data
from verl_shard.training.data_tasks import SOURCE, TASKS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    return write_data(tmp_path_factory.mktemp("data"), seed=3, n_train=600, n_val=60)


def questions(path: Path) -> set[str]:
    return {row["prompt"][-1]["content"] for row in read_rows(path)}


def test_the_same_seed_gives_the_same_files(data: DataFiles, tmp_path: Path) -> None:
    again = write_data(tmp_path, seed=3, n_train=600, n_val=60)
    assert again.train.read_bytes() == data.train.read_bytes()
    assert again.val.read_bytes() == data.val.read_bytes()


def test_another_seed_gives_other_rows(data: DataFiles, tmp_path: Path) -> None:
    other = write_data(tmp_path, seed=4, n_train=600, n_val=60)
    assert questions(other.train) != questions(data.train)
    assert questions(other.val) != questions(data.val)


@given(seed=st.integers(0, 2**63 - 1))
@settings(max_examples=5, deadline=None)
def test_no_validation_question_is_trained_on(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    files = write_data(tmp_path_factory.mktemp("data"), seed=seed, n_train=300, n_val=60)
    assert not questions(files.train) & questions(files.val)


def test_rows_are_what_verl_reads(data: DataFiles) -> None:
    check_data([data.train, data.val])
    for split, path, count in (("train", data.train, 600), ("val", data.val, 60)):
        rows = read_rows(path)
        assert len(rows) == count
        for index, row in enumerate(rows):
            assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert row["extra_info"]["split"] == split
            assert row["extra_info"]["index"] == index
            entry = entry_of(row)
            assert row["prompt"][1]["content"] == entry["question"]
            assert row["reward_model"] == {"style": "rule", "ground_truth": entry["answer"]}


def test_tasks_take_turns(data: DataFiles) -> None:
    sources = [row["data_source"] for row in read_rows(data.train)]
    assert sources[: len(TASKS)] == [SOURCE + task.name for task in TASKS]
    assert len({sources.count(source) for source in sources}) == 1


def test_one_task_alone(tmp_path: Path) -> None:
    files = write_data(tmp_path, seed=0, n_train=20, n_val=10, tasks=["gcd"])
    assert {row["data_source"] for row in read_rows(files.train) + read_rows(files.val)} == {"reasoning_gym/gcd"}


def test_nothing_is_left_beside_the_two_files(data: DataFiles) -> None:
    assert sorted(path.name for path in data.train.parent.iterdir()) == ["train.parquet", "val.parquet"]
