"""What a run with a reward model scores with: the model trains, the exact reward is measured."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

pytest.importorskip("verl")

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.config.data_files import DataFiles
from verl_shard.config.run_folder import RunFolder
from verl_shard.quickstart import prepare
from verl_shard.quickstart.model_reward import add_messages, hand_over_model, loading_of, rewards_of
from verl_shard.quickstart.options import QuickstartOptions
from verl_shard.training.data_of_tasks import read_rows
from verl_shard.training.reward_model import RewardModel


@pytest.fixture
def judge(model_dir: Path, tmp_path: Path) -> Path:
    config = AutoConfig.from_pretrained(model_dir, num_labels=1)
    folder = Path(shutil.copytree(model_dir, tmp_path / "judge"))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def files(data: DataFiles, tmp_path: Path) -> DataFiles:
    copies = DataFiles(tmp_path / "train.parquet", tmp_path / "val.parquet")
    shutil.copy(data.train, copies.train)
    shutil.copy(data.val, copies.val)
    return copies


def test_rows_bring_their_question_and_nothing_else_changes(data: DataFiles, files: DataFiles) -> None:
    add_messages(files)
    for before, after in ((data.train, files.train), (data.val, files.val)):
        for old, new in zip(read_rows(before), read_rows(after), strict=True):
            assert json.loads(new["extra_info"].pop("messages_json")) == old["prompt"]
            assert new == old


def test_rows_of_ones_own_may_have_no_extra_info(tmp_path: Path) -> None:
    files = DataFiles(tmp_path / "train.parquet", tmp_path / "val.parquet")
    row = {"data_source": "mine", "prompt": [{"role": "user", "content": "1 + 1?"}], "more": 3}
    for path in (files.train, files.val):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    add_messages(files)
    assert read_rows(files.val) == [{**row, "extra_info": {"messages_json": json.dumps(row["prompt"])}}]


def test_the_model_scores_and_the_exact_reward_is_beside_it(judge: Path, files: DataFiles) -> None:
    add_messages(files)
    scoring = {"folder": str(judge), "dtype": "float32", "exact": prepare.REWARD, "device": "cpu"}
    rewards, model = rewards_of(scoring), RewardModel(str(judge), dtype="float32")
    for row in read_rows(files.val)[:3]:
        for text, exact in ((f"<answer>{row['reward_model']['ground_truth']}</answer>", 1.0), ("nothing", 0.0)):
            result = rewards.compute_score(row["data_source"], text, "", row["extra_info"])
            score = pytest.approx(model.score(row["prompt"], text), abs=1e-5)
            assert result == {"score": score, "model": score, "exact": exact}


def test_what_is_handed_over_is_what_the_reward_worker_reads(judge: Path, tmp_path: Path) -> None:
    hand_over_model({"folder": str(judge), "dtype": "bfloat16", "exact": None, "device": "cpu"}, tmp_path)
    (part,) = pickle.loads((tmp_path / "rewards.pkl").read_bytes()).parts
    assert (part.source, part.weight) == (str(judge), 1.0)
    assert part.model == {"device_map": "cpu", "dtype": "bfloat16"}


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int, memory: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))


def test_it_scores_on_the_runs_gpu_where_there_is_one(judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    room = sum(parameter.numel() for parameter in model.parameters()) * 4
    scoring = {"folder": str(judge), "dtype": "float32", "exact": None}
    _gpus(monkeypatch, 2, room * 50)  # a fiftieth of it is just enough
    with pytest.warns(
        ShardNotice, match="reward-device: it is left to us. Using the run's first GPU, cuda:0, its weights there"
    ):
        assert loading_of(scoring) == {"device_map": "cuda:0", "dtype": "float32"}
    assert loading_of({**scoring, "device": "cuda:1"}) == {"device_map": "cuda:1", "dtype": "float32"}
    assert loading_of({**scoring, "device": "cpu"}) == {"device_map": "cpu", "dtype": "float32"}
    _gpus(monkeypatch, 2, room * 50 - 1)
    with pytest.warns(ShardNotice, match="cuda:0, its weights streamed from host memory"):
        assert loading_of(scoring) == {"device_map": "cuda:0", "dtype": "bfloat16", "offload": "stream"}
    with pytest.raises(
        ConfigError, match=r"--reward-device = cuda:2: torch sees 2 GPUs here\. Use one of cuda:0, cuda:1, or cpu"
    ):
        loading_of({**scoring, "device": "cuda:2"})
    _gpus(monkeypatch, 0, 0)
    assert loading_of(scoring) == {"device_map": "cpu", "dtype": "float32"}


def test_a_run_keeps_the_device_that_was_asked_for(
    judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpus(monkeypatch, 1, 2**40)
    options = QuickstartOptions(reward_model=str(judge), reward_device="cpu")
    run = RunFolder.start(tmp_path / "run", options.identity(), options.settings())
    hand_over_model({"folder": str(judge), "dtype": "float32", "exact": None}, run.path)
    (part,) = pickle.loads((run.path / "rewards.pkl").read_bytes()).parts
    assert part.model == {"device_map": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(
    ("options", "reward", "kl_coef"),
    [
        ({}, prepare.REWARD, 0.01),
        ({"reward_model": "demo"}, "pkg://verl_shard.training.handed_reward:compute_score", 0.1),
        ({"reward_model": "demo", "kl_coef": 0.5}, "pkg://verl_shard.training.handed_reward:compute_score", 0.5),
    ],
)
def test_verl_is_told_of_the_reward_model(
    files: DataFiles, model_dir: Path, tmp_path: Path, options: dict[str, Any], reward: str, kl_coef: float
) -> None:
    run: Any = SimpleNamespace(path=tmp_path)
    made = prepare.settings_for(QuickstartOptions(**options), run, files, model_dir, prepare.Device(()))
    assert (made.reward, made.kl_coef) == (reward, kl_coef)


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({}, "pkg://verl_shard.quickstart.reward:compute_score"),
        ({"data": (Path("d.parquet"),), "model": "m"}, None),
        ({"data": (Path("d.parquet"),), "model": "m", "reward": "r.py:f"}, "{cwd}/r.py:f"),
    ],
)
def test_scoring_with_a_folder(
    judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], exact: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    run: Any = SimpleNamespace(path=tmp_path / "run")
    asked = QuickstartOptions(reward_model="judge", **options)
    made = prepare.make_scoring(asked, run, DataFiles(Path(), Path()), Path("model"))
    expected = exact and exact.format(cwd=tmp_path)
    assert made == {"folder": str(judge), "dtype": "float32", "exact": expected}
