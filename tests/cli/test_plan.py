from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from shapes import small_qwen2

from verl_shard.cli.main import run
from verl_shard.planning import build
from verl_shard.planning.plan import Plan

FEW = ["--train-batch-size", "8", "--prompt-length", "16", "--response-length", "16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_qwen2(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return str(folder)


def test_a_plan_is_printed_saved_and_drawn(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, drawn = tmp_path / "plan.yaml", tmp_path / "plan.png"
    given = ["plan", "--actor", model, "--gpus", "2", "--gpu", "a100-80g", *FEW]
    assert run([*given, "--save", str(saved), "--picture", str(drawn)]) == 0
    shown = capsys.readouterr().out
    assert "It fits" in shown
    assert "update_critic" in shown
    assert Plan.load(saved).fits
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_json_and_settings_that_are_kept(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--actor", model, "--gpus", "1", "--gpu-memory", "40GiB", "--algorithm", "grpo", *FEW, "--json"]
    assert run([*given, "--set", "actor.micro_batch_size=2", "--set", "actor.gradient_checkpointing=true"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["schema"] == "verl_shard/plan/1"
    assert made["roles"]["actor"]["settings"]["micro_batch_size"] == 2
    assert made["roles"]["actor"]["settings"]["gradient_checkpointing"] is True
    assert "micro_batch_size" not in made["roles"]["actor"]["chosen"]


def test_all_faults_at_once_and_exit_code_2(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--actor", model, "--gpus", "4", "--gpu", "a1000", "--algorithm", "pppo", "--n", "0"]
    outputs = ["--save", "no-folder/plan.yaml", "--picture", "plan.jpg", "--rates", "no-rates.json"]
    assert run([*given, "--set", "actor.precison=bf16", "--set", "x", "--host-memory", "much", *outputs]) == 2
    shown = capsys.readouterr().err
    for said in ("--save = no-folder/plan.yaml", "Name it plan.png", "rates no-rates.json"):
        assert said in shown
    for said in ("a1000", "algorithm", "n = 0", 'Did you mean "precision"?', "role.field=value", "--host-memory"):
        assert said in shown
    assert shown.count("error:") == 9


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "the model that is trained is not named"),
        (["--gpu", "h200"], "which GPUs, but not how many"),
        (["--gpus", "2"], "2 GPUs, but not which"),
        (["--gpus", "2", "--gpu", "h200", "--set", "critic.offload=stream"], "the critic is trained"),
        (["--gpus", "2", "--gpu", "h200", "--set", "actor.devices=[1"], "--set = actor.devices=[1: "),
        (["--gpus", "2", "--gpu", "h200", "--set", "judge.model=x"], "roles.judge"),
        (
            ["--gpus", "2", "--gpu", "h200", "--train-batch-size", "10", "--ppo-mini-batch-size", "3"],
            "train_batch_size 10 % 3 = 1, not 0: a step is cut into whole mini-batches. Give 2 or 5",
        ),
        (["--gpus", "2", "--gpu", "h200", "--backend", "fsdp3"], "'device_map', 'fsdp' or 'fsdp2'"),
    ],
)
def test_what_cannot_be_meant(model: str, given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *(["--actor", model] if given else []), *given]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_what_fits_and_cannot_run_is_no_success(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """verl shares a mini-batch out over ranks: 64 sequences are 21 a rank and one over."""
    given = ["plan", "--actor", model, "--gpus", "3", "--gpu", "h200", "--backend", "fsdp2", "--train-batch-size", "64"]
    given += ["--kl", "none", "--algorithm", "grpo", "--set", "rollout.tensor_parallel_size=1"]
    assert run(given) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "It fits, but cannot run as it is: below are 2 faults. Fullest is" in shown
    assert shown.count("fault: batch keys: ") == 2
    assert run([*given, "--emit", "overrides"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("error: the plan's batch keys: ") == 2


@pytest.mark.parametrize("backend", ["fsdp2", "device_map"])
def test_the_command_alone_is_printed(
    backend: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "plan",
        "--actor",
        model,
        "--gpus",
        "2",
        "--gpu",
        "a100-80g",
        "--backend",
        backend,
        "--algorithm",
        "grpo",
        *FEW,
    ]
    assert run([*given, "--emit", "overrides", "--save", str(tmp_path / "plan.yaml")]) == 0
    captured = capsys.readouterr()
    words = shlex.split(captured.out.replace("\\\n", ""))
    ours = backend == "device_map"
    first = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1"] if ours else []
    assert words[: 3 + len(first)] == [*first, "python3", "-m", "verl.trainer.main_ppo"]
    assert all("=" in word for word in words[3 + len(first) :])
    assert (f"actor_rollout_ref.actor.device_map.plan={tmp_path / 'plan.yaml'}" in words) == ours
    assert captured.err == ""


def test_no_command_for_what_does_not_fit_or_verl_cannot_have(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [
        "plan",
        "--actor",
        model,
        "--gpus",
        "1",
        "--gpu",
        "a100-80g",
        "--algorithm",
        "grpo",
        *FEW,
        "--emit",
        "overrides",
    ]
    assert run([*few, "--set", "ref.attn_implementation=eager"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ref.attn_implementation = eager: verl has one entry for actor and ref" in captured.err
    assert run([*few, "--json"]) == 2
    assert "--json prints something else" in capsys.readouterr().err
    assert run([*few[:-1], "yaml"]) == 2
    assert "--emit = yaml" in capsys.readouterr().err
    made = build.build_plan
    monkeypatch.setattr(
        build, "build_plan", lambda *given, **more: replace(made(*given, **more), fits=False, fits_with="Take 8.")
    )
    assert run(few) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the plan does not fit, so that nothing is started on it. Take 8." in " ".join(captured.err.split())


@pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")
def test_a_resource_config(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file says who is where; the command line names models, and replaces what it names."""
    file = tmp_path / "resource_config.yaml"
    file.write_text(
        "actor: {device_ids: [0, 1], strategy: fsdp, precision: bf16}\n"
        "reward: {device_ids: [2]}\n"
        "nodes: {count: 1, gpus: 4, card: a100-80g}\n"
    )
    given = ["plan", "--config", str(file), "--actor", model, "--reward", model, *FEW]
    assert run([*given, "--set", "reward.devices=[3]", "--save", str(tmp_path / "plan.yaml")]) == 0
    shown = capsys.readouterr().out
    assert [line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│ GPU ")] == [
        "actor (device_map)",
        "actor (device_map)",
        "nobody",
        "reward",
    ]
    made = Plan.load(tmp_path / "plan.yaml")
    assert (made.roles["actor"].devices, made.roles["actor"].precision) == ((0, 1), "bf16")
    assert made.roles["reward"].devices == (3,)
    assert made.backend == "device_map"
    file.write_text("actor: {strategie: fsdp}\nnodes: {count: 2, gpus: 4, card: a100-80g}\n")
    assert run(["plan", "--config", str(file), "--gpus", "4", "--gpu", "a100-80g", "--emit", "json"]) == 2
    said = capsys.readouterr().err
    assert "line 1" in said
    assert "strategy" in said
    assert "--emit" in said
