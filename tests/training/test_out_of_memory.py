"""PPO on the CPU whose memory runs out: in every phase, and step by step while another process fills the GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_shard import PPOTrainer
from verl_shard.common.files import read_json_lines
from verl_shard.runtime import allocator
from verl_shard.runtime.ladder import Pieces
from verl_shard.runtime.scoring_model import ScoringModel
from verl_shard.verl_plugin.engine import ENGINES

Make = Callable[..., PPOTrainer]
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 GiB is free."
)
PHASES = ("generate", "reward", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor")

pytestmark = pytest.mark.filterwarnings("ignore::verl_shard.common.notices.ShardNotice")


def trainer_with_a_judge(trainer: Make, make_model: Callable[..., Path], folder: Path, **ppo: Any) -> PPOTrainer:
    judge = make_model("judge", task="SequenceClassification", seed=3, num_labels=1)
    settings = {"steps": len(PHASES), "batch_size": 4, "micro_batch_size": 4, "kl_coef": 0.1, "lr": 1e-3, **ppo}
    return trainer(
        reward_model=str(judge), ppo=settings, output_dir=folder, model_config={"reward": {"precision": "fp32"}}
    )


def numbers(records: list[Any]) -> list[dict[str, float]]:
    """Metrics that say what was computed, and not how long it took or in how many pieces: vpred_mean is verl's mean over
    micro-batches, however large each is, of their means."""
    named = ("actor/", "critic/", "response_length/", "training/rollout")
    return [
        {
            name: value
            for name, value in record["data"].items()
            if name.startswith(named) and "/perf/" not in name and name != "critic/vpred_mean"
        }
        for record in records
    ]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(folder / "events.jsonl") if line["kind"] == kind]


def run_out_in_each_phase(made: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In step n once in the n-th phase, in the middle of its first forward pass; returns where it has been."""
    run = made._started()
    now, been = [""], list[str]()
    begin, of_loop = run.phase, {"gen": "generate", "ref": "ref_log_prob"}

    def noted(name: str) -> Any:
        now[0] = of_loop.get(name, name)
        return begin(name)

    def look(*_: Any) -> None:
        if now[0] == list(PHASES)[run.steps_done] and now[0] not in been:
            been.append(now[0])
            raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(run, "phase", noted)
    for role in ("actor", "critic", "ref"):
        ENGINES[role].module.model.layers[1].mlp.register_forward_hook(look)
    forward = ScoringModel._forward

    def scoring(*given: Any) -> Any:
        look()
        return forward(*given)

    monkeypatch.setattr(ScoringModel, "_forward", scoring)
    return been


@pytest.mark.usefixtures("_no_group")
def test_a_run_ends_with_the_same_numbers(
    trainer: Make, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = numbers(trainer_with_a_judge(trainer, make_model, tmp_path / "undisturbed").train())
    made = trainer_with_a_judge(trainer, make_model, tmp_path / "run")
    been = run_out_in_each_phase(made, monkeypatch)
    found = numbers(made.train())
    assert been == list(PHASES)
    assert len(found) == len(PHASES)
    for ours, theirs in zip(found, undisturbed, strict=True):
        assert len(ours) > 20
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)  # some are differences of numbers near 1
    said = {line["where"]: line["after"] for line in events(tmp_path / "run", "remedy")}
    assert list(said) == list(PHASES)
    of_critic = {said.pop("values"), said.pop("update_critic")}
    micro = dict.fromkeys(("old_log_prob", "ref_log_prob", "update_actor"), "micro-batches of 2 sequences")
    assert said == micro | {"generate": "2 responses at once", "reward": "batches of 2"}
    # The critic's are cut by tokens, 32768 at most: of so many that there are at least two micro-batches.
    assert of_critic == {"micro-batches of 32 tokens"}
    assert [line["where"] for line in events(tmp_path / "run", "out-of-memory")] == list(PHASES)


