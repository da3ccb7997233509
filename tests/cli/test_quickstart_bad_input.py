"""What somebody may get wrong: one message that says what was given, what is wrong and what to do; exit code 2; nothing made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_shard.cli.main import run
from verl_shard.config.run_folder import RunFolder
from verl_shard.quickstart.options import QuickstartOptions


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that what a command leaves behind shows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must fail with exit code 2, its line breaks taken out."""
    before = sorted(Path.cwd().rglob("*"))
    assert run(["quickstart", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert sorted(Path.cwd().rglob("*")) == before, "it left something behind"
    return " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algorithm", "ppoo"], ["--algorithm = ppoo", "Use one of ppo, grpo"]),
        (["--task", "chain_summ"], ["--task = chain_summ", "no such task", "Use one of gcd"]),
        (["--gpus", "0"], ["--gpus = 0", "Leave out --gpus to run on the CPU"]),
        (["--gpus", "-1"], ["--gpus = -1", "less than 1"]),
        (["--steps", "0"], ["--steps = 0", "Give 1 or more"]),
        (["--seed", "-3"], ["--seed = -3", "negative"]),
        (["--lr", "-1"], ["--lr = -1.0"]),
        (["--model", "./nowhere"], ["./nowhere", "there is no such folder"]),
        (["--data", "none.parquet", "--model", "./nowhere"], ["none.parquet", "./nowhere"]),
        (["--reward", "x.py:f"], ["--reward", "--data is not given"]),
        (["--reward-model", "demoo"], ["--reward-model = demoo", "there is no such folder", "or write demo"]),
        (["--reward-model", "./r", "--task", "gdc", "--model", "./m"], ["--reward-model = ./r", "gdc", "./m"]),
        (["--reward-model", "demo", "--data", "d.parquet"], ["--reward-model = demo", "not to --data"]),
        (["--resume"], ["--resume", "there is no runs/quickstart-N here"]),
        (["--resume", "--out", "gone"], ["gone", "there is no run.json in it"]),
        (["--no-such-flag"], ["No such option"]),
        (["--steps", "many"], ["--steps", "valid integer"]),
        (["--attn-implementation", "flsh"], ["flsh: no such attention", "Use one of sdpa, flash_attention_2, eager"]),
        (["--attn-implementation", "sdpa_packed"], ["sdpa_packed: no such attention"]),
        (["--batch-size", "3", "--micro-batch-size", "4"], ["micro_batch_size = 4", "% micro_batch_size 4 = 2, not 0"]),
        (["foo"], ["foo: it is no option", "Write -- KEY=VALUE"]),
        (["algorithm.gamma=0.99"], ["algorithm.gamma=0.99: it is no option", "Write -- algorithm.gamma=0.99"]),
        (["foo", "--", "algorithm.gama=1"], ["foo: it is no option", "Did you mean algorithm.gamma?"]),
        (["--", "foo"], ["foo: Hydra cannot read it"]),
        (["--", "trainer.nope=3"], ["trainer.nope = 3: verl has no such key"]),
        (["--", "trainer=3"], ["trainer = 3: it is a section of verl's", "Name a key in it"]),
        (["--", "+trainer.nnodes=1"], ["verl has the key already"]),
        (["--", "data.train_batch_size=7"], ["data.train_batch_size 7 is less than a mini-batch of 8"]),
        (["--", "model_engine=dp"], ["model_engine = dp", "Leave it out"]),
        (["--", "actor_rollout_ref.rollout.name=vllm"], ["hf rollout only"]),
        (["--algorithm", "x", "--", "a.b=1"], ["--algorithm = x", "a.b = 1: verl has no such key"]),
    ],
)
def test_a_wrong_value(capsys: pytest.CaptureFixture[str], arguments: list[str], said: list[str]) -> None:
    message = fails(capsys, *arguments)
    for text in said:
        assert text in message


def test_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    there = torch.cuda.device_count()
    assert f"torch sees {there} GPU" in fails(capsys, "--gpus", str(there + 1))


