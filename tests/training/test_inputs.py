"""What PPOTrainer refuses, before anything is loaded or made; and what the articles' calls mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.training.conftest import PROMPTS, count_w4
from verl_shard import ConfigError, PPOTrainer
from verl_shard.common.notices import ShardNotice
from verl_shard.planning.plan_file import read_role
from verl_shard.training import placement
from verl_shard.training.data import Row, complete_rows, read_given
from verl_shard.training.inputs import Inputs, read_inputs
from verl_shard.training.rewards import read_rewards

MakeModel = Callable[..., Path]


def collect_rows(train: Any, val: Any, *, seed: int) -> tuple[list[Row], list[Row]]:
    return complete_rows(*read_given(train, val), seed=seed)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture
def read(make_model: MakeModel) -> Callable[..., Inputs]:
    """read(ppo={...}, generation={...}, **more): what PPOTrainer reads, without a run."""

    def make(**more: Any) -> Inputs:
        models = {"actor": more.pop("actor", None) or make_model(), "critic": None, "reward": count_w4, "ref": None}
        models |= {role: more.pop(role) for role in list(more) if role in models}
        settings = {
            "generation_config": more.pop("generation", {"max_new_tokens": 6}), "ppo_config": more.pop("ppo", {"batch_size": 4}),
            "use_gradient_checkpointing": more.pop("checkpointing", False),
            "gradient_checkpointing_kwargs": more.pop("kwargs", None),
        }  # fmt: skip
        arguments = {
            "models": models, "model_config": None, "settings": settings, "data": (PROMPTS, None), "runner": "local",
            "tokenizer": None, "callbacks": (), "loggers": (), "processes": 1, **more,
        }  # fmt: skip
        return read_inputs(**arguments)

    return make


ARTICLE: dict[str, Any] = {
    "model_config": {
        "actor": {"device": "cuda:0", "dtype": torch.bfloat16},
        "critic": {"device": "cuda:1", "dtype": torch.bfloat16},
        "reward": {"device": "cuda:2", "dtype": torch.float16},
        "ref": {"device": "cuda:3", "dtype": torch.bfloat16},
    },
    "generation": {"max_new_tokens": 12, "do_sample": True, "top_p": 0.95, "batch_size": 4},
    "ppo": {"kl_coef": 0.08, "max_epochs": 1},
    "checkpointing": True,
    "kwargs": {"use_reentrant": False},
}


def overrides_of(inputs: Inputs, tmp_path: Path) -> dict[str, str]:
    from verl_shard.training.data import write_rows

    found = inputs.settings.overrides(
        models={"actor": "a", "critic": "c", "ref": "a"}, files=write_rows(inputs.rows, inputs.held_out, tmp_path / "data"),
        longest_prompt=inputs.longest_prompt, reward=None, plan=tmp_path / "plan.yaml", checkpoints=tmp_path,
        attention={role: place.attn_implementation for role, place in inputs.places.roles.items()}, cpu=inputs.places.cpu,
        resume_from=None, loggers=(), names=("p", "e"), tokenizer=None, extra=(),
    )  # fmt: skip
    return dict(line.split("=", 1) for line in found)


@pytest.mark.usefixtures("four_gpus")
def test_the_articles_call_means_what_it_says(
    read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path
) -> None:
    model, judge = make_model(), make_model("judge", task="SequenceClassification", num_labels=1)
    with pytest.warns(ShardNotice, match="bfloat16 weights lose small updates"):
        inputs = read(actor=model, critic=model, reward=judge, ref=model, **ARTICLE)
    assert inputs.rewards is not None
    assert inputs.rewards.parts[0].model == {"device_map": {"": 2}, "dtype": "float16", "attn_implementation": "sdpa"}
    placement.lay_out(
        inputs.places, {"actor": str(model), "critic": str(model), "ref": str(model)}, tmp_path / "plan.yaml"
    )
    for role, gpu in (("actor", 0), ("critic", 1), ("ref", 3)):
        entry = read_role(tmp_path / "plan.yaml", role)
        assert (entry["device_map"], entry["precision"]) == ({"": gpu}, "bf16")
    set_ = overrides_of(inputs, tmp_path)
    assert set_["data.max_response_length"] == "12"
    assert set_["actor_rollout_ref.rollout.top_p"] == "0.95"
    assert set_["actor_rollout_ref.rollout.max_num_seqs"] == "4"
    assert set_["algorithm.kl_ctrl.kl_coef"] == "0.08"
    assert set_["algorithm.use_kl_in_reward"] == "true"
    assert set_["actor_rollout_ref.actor.ppo_epochs"] == "1"
    assert set_["actor_rollout_ref.model.enable_gradient_checkpointing"] == "true"
    assert set_["critic.model.enable_gradient_checkpointing"] == "true"
    assert set_["trainer.device"] == "cuda"


@pytest.mark.usefixtures("four_gpus")
def test_a_reward_model_over_several_gpus(read: Callable[..., Inputs], make_model: MakeModel) -> None:
    judge = make_model("judge", task="SequenceClassification", num_labels=1)
    rewards = read(reward=judge, model_config={"reward": {"devices": [2, 3]}}).rewards
    assert rewards is not None
    assert rewards.parts[0].model == {
        "device_map": "balanced", "devices": (2, 3), "dtype": "bfloat16", "attn_implementation": "sdpa",
    }  # fmt: skip


@pytest.mark.usefixtures("four_gpus")
def test_a_roles_attention_and_default_share(read: Callable[..., Inputs]) -> None:
    inputs = read(model_config={"actor": {"dtype": torch.float32, "attn_implementation": "flash_attention_2"}})
    actor = inputs.places.roles["actor"]
    assert (actor.devices, actor.precision, actor.attn_implementation) == ((0, 1, 2, 3), "fp32", "flash_attention_2")
    assert inputs.places.roles["critic"].precision == "bf16-mixed"
    assert inputs.places.roles["ref"].precision == "bf16"


@pytest.mark.usefixtures("four_gpus")
def test_each_process_takes_its_own_gpus(read: Callable[..., Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert read(processes=2).places.share == (2, 3)
    with pytest.raises(ConfigError, match="this process has GPU 2, 3; 0 belongs to another process"):
        read(processes=2, model_config={"actor": {"device": "cuda:0"}})


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("mixed", "actor", "ref"), [("bf16", "bf16-mixed", "bf16"), ("no", "fp32", "fp32"), (None, "bf16-mixed", "bf16")]
)
def test_accelerates_mixed_precision_is_respected(
    mixed: str | None, actor: str, ref: str, read: Callable[..., Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mixed is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
    roles = read().places.roles
    assert (roles["actor"].precision, roles["ref"].precision) == (actor, ref)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="accelerate's mixed_precision = fp16: this engine has no loss scaling"):
        read()


GPUS_IN_CONFLICT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"actor": {"device": 0, "device_map": {"": 1}}}, "device and device_map both say where it is"),
    ({"actor": {"device": 0}, "rollout": {"device": 1}}, "it generates on the actor's own module, which has GPU 0"),
    ({"actor": {"device": 0}, "critic": {"device": "cpu"}}, "critic would be on the CPU and actor on GPUs"),
    ({"actor": {"device": 7}}, "7 belongs to another process, or to none"),
    ({"actor": {"dtype": "float16"}}, "the actor has no loss scaling"),
    ({"actor": {"dtype": "bfloat16", "precision": "fp32"}}, "dtype says bf16"),
    ({"reward": {"device": 0}}, "this run has no reward model"),
    ({"judge": {"device": 0}}, r"model_config\['judge'\]: no such role. Use some of actor, critic"),
    ({"actor": {"devcie": 0}}, "there is no such key. Did you mean device"),
)  # fmt: skip


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("model_config", "message"), GPUS_IN_CONFLICT)
def test_conflicts_over_devices(model_config: Any, message: str, read: Callable[..., Inputs]) -> None:
    with pytest.raises(ConfigError, match=message):
        read(model_config=model_config)


def test_the_ref_of_lora_is_where_the_actor_is(read: Callable[..., Inputs], make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="with lora_rank the reference is the actor without its adapters"):
        read(ppo={"lora_rank": 4}, ref=make_model("ref"))


def test_devices_of_a_map_are_said_once_and_in_a_row(read: Callable[..., Inputs], make_model: MakeModel) -> None:
    layers = {f"model.layers.{n}": n // 2 for n in range(8)}
    for device_map, shown in (
        ({"model.embed_tokens": 0, **layers, "lm_head": 3}, "GPU 0-3"),
        ({"model": "cuda:2", "lm_head": 0}, "GPU 2, GPU 0"),
        ({"model": 0, "model.norm": 1, "lm_head": 5}, "GPU 0-1, GPU 5"),
    ):
        with pytest.raises(ConfigError, match=rf"model_config\['actor'\] = {shown}: torch sees no GPU"):
            read(model_config={"actor": {"device_map": device_map}})


def test_a_model_that_is_not_there_is_said_and_looked_for_once(
    read: Callable[..., Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def no_hub(name: str, **given: Any) -> None:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", no_hub)
    with pytest.raises(ConfigError) as caught:
        read(actor="nope", critic="nope", ref="nope", reward="nope")
    assert [(finding.code, finding.given) for finding in caught.value.findings] == [("model-not-found", "nope")]
    assert asked == ["nope"]


def test_gpus_on_a_machine_without(read: Callable[..., Inputs]) -> None:
    with pytest.raises(ConfigError, match=r"model_config\['actor'\] = GPU 0: torch sees no GPU .*write \"cpu\""):
        read(model_config={"actor": ARTICLE["model_config"]["actor"]})


SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"generation": {"max_new_tokens": 0}}, r"generation_config\['max_new_tokens'\] = 0: not a number of 1 or more"),
    ({"generation": {"do_sample": False}}, "a greedy response explores nothing"),
    ({"generation": {"max_new_tokns": 4}}, "transformers does not know it. Did you mean max_new_tokens"),
    ({"generation": {"typical_p": 0.5}}, "verl's rollout has no such setting"),
    ({"generation": {"repetition_penalty": 1.2}}, "would not be those of the samples"),
    ({"generation": transformers.GenerationConfig(num_beams=2)}, "num_beams.*a beam does not"),
    ({"ppo": {"kl_coef": -1}}, "not a number of at least 0"),
    ({"ppo": {"target_kl": 0.1}}, "algorithm.kl_ctrl.target_kl"),
    ({"ppo": {"adv_estimator": "remax"}}, "it needs the reward of a greedy response"),
    ({"ppo": {"adv_estimator": "grpo", "n": 1}}, "compares the responses to a prompt"),
    ({"ppo": {"adv_estimator": "grpo", "lam": 0.9}}, "grpo has no GAE"),
    ({"ppo": {"batch_size": 4, "mini_batch_size": 3}}, r"batch_size 4 % mini_batch_size 3 = 1, not 0"),
    ({"ppo": {"batch_size": 3, "micro_batch_size": 3}, "processes": 2}, r"= 3 responses, % 2 processes = 1, not 0"),
    ({"ppo": {"batch_size": 4, "micro_batch_size": 3}}, r"= 4 responses, % 3 = 1, not 0"),
    ({"ppo": {"max_epochs": 1, "ppo_epochs": 2}}, "max_epochs is given too"),
    ({"ppo": {"batch_size": 99}}, "there are only 11 prompts to train on"),
    ({"ppo": {"batch_size": 4, "max_prompt_length": 3}}, "12 of 12 prompts .* are longer, the longest has 4 tokens"),
    ({"generation": {"max_new_tokens": 61}}, r"prompt 4 \+ response 61 = 65 tokens, and the model has 64 positions"),
    ({"kwargs": {"use_reentrant": False}}, "use_gradient_checkpointing is not set"),
    ({"checkpointing": True, "kwargs": {"use_reentrant": True}}, "reentrant checkpointing loses"),
    ({"runner": "rya"}, "Use one of local, verl"),
    ({"runner": "verl", "processes": 2}, "verl starts its own on Ray"),
    ({"loggers": ("consle",)}, "Use some of console, tensorboard, wandb"),
    ({"callbacks": [3]}, "it has none of on_train_begin"),
    ({"data": ([], None)}, "train_data: there are no rows"),
    ({"data": ([{"text": "x"}], None)}, r"train_data\[0\]: its prompt is neither .*\(it has text\)"),
    ({"data": ("nowhere.parquet", None)}, "train_data = nowhere.parquet: there is no such file"),
    ({"reward": None}, "reward_model: there is none"),
)  # fmt: skip


@pytest.mark.parametrize(("given", "message"), SETTINGS, ids=lambda value: str(value)[:40])
def test_settings_and_data_that_cannot_be_meant(given: Any, message: str, read: Callable[..., Inputs]) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**given)


def test_all_faults_are_said_at_once(read: Callable[..., Inputs]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(generation={"nonsense": 1}, ppo={"kl_coef": "x", "steps": 0}, model_config={"x": {}}, runner="y")
    assert {finding.where for finding in caught.value.findings} >= {
        "runner", "generation_config['nonsense']", "ppo_config['kl_coef']", "ppo_config['steps']",
    }  # fmt: skip


def test_faults_of_data_rewards_and_folders_are_said_with_those_of_settings(
    read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        read(
            runner="y",
            ppo={"steps": 0},
            reward=[lambda text: 0.0, 3, tmp_path / "empty"],
            data=([{"x": 1}], "no.parquet"),
        )
    assert [(finding.code, finding.where) for finding in caught.value.findings] == [
        ("unknown-runner", "runner"), ("wrong-value", "ppo_config['steps']"), ("model-folder-empty", "model"),
        ("reward-signature", "reward_model[0]"), ("not-a-reward", "reward_model[1]"), ("bad-row", "train_data[0]"),
        ("no-data-file", "val_data"),
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:  # of what is right, what does not go together
        read(
            runner="y",
            actor=str(tmp_path / "empty"),
            tokenizer=make_model(),
            ppo={"batch_size": 99, "max_prompt_length": 3},
        )
    assert [(finding.code, finding.where) for finding in caught.value.findings] == [
        ("unknown-runner", "runner"), ("model-folder-empty", "model"),
        ("prompts-too-long", "ppo_config['max_prompt_length']"), ("too-few-rows", "ppo_config['batch_size']"),
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        read(runner="y", reward=None, actor=make_model("bare", template=False))
    assert [(finding.code, finding.where) for finding in caught.value.findings] == [
        ("unknown-runner", "runner"), ("no-reward", "reward_model"), ("no-chat-template", "actor_model"),
    ]  # fmt: skip


def test_models_of_the_wrong_kind(read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path) -> None:
    bert = tmp_path / "bert"
    transformers.BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(bert)
    judge = make_model("judge", task="SequenceClassification", num_labels=1)
    for given, message in (
        ({"actor": bert}, "actor_model = BertForMaskedLM: .*and the actor is a causal language model"),
        ({"actor": judge}, "LlamaForSequenceClassification is a reward model"),
        ({"actor": 3}, "actor_model = int: neither a model nor the name of one"),
        ({"actor": torch.nn.Linear(2, 2)}, "it is a module, but none of transformers'"),
        (
            {"reward": str(make_model("plain"))},
            "LlamaForCausalLM is a causal language model, and the reward is a reward model",
        ),
        ({"actor": make_model("bare", template=False)}, "its tokenizer has no chat template"),
        ({"ppo": {"adv_estimator": "grpo"}, "critic": judge}, "and the critic is"),
        ({"ppo": {"adv_estimator": "grpo"}, "critic": make_model("c")}, "grpo has no critic"),
        ({"ppo": {"kl_coef": 0}, "ref": make_model("r")}, "kl_coef is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**given)


def test_nothing_is_made_when_something_is_wrong(make_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        PPOTrainer(
            make_model(), reward_model=count_w4, train_data=PROMPTS, ppo_config={"x": 1}, output_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


async def later(response: str) -> float:
    return 0.0


def test_rewards_with_a_wrong_signature() -> None:
    for function, message in (
        (lambda text: 0.0, "it takes text, which no reward is given. Take some of data_source, solution_str"),
        (lambda: 0.0, "it takes nothing of the response"),
        (later, "it is a coroutine function"),
        ([count_w4, count_w4], "count_w4 is there more than once"),
        ([(count_w4, "a lot")], "not a weight"),
        ([], "the list is empty"),
        ("nowhere.py:f", "it cannot be imported"),
        (7, "neither a function nor a model's folder or id"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_rewards(function, {})
    read_rewards(lambda response, **_: 0.0, {})
    read_rewards(lambda solution_str, tolerance=0.1: 0.0, {})


def test_data_in_every_form_is_the_same(tmp_path: Path) -> None:
    import datasets

    texts = [f"w{n} w5" for n in range(12)]
    rows = [{"prompt": [{"role": "user", "content": text}], "ground_truth": None} for text in texts]
    held = ["w9"]
    expected = collect_rows(texts, held, seed=0)
    assert [row["prompt"][0]["content"] for row in expected[0]] == texts
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "rows.parquet"))
    for given in (
        rows,
        [row["prompt"] for row in rows],
        dataset,
        tmp_path / "rows.parquet",
        [str(tmp_path / "rows.parquet")],
    ):
        assert collect_rows(given, held, seed=0) == expected
    train, val = collect_rows([f"w{n}" for n in range(50)], None, seed=0)
    assert len(train) == 45
    assert len(val) == 5
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in val}


def test_without_data_the_quick_starts_is_taken_and_said() -> None:
    with pytest.warns(ShardNotice, match="train_data.*no data is given. Using prompts of the quick start's"):
        train, val = collect_rows(None, None, seed=0)
    assert len(train) > 100
    assert val
    assert train[0]["data_source"].startswith("reasoning_gym/")


@pytest.mark.usefixtures("four_gpus")
def test_scoring_roles_may_be_kept_in_host_memory(
    read: Callable[..., Inputs], make_model: MakeModel, tmp_path: Path
) -> None:
    model, judge = make_model(), make_model("judge", task="SequenceClassification", num_labels=1)
    asked = {
        "actor": {"device": 0}, "critic": {"device": 0}, "ref": {"device": 1, "offload": "stream"},
        "reward": {"device": 2, "offload": "auto"},
    }  # fmt: skip
    inputs = read(reward=judge, model_config=asked)
    assert inputs.rewards is not None
    assert inputs.rewards.parts[0].model == {
        "device_map": {"": 2}, "dtype": "bfloat16", "attn_implementation": "sdpa", "offload": "auto",
    }  # fmt: skip
    models = dict.fromkeys(("actor", "critic", "ref"), str(model))
    placement.lay_out(inputs.places, models, tmp_path / "plan.yaml")
    assert read_role(tmp_path / "plan.yaml", "ref")["settings"] == {"offload": "stream"}
    assert "settings" not in read_role(tmp_path / "plan.yaml", "actor")


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("role", "ppo", "why"),
    [
        ("actor", {}, "the actor is trained"),
        ("critic", {}, "the critic is trained"),
        ("rollout", {}, "it generates on the actor's own module"),
        ("ref", {"lora_rank": 4}, "the reference is the actor without its adapters"),
    ],
)
def test_roles_that_cannot_be_kept_in_host_memory(role: str, ppo: Any, why: str, read: Callable[..., Inputs]) -> None:
    with pytest.raises(ConfigError, match=rf"model_config\['{role}'\]\['offload'\] = stream: .*{why}"):
        read(model_config={role: {"offload": "stream"}}, ppo=ppo)
