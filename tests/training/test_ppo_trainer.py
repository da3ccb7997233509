"""PPOTrainer with its local runner, for real on a tiny model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.training.conftest import PROMPTS, count_w4
from verl_shard import ConfigError, PPOTrainer, RunError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import ShardNotice
from verl_shard.config.run_folder import WHOLE

Make = Callable[..., PPOTrainer]


def test_ppo_with_a_critic(trainer: Make, tmp_path: Path) -> None:
    heard: list[Any] = []

    class Listener:
        def on_train_begin(self, _: Any) -> None:
            heard.append("begin")

        def on_step_end(self, _: Any, step: int, metrics: Any) -> None:
            heard.append((step, metrics["training/global_step"]))

        def on_evaluate(self, _: Any, step: int, __: Any) -> None:
            heard.append(("validated", step))

        def on_train_end(self, _: Any) -> None:
            heard.append("end")

    made = trainer(ppo={"test_freq": 2, "kl_coef": 0.1}, callbacks=[Listener()])
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    records = made.train()
    assert [record["step"] for record in records] == [0, 1, 2]
    first, second = records[1]["data"], records[2]["data"]
    assert heard == ["begin", ("validated", 0), (1, 1), ("validated", 2), (2, 2), "end"]
    # The reference is the policy that training started from, and the engine's log-probabilities are the rollout's.
    assert abs(first["actor/reward_kl_penalty"]) < 1e-6
    assert second["actor/reward_kl_penalty"] != 0
    assert first["training/rollout_probs_diff_max"] < 1e-5
    assert first["actor/grad_norm"] > 0
    assert first["critic/grad_norm"] > 0
    assert any(not torch.equal(before[name], value) for name, value in made.model.state_dict().items())
    # metrics.jsonl has the same, and what was set is there to read.
    assert list(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == json.loads(json.dumps(records))
    assert "algorithm.adv_estimator=gae" in (tmp_path / "run" / "overrides.txt").read_text()


def test_verls_loggers(trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(loggers=["console", "tensorboard"], ppo={"steps": 1}).train()
    assert "step:1 - " in capsys.readouterr().out
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))
    assert "TENSORBOARD_DIR" not in os.environ


def test_the_score_is_the_rewards_mean(trainer: Make) -> None:
    seen: list[tuple[str, float]] = []

    def reward(prompt: str, response: str) -> float:
        assert prompt in PROMPTS
        seen.append((response, count_w4(response)))
        return seen[-1][1]

    metrics = trainer(reward_model=reward, ppo={"n": 2, "kl_coef": 0}).step()
    assert len(seen) == 8
    assert metrics["critic/score/mean"] == pytest.approx(sum(score for _, score in seen) / 8, rel=1e-5)
    assert not any("kl" in name for name in metrics if name.startswith("actor/") and name != "actor/ppo_kl")


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "opo", "gpg"])
def test_estimators_without_a_critic(trainer: Make, estimator: str) -> None:
    metrics = trainer(ppo={"adv_estimator": estimator, "n": 3, "steps": 1}).train()[0]["data"]
    assert "critic/vf_loss" not in metrics
    assert abs(metrics["actor/kl_loss"]) < 1e-6
    assert math.isfinite(metrics["actor/pg_loss"])
    assert metrics["actor/grad_norm"] > 0


def test_kl_goes_where_it_is_wanted(trainer: Make, tmp_path: Path) -> None:
    in_loss = trainer(ppo={"kl_in": "loss", "kl_coef": 0.3}).step()
    assert in_loss["actor/kl_coef"] == 0.3
    assert "actor/reward_kl_penalty" not in in_loss
    in_reward = trainer(
        ppo={"adv_estimator": "grpo", "n": 2, "kl_in": "reward", "kl_coef": 0.3}, output_dir=tmp_path / "b"
    ).step()
    assert in_reward["actor/reward_kl_penalty_coeff"] == 0.3
    assert "actor/kl_loss" not in in_reward


def test_one_seed_one_run_another_seed_another(trainer: Make, tmp_path: Path) -> None:
    def scores(folder: str, seed: int, **generation: Any) -> list[float]:
        made = trainer(ppo={"seed": seed, "n": 2}, generation=generation, output_dir=tmp_path / folder)
        return [record["data"]["actor/grad_norm"] for record in made.train()]

    first = scores("a", 5)
    assert scores("b", 5) == first
    # What shares a batch does not decide what is sampled.
    assert scores("c", 5, batch_size=3) == pytest.approx(first, rel=1e-4)
    assert scores("d", 6) != first


def test_two_trainers_in_one_process_keep_apart(trainer: Make, tmp_path: Path) -> None:
    alone = [record["data"]["critic/score/mean"] for record in trainer(output_dir=tmp_path / "alone").train()]
    first, second = trainer(output_dir=tmp_path / "a"), trainer(output_dir=tmp_path / "b", ppo={"seed": 9, "lr": 0.3})
    found = []
    for _ in range(2):
        found.append(first.step()["critic/score/mean"])
        second.step()
    assert found == alone
    assert first.model is not second.model


def test_a_reference_and_a_critic_of_their_own(trainer: Make, make_model: Callable[..., Path]) -> None:
    other = make_model("other", seed=7)
    metrics = trainer(ref_model=other, critic_model=make_model("critic", seed=8)).step()
    # Two random models differ from the first step on.
    assert metrics["actor/reward_kl_penalty"] != pytest.approx(0, abs=1e-4)


def test_a_run_goes_on_from_its_checkpoint(trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trainer(ppo={"steps": 4}, output_dir=tmp_path / "whole").train()

    class StopError(Exception):
        pass

    def stop(_: Any, step: int, __: Any) -> None:
        if step == 3:
            raise StopError

    with pytest.raises(StopError):
        trainer(ppo={"steps": 4, "save_freq": 2}, callbacks=[stop]).train()
    resumed = trainer(ppo={"steps": 4, "save_freq": 2}, resume=True)
    assert [record["step"] for record in resumed.metrics] == [1, 2]
    records = resumed.train()
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for ours, theirs in zip(records, whole, strict=True):
        assert ours["data"]["actor/grad_norm"] == pytest.approx(theirs["data"]["actor/grad_norm"], rel=1e-4)
    with pytest.raises(ConfigError, match=r"ppo_config\['steps'\] = 4: the run in .* has 4 steps. Give 5 or more"):
        resumed.train()
    with pytest.raises(
        ConfigError, match=r"^ppo_config\['seed'\] = 2: the run in .* has 1. Give seed as that run has it"
    ):
        trainer(ppo={"steps": 4, "seed": 2}, resume=True)
    with pytest.raises(ConfigError, match=r"^output_dir = .*another run. Set resume=True to go on"):
        trainer()


def test_a_callback_stops_it(trainer: Make) -> None:
    made = trainer(ppo={"steps": 9}, callbacks=[lambda trainer, step, _: trainer.stop() if step == 2 else None])
    assert [record["step"] for record in made.train()] == [1, 2]


def test_saved_is_what_was_trained(trainer: Make, tmp_path: Path) -> None:
    made = trainer()
    made.train()
    made.save(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, value in made.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_loaded_modules_are_saved_and_said_once(trainer: Make, make_model: Callable[..., Path]) -> None:
    folder = make_model()
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.warns(
        ShardNotice, match=r"actor_model = LlamaForCausalLM: .*Using its weights saved to .*models/actor"
    ):
        made = trainer(actor_model=module)
    for name, value in module.state_dict().items():
        assert torch.equal(made.model.state_dict()[name], value)


def test_several_rewards_are_weighed(trainer: Make) -> None:
    def long(response: str) -> float:
        return float(len(response.split()))

    metrics = trainer(reward_model=[(count_w4, 2.0), (long, -1.0)], ppo={"test_freq": 1, "steps": 1}).train()[0]["data"]
    parts = {name.split("/")[2]: value for name, value in metrics.items() if name.endswith("/mean@1")}
    assert parts["score"] == pytest.approx(2 * parts["count_w4"] - parts["long"])
    assert parts["reward"] == pytest.approx(parts["score"])


def test_a_reward_model_scores(trainer: Make, make_model: Callable[..., Path]) -> None:
    folder = make_model("judge", task="SequenceClassification", seed=3, num_labels=1)
    seen: list[tuple[str, str]] = []

    def note(prompt: str, response: str) -> float:
        seen.append((prompt, response))
        return 0.0

    metrics = trainer(reward_model=[folder, (note, 1.0)]).step()
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt, response in seen:
        ids = tokenizer(f"{prompt} {response}", return_tensors="pt", add_special_tokens=False)["input_ids"]
        expected.append(judge(ids).logits.item())
    assert metrics["critic/score/mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_a_reward_that_is_no_number_stops_the_run(trainer: Make) -> None:
    def broken(response: str) -> float:
        return math.nan

    with pytest.raises(RunError, match="the reward broken gave nan, which is no finite number, for the response"):
        trainer(reward_model=broken).train()


def test_lora(trainer: Make) -> None:
    made = trainer(ppo={"lora_rank": 2, "lora_alpha": 4})
    records = made.train()
    assert abs(records[0]["data"]["actor/reward_kl_penalty"]) < 1e-6
    trained = [name for name, value in made.model.named_parameters() if value.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_on_ray_a_validation_is_a_launch_of_its_own_from_the_last_checkpoint(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What verl's main program is told, and what comes back of it; the program itself runs in tests/end_to_end."""
    told: list[list[str]] = []
    heard: list[int] = []

    def verl(overrides: list[str], folder: Any, *, launch: Any, on_record: Any, **_: Any) -> None:
        told.append(overrides)
        record = {"step": launch.after_step, "data": {"val-core/quickstart/reward/mean@1": 0.25}}
        launch.metrics_file.write_text(json.dumps(record) + "\n")
        on_record(record)

    monkeypatch.setattr("verl_shard.verl_plugin.launch.run_verl", verl)
    monkeypatch.setattr("verl_shard.verl_plugin.fork_server.can_fork", lambda: False)
    made = trainer(runner="verl", callbacks=[lambda _, step, __: heard.append(step)])
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / WHOLE).touch()
    assert made.evaluate() == {"val-core/quickstart/reward/mean@1": 0.25}
    (overrides,) = told
    assert {"trainer.val_only=true", "trainer.val_before_train=true"} <= set(overrides)
    assert any(text.startswith("trainer.resume_from_path=") and text.endswith("global_step_2") for text in overrides)
    assert made.metrics == []
    assert heard == []
    for call, why in ((made.step, "callback"), (made.stop, "steps"), (made.save_checkpoint, "save_freq")):
        with pytest.raises(ConfigError, match=why):
            call()
