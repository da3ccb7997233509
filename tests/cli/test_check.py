from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from override_sets import GOOD, without

from verl_shard.cli import check as verb
from verl_shard.cli import main
from verl_shard.cli.main import run

A = "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def _with_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    verb.add_to(app)
    monkeypatch.setattr(main, "app", app)


def test_all_findings_at_once_with_the_line_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        *without(GOOD["GRPO plain"], "data.train_batch_size"),
        "data.train_batch_size=33",
        "critic.model.fsdp_config.fsdp_size=1",
    ]
    assert run(["check", *given, "--log-level=debug", "--gpus", "2", "--no-plan"]) == 2
    shown = capsys.readouterr().out
    for line in (
        "fault: critic.model.fsdp_config.fsdp_size = 1", "  -> critic.fsdp.fsdp_size=1",
        f"fault: {A}.ppo_mini_batch_size = 32", f"  -> {A}.ppo_mini_batch_size=11",
        "fault: --log-level = --log-level=debug", "  -> export VERL_LOGGING_LEVEL=DEBUG",
        "fault: trainer.n_gpus_per_node = 4", "  -> trainer.n_gpus_per_node=2",
        "  data.train_batch_size 33 % 32 = 1, not 0: a step is cut into whole mini-batches",
    ):  # fmt: skip
        assert line in shown.splitlines()
    assert "4 faults" in shown.splitlines()[-1]


def test_exit_codes_and_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = [*GOOD["GRPO fsdp2 + offload + bf16 + sdpa + all memory knobs"]]
    assert run(["check", *good, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["exit_code"], made["findings"]) == ("verl_shard/check/1", 0, [])
    assert run(["check", *good, "trainer.device=cpu", "--no-plan", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["level"], finding["where"]) == ("warning", "trainer.device")


def test_a_script_and_a_file_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, file = tmp_path / "run.sh", tmp_path / "more.yaml"
    script.write_text(
        'N=3\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.tensor_model_parallel_size=$N "$@"\n'
    )
    file.write_text("trainer:\n  n_gpus_per_node: 4\ndata:\n  shufle: true\n")
    assert run(["check", "--script", str(script), "--config", str(file), "--no-plan", "trainer.nnodes=1"]) == 2
    shown = capsys.readouterr().out
    assert "4 % 3 = 1, not 0; the worker asserts it, run.sh:2" in shown
    assert "Did you mean data.shuffle?" in shown


def test_unequal_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "trainer.nnodes=2", "trainer.n_gpus_per_node=8", "--gpus", "8,8,4", "--no-plan"]) == 2
    assert "2 nodes of 8 GPUs" not in capsys.readouterr().out
    assert run(["check", "trainer.nnodes=2", "trainer.n_gpus_per_node=8", "--gpus", "8,4,4", "--no-plan"]) == 2
    shown = capsys.readouterr().out
    assert "2 nodes of 8 GPUs are wanted, and the nodes have 8, 4, 4: Ray would wait for ever" in shown
    assert "  -> trainer.n_gpus_per_node=4" in shown


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "nothing was given"),
        (["data.seed=1", "--gpus", "many"], "not a number of GPUs"),
        (["data.seed=1", "--gpus", "8,0"], "a node without a GPU"),
        (["data.seed=1", "--gpu", "a100-80g"], "which GPUs, but not how many"),
        (["data.seed=1", "--gpus", "2", "--gpu", "a1000"], "no such card is known"),
        (["data.seed=1", "--gpus", "2", "--gpu", "h200-141g", "--gpu-memory", "80GiB"], "the card says how much"),
        (["data.seed=1", "--host-memory", "much"], "not a number of bytes"),
        (["--script", "nowhere.sh"], "it cannot be read"),
    ],
)
def test_what_cannot_be_meant(given: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *given]) == 2
    captured = capsys.readouterr()
    assert why in " ".join(captured.err.split())
    assert captured.out == ""
