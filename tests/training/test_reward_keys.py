"""Keys of model_config for models that only score: where they go, and what they do not go with."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.training.conftest import PROMPTS, count_w4
from verl_shard import ConfigError
from verl_shard.planning.plan_file import read_role
from verl_shard.runtime.scoring_model import ScoringModel
from verl_shard.training import handed_reward, placement
from verl_shard.training.article_keys import KEYS
from verl_shard.training.inputs import Inputs, read_inputs
from verl_shard.verl_plugin.reward import actor

MakeModel = Callable[..., Path]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture
def read(make_model: MakeModel) -> Callable[..., Inputs]:
    """read(reward=..., model_config=...): what PPOTrainer reads, without a run."""

    def make(*, model_config: Any, reward: Any = count_w4) -> Inputs:
        settings = {
            "generation_config": {"max_new_tokens": 6}, "ppo_config": {"batch_size": 4}, "use_gradient_checkpointing": False,
            "gradient_checkpointing_kwargs": None,
        }  # fmt: skip
        return read_inputs(
            models={"actor": make_model(), "critic": None, "reward": reward, "ref": None}, model_config=model_config,
            settings=settings, data=(PROMPTS, None), runner="local", tokenizer=None, callbacks=(), loggers=(), processes=1,
        )  # fmt: skip

    return make


@pytest.mark.usefixtures("four_gpus")
def test_more_of_streaming_goes_to_the_plan_and_the_reward_model(
    read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path
) -> None:
    model, judge = make_model(), make_model("judge", task="SequenceClassification", num_labels=1)
    streamed = {"offload": "stream", "embeddings_on_host": True, "pin_limit": "40GiB"}
    asked = {"ref": {"device": 1, **streamed}, "reward": {"device": 2, **streamed}}
    inputs = read(reward=judge, model_config={"actor": {"device": 0}, "critic": {"device": 0}, **asked})
    assert inputs.rewards is not None
    assert inputs.rewards.parts[0].model == {
        "device_map": {"": 2}, "dtype": "bfloat16", "attn_implementation": "sdpa", **streamed,
    }  # fmt: skip
    models = dict.fromkeys(("actor", "critic", "ref"), str(model))
    placement.lay_out(inputs.places, models, tmp_path / "plan.yaml")
    assert read_role(tmp_path / "plan.yaml", "ref")["settings"] == streamed


@pytest.mark.usefixtures("four_gpus")
def test_copies_of_a_reward_model(read: Callable[..., Inputs], make_model: MakeModel) -> None:
    judge = make_model("judge", task="SequenceClassification", num_labels=1)
    rewards = read(reward=judge, model_config={"reward": {"copies_on": ["cuda:3", 1], "batch_size": 2}}).rewards
    assert rewards is not None
    assert rewards.parts[0].model == {
        "copies_on": [3, 1], "batch_size": 2, "dtype": "bfloat16", "attn_implementation": "sdpa",
    }  # fmt: skip


def test_every_argument_of_a_scoring_model_can_be_said() -> None:
    keys = {key.name for key in KEYS if key.section == "model_config" and "reward" in key.roles}
    assert set(inspect.signature(ScoringModel).parameters) - keys == {"path"}
    assert keys - set(inspect.signature(ScoringModel).parameters) == {"device", "torch_dtype", "precision"}


STEPS = {
    "aggregate": "product", "separator": " / ", "step_mark": " w9 ", "label": "LABEL_0", "batch_size": 2,
    "too_long": "truncate", "empty_response": "stop", "task": "process-reward", "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("runner", ["local", "verl"])
def test_a_process_model_scores_as_it_was_told(
    runner: str, read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; and from what the trainer hands to verl's reward worker, here without Ray around the model."""
    judge = make_model("judge", task="TokenClassification", num_labels=2)
    make_model("other")
    (tmp_path / "template.jinja").write_text("{% for m in messages %}w8 {{ m['content'] }} {% endfor %}")
    monkeypatch.chdir(tmp_path)
    asked = {**STEPS, "tokenizer": "other", "chat_template": "template.jinja"}
    rewards = read(reward=judge, model_config={"reward": asked}).rewards
    assert rewards is not None
    monkeypatch.chdir("/")
    if runner == "verl":
        handed_reward.hand_over(rewards, tmp_path)
        monkeypatch.setattr(actor, "NodeModel", lambda path, settings: ScoringModel(path, **settings))
        rewards = handed_reward._rewards(tmp_path)
    rows = [
        {"data_source": "m", "solution_str": text, "ground_truth": "",
         "extra_info": {"messages_json": json.dumps([{"role": "user", "content": "w5"}])}}
        for text in ("w6 w7 / w4", "w4")
    ]  # fmt: skip
    found = rewards.compute_scores(rows)

    model = transformers.AutoModelForTokenClassification.from_pretrained(judge, dtype=torch.float32).eval()

    def good(ids: list[int], at: int) -> float:
        with torch.no_grad():
            return float(model(torch.tensor([ids])).logits.softmax(-1)[0, at, 0])

    two = [8, 5, 8, 6, 7, 9, 4, 9]
    assert found == pytest.approx([good(two, 5) * good(two, 7), good([8, 5, 8, 4, 9], 4)], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "reward", "message"),
    [
        ("SequenceClassification", {"aggregate": "mean"}, r"\['aggregate'\] = 'mean': .*scores whole responses"),
        ("SequenceClassification", {"label": 1}, r"\['label'\] = 1: .* has 0 \(LABEL_0\)"),
        ("SequenceClassification", {"task": "chat"}, r"\['task'\] = chat: not one of reward, process-reward"),
        ("TokenClassification", {"aggregate": "product"}, r"\['aggregate'\] = product: .* one unbounded number"),
        ("TokenClassification", {"aggregate": "sum"}, r"\['aggregate'\] = sum: not one of min, last, mean, product"),
        ("TokenClassification", {"too_long": "cut"}, r"\['too_long'\] = cut: not one of stop, truncate"),
        ("TokenClassification", {"batch_size": 0}, r"\['batch_size'\] = 0: not a number of 1 or more"),
        ("TokenClassification", {"label": -1}, r"\['label'\] = -1: not the index or name"),
        ("TokenClassification", {"separator": ""}, r"\['separator'\]: not a text"),
        ("TokenClassification", {"chat_template": "no.jinja"}, r"\['chat_template'\] = no\.jinja: no such file"),
        ("TokenClassification", {"copies_on": "cpu"}, r"\['copies_on'\] = cpu: not a list of devices"),
        ("TokenClassification", {"copies_on": ["cpu"], "device": "cpu"}, "device and copies_on both say where it is"),
        ("TokenClassification", {"pin_limit": "much"}, r"\['pin_limit'\] = much: not a number of bytes"),
        ("TokenClassification", {"pin_limit": "1GB"}, r"\['pin_limit'\] = 1GB: offload=\"none\" pins nothing"),
        ("TokenClassification", {"offload": "auto", "embeddings_on_host": True}, r"\['embeddings_on_host'\] = True: auto leaves"),
    ],
)  # fmt: skip
def test_keys_that_do_not_go_with_the_reward_model(
    kind: str, reward: dict[str, Any], message: str, read: Callable[..., Inputs], make_model: MakeModel
) -> None:
    judge = make_model("judge", task=kind, num_labels=1)
    with pytest.raises(ConfigError, match=r"model_config\['reward'\]" + message if message[0] == "\\" else message):
        read(reward=judge, model_config={"reward": reward})


@pytest.mark.parametrize(
    ("role", "key", "value", "for_"),
    [
        ("actor", "batch_size", 4, "reward"), ("ref", "aggregate", "min", "reward"),
        ("rollout", "copies_on", ["cpu"], "reward"), ("critic", "pin_limit", 5, "ref and reward"),
    ],
)  # fmt: skip
def test_keys_of_another_role_are_refused(
    role: str, key: str, value: Any, for_: str, read: Callable[..., Inputs]
) -> None:
    why = rf"model_config\['{role}'\]\['{key}'\] = .*: it is for {for_}, and changes nothing of the {role}"
    with pytest.raises(ConfigError, match=why):
        read(model_config={role: {key: value}})
