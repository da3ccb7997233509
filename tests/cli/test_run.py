from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import typer
from shapes import small_qwen2

from verl_shard.cli import main
from verl_shard.cli import run as verb
from verl_shard.cli.main import run
from verl_shard.common.files import append_json_line
from verl_shard.planning.build import build_plan
from verl_shard.planning.plan import Plan

A = "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def _with_the_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    verb.add_to(app)
    monkeypatch.setattr(main, "app", app)
    monkeypatch.chdir(tmp_path)


def parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1 + 1?"]}), path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_qwen2(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plans(model: str) -> dict[str, Plan]:
    workload = {"algorithm": "grpo", "train_batch_size": 8, "prompt_length": 16, "response_length": 16, "n": 2}
    return {
        backend: build_plan({"actor": model}, gpus=2, gpu="a100-80g", workload=workload, backend=backend)  # type: ignore[arg-type]
        for backend in ("fsdp2", "device_map")
    }


@pytest.fixture
def saved(plans: dict[str, Plan], tmp_path: Path) -> Callable[..., str]:
    def save(backend: str, **changed: Any) -> str:
        replace(plans[backend], **changed).save(tmp_path / "the plan.yaml")
        return str(tmp_path / "the plan.yaml")

    return save


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What verl would have been started with; it logs one step."""
    calls: list[dict[str, Any]] = []

    def run_verl(overrides: Any, run: Any, *, env: Any, launch: Any, on_record: Any) -> None:
        calls.append({"overrides": list(overrides), "env": dict(env)})
        record = {"step": 1, "data": {"timing_s/step": 2.5, "critic/score/mean": 0.25}}
        append_json_line(launch.metrics_file, record)
        on_record(record)

    monkeypatch.setattr("verl_shard.verl_plugin.launch.run_verl", run_verl)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "verl_shard.resources.pin.reserve", lambda ids: calls.append({"leased": list(ids)}) or nullcontext()
    )
    return calls


def test_a_dry_run_prints_the_command_alone(
    saved: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["run", saved("fsdp2"), "--dry-run", "--steps", "3", "data.seed=7"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    assert words[-2:] == ["trainer.total_training_steps=3", "data.seed=7"]
    assert "data.train_files=${TRAIN_FILES:?name a parquet file}" in words
    assert f"{A}.strategy=fsdp2" in words
    assert not (tmp_path / "runs").exists()
    assert run(["run", saved("fsdp2"), "--dry-run", "--train-data", "a b.parquet", "data.val_files=v.parquet"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert "data.train_files=['a b.parquet']" in words
    assert not [word for word in words if "_FILES:?" in word]


def test_verl_is_started_in_a_folder_of_its_own(
    saved: Callable[..., str], started: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "t.parquet"
    parquet(data)
    given = ["--train-data", str(data), "--val-data", str(data), "trainer.save_freq=5"]
    for number, backend in enumerate(("fsdp2", "device_map"), 1):
        assert run(["run", saved(backend), *given]) == 0
        assert started[-2] == {"leased": [0, 1]}
        folder, call = Path("runs") / f"plan-{number}", started[-1]
        assert (folder / "overrides.txt").read_text().splitlines() == call["overrides"][:-2]
        assert call["overrides"][-2].startswith("hydra.run.dir=")
        assert f"trainer.default_local_dir={(folder / 'checkpoints').resolve()}" in call["overrides"]
        assert "trainer.save_freq=5" in call["overrides"]
        assert f"data.train_files=[{data}]" in call["overrides"]
        assert Plan.load(folder / "plan.yaml").backend == backend
        assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]
        # A GPU for each process of FSDP; all GPUs for the one of the device_map engine.
        assert ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in call["env"]) == (backend == "device_map")
    assert f"{A}.device_map.plan={(folder / 'plan.yaml').resolve()}" in started[-1]["overrides"]
    assert "step 1  reward 0.25  seconds 2.5" in capsys.readouterr().err


def test_gpus_that_are_not_there(
    saved: Callable[..., str],
    started: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = tmp_path / "t.parquet"
    parquet(data)
    given = ["run", saved("fsdp2"), "--train-data", str(data), "--val-data", str(data)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert run(given) == 2
    assert "GPUs = 1: the plan is for 2, and torch sees 1 on this machine" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert started == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # whose GPUs are not this machine's
    assert run(given) == 0
    assert "leased" not in started[0]


def test_a_plan_that_does_not_fit_is_not_started(
    saved: Callable[..., str], started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved("fsdp2", fits=False, fits_with="It fits on 16.")
    assert run(["run", file, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "It fits on 16." in captured.err
    assert run(["run", file, "--dry-run", "--force"]) == 0
    assert started == []


def test_the_local_runner_gets_what_the_plan_says(
    saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    made: dict[str, Any] = {}

    class Trainer:
        def __init__(self, actor: str, **given: Any) -> None:
            made.update(given, actor=actor)

        def train(self) -> None:
            made["trained"] = True

    monkeypatch.setattr("verl_shard.training.ppo_trainer.PPOTrainer", Trainer)
    assert run(["run", saved("device_map"), "--runner", "local", "--steps", "4", "trainer.save_freq=2"]) == 0
    assert made["trained"]
    assert (made["actor"], made["ref_model"], made["overrides"]) == (model, model, ["trainer.save_freq=2"])
    assert "critic_model" not in made
    assert made["ppo_config"] == {
        "adv_estimator": "grpo", "batch_size": 8, "mini_batch_size": 8, "micro_batch_size": 16, "n": 2, "max_epochs": 1,
        "max_prompt_length": 16, "lora_rank": 0, "kl_in": "loss", "steps": 4,
    }  # fmt: skip
    assert made["generation_config"] == {"max_new_tokens": 16, "batch_size": 16}
    assert set(made["model_config"]) == {"actor", "ref"}
    assert (made["use_gradient_checkpointing"], made["train_data"]) == (False, None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--runner", "ray"], "no such runner"),
        (["--runner", "local"], "the plan is for fsdp2, which runs on verl's trainer only"),
        (["--runner", "local", "--dry-run"], "the local runner starts no command"),
        ([], "a plan says nothing of data"),
        (["--train-data", "no.parquet"], "there is no such file"),
        (["steps"], "it is no key=value"),
        (["trainer.nope=3"], "trainer.nope = 3: verl has no such key. Did you mean trainer.nnodes?"),
    ],
)
def test_what_cannot_be_meant(
    given: list[str],
    why: str,
    saved: Callable[..., str],
    started: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["run", saved("fsdp2"), *given]) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert started == []
    assert not Path("runs").exists()


def test_keys_and_data_that_verl_would_refuse_are_found_by_a_dry_run_too(
    saved: Callable[..., str], started: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("bad.json").write_text("no json")
    Path("bad.parquet").write_text("no parquet")
    Path("empty.jsonl").touch()
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?"}\n{"prompt": "2?"}\n')
    Path("list.json").write_text('[\n{"prompt": "1 + 1?"}\n]')
    data = [
        "--train-data",
        "bad.json",
        "--train-data",
        "bad.parquet",
        "--val-data",
        "empty.jsonl",
        "--val-data",
        "a.csv",
    ]
    wrong = ["algorithm.gama=0.9", "~nothing.there", "trainer=3", "foo"]
    for dry in (["--dry-run"], []):
        for backend in ("fsdp2", "device_map"):
            assert run(["run", saved(backend), *data, *dry, *wrong]) == 2
            shown = capsys.readouterr()
            assert shown.out == ""
            for said in (
                "--train-data = bad.json: it cannot be read as JSON (line 1: ",
                "--train-data = bad.parquet: it cannot be read as parquet",
                "--val-data = empty.jsonl: it has no rows",
                "--val-data = a.csv: verl reads files whose names end in .parquet, .json or .jsonl",
                "algorithm.gama = 0.9: verl has no such key. Did you mean algorithm.gamma?",
                "nothing.there = ",
                "trainer = 3: it is a section of verl's, and no value",
                "overrides = foo: it is no key=value",
            ):
                assert shown.err.count(said) == 1, said
    assert run(["run", saved("fsdp2"), "--train-data", "rows.jsonl", "--val-data", "list.json", "--dry-run"]) == 0
    own = ["data.custom_cls.path=mine.py", "data.custom_cls.name=Mine"]
    assert run(["run", saved("fsdp2"), "--train-data", "bad.json", "--dry-run", *own]) == 0
    assert started == []
    assert not Path("runs").exists()


def test_the_local_runner_is_not_started_with_what_verl_does_not_have(
    saved: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    given = ["--runner", "local", "--train-data", "rows.jsonl", "trainer.nope=3"]
    assert run(["run", saved("device_map"), *given]) == 2
    shown = capsys.readouterr().err
    assert "rows.jsonl: it cannot be read as parquet" in shown
    assert "trainer.nope = 3: verl has no such key" in shown
    assert not Path("runs").exists()


def test_a_file_that_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    assert run(["run", "x.yaml", "--runner", "ray"]) == 2
    shown = capsys.readouterr().err
    assert "verl_shard/plan/1" in shown
    assert "no such runner" in shown