def test_all_faults_are_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "--algorithm", "x", "--steps", "0", "--seed", "-1")
    assert message.count("error:") == 3


def test_an_empty_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    assert "the folder is empty" in fails(
        capsys, "--model", "./model", "--data", str(parquet(Path("d.parquet"), [GOOD]))
    )


def test_a_model_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    Path("model/model.safetensors").touch()
    message = fails(capsys, "--model", "./model", "--data", str(parquet(Path("d.parquet"), [GOOD])))
    assert "tokenizer" in message


def test_a_name_behind_which_there_is_no_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_hub(name: str, **given: Any) -> None:
        raise OSError(f"{name} is not cached, and there is no network")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", no_hub)
    message = fails(capsys, "--model", "nope", "--", "algorithm.gama=1")
    assert "--model = nope: not a folder here, and the hub gave no config.json (nope is not cached" in message
    assert "Did you mean algorithm.gamma?" in message


def test_a_model_whose_files_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        Path("model", name).write_text("{}")
    Path("model/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert '--model = model: its config.json names no "model_type"' in fails(capsys, "--model", "model")
    Path("model/config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    assert "--model = BertForMaskedLM: BertForMaskedLM is neither" in fails(capsys, "--model", "model")
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert "--model = model: its tokenizer cannot be read" in fails(capsys, "--model", "model")


GOOD: dict[str, Any] = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@pytest.mark.parametrize("column", ["prompt", "reward_model", "data_source"])
def test_a_parquet_without_a_needed_column(capsys: pytest.CaptureFixture[str], column: str) -> None:
    row = {name: value for name, value in GOOD.items() if name != column}
    message = fails(capsys, "--data", str(parquet(Path("d.parquet"), [row])))
    assert "d.parquet" in message
    assert column in message


def test_data_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Give --model with --data" in fails(capsys, "--data", str(parquet(Path("d.parquet"), [GOOD] * 40)))


def test_a_run_folder_of_another_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = QuickstartOptions(seed=1)
    RunFolder.start(Path("mine"), options.identity(), options.settings())
    assert "it is the folder of another run. Add --resume" in fails(capsys, "--out", "mine")
    assert "the run in mine has 1" in fails(capsys, "--out", "mine", "--resume", "--seed", "2")


def test_a_run_whose_reward_model_is_gone_or_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    options = QuickstartOptions(reward_model="./judge")
    run_folder = RunFolder.start(Path("mine"), options.identity(), options.settings())
    run_folder.update(ready=True, scoring={"folder": "./judge", "dtype": "float32", "exact": None})
    assert "--reward-model = ./judge: there is no such folder" in fails(capsys, "--out", "mine", "--resume")
    message = fails(capsys, "--out", "mine", "--resume", "--reward-model", "demo")
    assert "--reward-model = demo: the run in mine has ./judge" in message


def test_a_run_that_is_to_go_on_with_a_key_that_verl_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    options = QuickstartOptions()
    RunFolder.start(Path("mine"), options.identity(), options.settings())
    assert "Did you mean algorithm.gamma?" in fails(
        capsys, "--out", "mine", "--resume", "--steps", "90", "--", "algorithm.gama=1"
    )


def test_what_follows_two_dashes_is_an_override_whatever_it_looks_like(capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "--", "--steps", "--", "a.b=1")
    assert "--steps: verl's main program has no flags but Hydra's" in message
    assert "a.b = 1: verl has no such key" in message


def test_a_folder_that_is_not_a_runs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos").mkdir()
    Path("photos/cat.png").touch()
    assert "it is not empty and no run's folder" in fails(capsys, "--out", "photos")


def test_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert "file is a file, not a folder" in fails(capsys, "--out", "file/run")


@pytest.mark.parametrize("arguments", [["quickstrat"], ["bench", "stat"], ["bench", "start", "--steps", "1"]])
def test_an_unknown_verb_or_number(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