@pytest.mark.usefixtures("_no_group")
def test_fifty_steps_while_another_process_fills_the_gpu(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def reward(response: str) -> float:
        seen.append(response)
        return float(len(set(response.split())))

    left = 2**40
    monkeypatch.setattr(allocator, "headroom", lambda: {"cpu": left})
    ppo = {
        "steps": 50,
        "batch_size": 4,
        "micro_batch_size": 4,
        "adv_estimator": "reinforce_plus_plus",
        "n": 1,
        "kl_coef": 0,
    }
    made = trainer(reward_model=reward, ppo=ppo, generation={"max_new_tokens": 3})
    made.step()
    pieces = ENGINES["actor"].pieces["train"]
    sizes = [(pieces._needed(Pieces(1, size, total=4)) or {})["cpu"] for size in (1, 2, 4)]
    assert sizes == sorted(sizes)
    taken = []
    for step in range(1, 50):
        # From twice what a step needs to what one sequence needs, and back.
        share = abs(step - 25) / 24
        left = int(sizes[0] * 1.06 + share * (2 * sizes[2] - sizes[0] * 1.06))
        assert made.step()["training/global_step"] == step + 1
        taken.append(pieces.ladder.taken)
    assert len(seen) == 50 * 4
    assert (taken[0], max(taken), taken[-1]) == (0, 2, 0)
    assert not events(tmp_path / "run", "out-of-memory")
    down = [line["after"] for line in events(tmp_path / "run", "remedy") if line["where"] == "update_actor"]
    back = [line["after"] for line in events(tmp_path / "run", "remedy-back") if line["where"] == "update_actor"]
    assert down == ["micro-batches of 2 sequences", "micro-batches of 1 sequences"]
    assert back == ["micro-batches of 2 sequences", "micro-batches of 4 sequences"]
    # Every step that was in smaller pieces says so.
    said = [
        line.get("remedies", 0)
        for line in read_json_lines(tmp_path / "run" / "memory.jsonl")
        if (line["role"], line["phase"]) == ("actor", "train")
    ]
    assert said == [0, *taken]


def gradients_of_a_step(made: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, torch.Tensor]]]:
    """By role, the gradients of each mini-batch as the optimizer gets them."""
    made._started()
    found: dict[str, list[dict[str, torch.Tensor]]] = {"actor": [], "critic": []}
    for role, kept in found.items():
        engine = ENGINES[role]

        def noted(*given: Any, engine: Any = engine, kept: Any = kept, step: Any = engine.optimizer_step) -> Any:
            kept.append({name: p.grad.float().clone() for name, p in engine.module.named_parameters()})
            return step(*given)

        monkeypatch.setattr(engine, "optimizer_step", noted)
    made.step()
    return found


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize(
    ("precision", "within", "how"),
    [("fp32", 1e-5, "is short"), ("bf16-mixed", 1e-2, "runs out"), ("bf16", 1e-2, "is short")],
)
def test_gradients_of_a_disturbed_mini_batch_are_the_undisturbed_ones(
    precision: str, within: float, how: str, trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one step on the same samples, eight sequences at once, and in twos after memory ran out twice, or one by one
    where there is none."""
    ppo = {"steps": 1, "batch_size": 8, "micro_batch_size": 8, "lr": 1e-3, "kl_coef": 0}
    roles = {role: {"precision": precision} for role in ("actor", "critic")}
    runs = [trainer(ppo=ppo, output_dir=tmp_path / name, model_config=roles) for name in ("undisturbed", "run")]
    expected = gradients_of_a_step(runs[0], monkeypatch)
    run = runs[1]._started()
    if how == "is short":
        begin, left = run.phase, [2**40]

        def noted(name: str) -> Any:
            left[0] = 1 if name.startswith("update") else 2**40
            return begin(name)

        monkeypatch.setattr(run, "phase", noted)
        for role in ("actor", "critic"):
            monkeypatch.setattr(ENGINES[role].pieces["train"].allocator, "free", lambda: {"cpu": left[0]})
    for role, times in {"actor": 2, "critic": 2}.items() if how == "runs out" else ():
        left_over = [times]

        def look(*_: Any, left_over: list[int] = left_over) -> None:
            if torch.is_grad_enabled() and left_over[0]:
                left_over[0] -= 1
                raise torch.OutOfMemoryError(SAID)

        ENGINES[role].module.model.layers[1].mlp.register_forward_hook(look)
    found = gradients_of_a_step(runs[1], monkeypatch)
    said = {line["where"]: line["after"] for line in events(tmp_path / "run", "remedy")}
    size = {"runs out": "2", "is short": "1"}[how]
    assert said["update_actor"] == f"micro-batches of {size} sequences"
    assert "update_critic" in said
    for role, batches in expected.items():
        assert len(batches) == len(found[role]) == 1
        assert found[role][0].keys() == batches[0].keys()
        for name, gradient in batches[0].items():
            assert gradient.norm() > 0, (role, name)
            assert (found[role][0][name] - gradient).norm() <= within * gradient.norm(), (role, name)
