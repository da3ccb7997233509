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


@pytest.mark.usefixtures("four_gpus")
def test_copies_of_a_reference_are_in_the_plan(
    read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path
) -> None:
    """With what one of them takes of its GPU: weights in bf16, and buffers."""
    config = {"actor": {"device": 0}, "critic": {"device": 0}, "ref": {"copies_on": [3, "cuda:1"], "offload": "stream"}}
    inputs, model = read(model_config=config), make_model()
    assert inputs.places.gpus == (0, 1, 3)
    placement.lay_out(inputs.places, dict.fromkeys(("actor", "critic", "ref"), str(model)), tmp_path / "plan.yaml")
    entry, actor = (read_role(tmp_path / "plan.yaml", role) for role in ("ref", "actor"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    n_bytes = sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert entry["loads"] == {3: n_bytes, 1: n_bytes}
    assert {name: value for name, value in entry.items() if name != "loads"} == {
        "copies_on": [3, 1], "precision": "bf16", "attn_implementation": "sdpa", "settings": {"offload": "stream"},
    }  # fmt: skip
    assert actor["device_map"] == {"": 0}


@pytest.mark.usefixtures("four_gpus")
def test_where_a_strategy_puts_a_role_that_names_no_device(read: Callable[..., Inputs]) -> None:
    roles = {"actor": {"strategy": "none"}, "critic": {"strategy": "device_map"}, "ref": {"strategy": "data_parallel"}}
    found = read(model_config=roles).places.roles
    assert {role: (place.devices, place.copies) for role, place in found.items()} == {
        "actor": ((0,), False), "critic": ((0, 1, 2, 3), False), "ref": ((0, 1, 2, 3), True),
    }  # fmt: skip
    named = {"ref": {"strategy": "data_parallel", "devices": [2, 1]}, "actor": {"strategy": "none", "device": 3}}
    found = read(model_config=named).places.roles
    assert [(found[role].devices, found[role].copies) for role in ("ref", "actor")] == [((2, 1), True), ((3,), False)]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"actor": {"strategy": "data_parallel"}}, "a role that is trained has a copy in each process"),
        ({"actor": {"copies_on": [0, 1]}}, "it is for ref and reward, and changes nothing of the actor"),
        ({"ref": {"strategy": "none", "devices": [0, 1]}}, "it is for one GPU, and there are 2"),
        ({"ref": {"strategy": "data_parallel", "device": 1}}, "there is one GPU, and so one copy"),
        ({"ref": {"strategy": "data_parallel", "device": "cpu"}}, "it works on GPUs, and device_type is cpu"),
        ({"ref": {"strategy": "none", "copies_on": [1]}}, "copies_on says it otherwise. Leave out one of them"),
        ({"ref": {"copies_on": [1, 2], "device": 3}}, "device and copies_on both say where it is"),
        ({"ref": {"copies_on": [1, 7]}}, "this process has GPU 0, 1, 2, 3; 7 belongs to another process"),
        ({"ref": {"strategy": "fsdp"}}, "not one of none, device_map, data_parallel"),
    ],
)
def test_faults_of_strategies_and_copies(read: Callable[..., Inputs], config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(model_config=config)


def test_every_argument_of_a_scoring_model_can_be_said() -> None:
    keys = {key.name for key in KEYS if key.section == "model_config" and "reward" in key.roles}
    assert set(inspect.signature(ScoringModel).parameters) - keys == {"path"}
    assert keys - set(inspect.signature(ScoringModel).parameters) == {"device", "strategy", "torch_dtype", "precision"}


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
        ("rollout", "copies_on", ["cpu"], "ref and reward"), ("critic", "pin_limit", 5, "ref and reward"),
    ],
)  # fmt: skip
def test_keys_of_another_role_are_refused(
    role: str, key: str, value: Any, for_: str, read: Callable[..., Inputs]
) -> None:
    why = rf"model_config\['{role}'\]\['{key}'\] = .*: it is for {for_}, and changes nothing of the {role}"
    with pytest.raises(ConfigError, match=why):
        read(model_config={role: {key: value}})
