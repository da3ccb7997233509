"""A reward model's folder is looked at before anything is made: all faults at once."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from verl_shard.common.errors import ConfigError
from verl_shard.quickstart.check_reward_model import check_reward_model, choose_dtype


@pytest.fixture
def judge(model_dir: Path, tmp_path: Path) -> Path:
    """An untrained classifier with the quick start's tokenizer."""
    config = AutoConfig.from_pretrained(model_dir, num_labels=1)
    folder = Path(shutil.copytree(model_dir, tmp_path / "judge"))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def faults(path: Path | str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        check_reward_model(path)
    assert all(finding.where == "--reward-model" and finding.fix for finding in caught.value.findings)
    return [(finding.code, finding.why) for finding in caught.value.findings]


def change(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_good_one_passes_with_a_template_or_without(judge: Path) -> None:
    check_reward_model(judge)
    (judge / "chat_template.jinja").unlink()
    check_reward_model(judge)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert faults(tmp_path / "demoo") == [("no-reward-model", "there is no such folder")]
    assert faults("") == [("no-reward-model", "there is no such folder")]
    assert faults(tmp_path / "file") == [("no-reward-model", "it is a file")]
    assert faults(tmp_path / "..") != []
    (tmp_path / "empty").mkdir()
    assert faults(tmp_path / "empty") == [("empty-model-folder", "the folder is empty")]


def test_a_language_model(model_dir: Path) -> None:
    assert faults(model_dir) == [("no-classifier", "it is no sequence classifier, but LlamaForCausalLM")]


def test_faults_come_at_once(judge: Path) -> None:
    change(judge, lambda config: config.update(id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1}))
    for path in judge.glob("tokenizer*"):
        path.unlink()
    (judge / "model.safetensors").unlink()
    assert [code for code, _ in faults(judge)] == ["no-tokenizer", "no-weights", "not-one-label"]
    assert faults(judge)[-1][1] == "it has 2 labels, and a reward is one number"


def test_an_architecture_that_nobody_knows(judge: Path) -> None:
    change(judge, lambda config: config.update(model_type="lama"))
    ((code, why),) = faults(judge)
    assert code == "bad-model-config"
    assert "lama" in why


def test_weights_without_the_head(judge: Path) -> None:
    weights = load_file(judge / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, judge / "model.safetensors", {"format": "pt"})
    assert faults(judge) == [("no-head", "its weights lack the head that scores (score.weight)")]


Memory = namedtuple("Memory", ["available", "total"], defaults=[2**60])


def test_memory_decides_the_dtype_and_whether_it_goes_at_all(judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = sum(weight.numel() for weight in load_file(judge / "model.safetensors").values())
    for free, expected in ((8 * n, "float32"), (8 * n - 1, "bfloat16")):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: Memory(free))
        assert choose_dtype(judge) == expected
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(2 * n))
    check_reward_model(judge)
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(2 * n - 1))
    assert [code for code, _ in faults(judge)] == ["reward-model-too-large"]
