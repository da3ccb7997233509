"""Reading models: published counts, order of execution, ties, buffers, and every form of input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from verl_shard.bench.maps import zoo
from verl_shard.common.errors import ConfigError
from verl_shard.models.meta import auto_class, build_on_meta, config_for
from verl_shard.models.read import read_spec, spec_of_module
from verl_shard.models.spec import ModelSpec

_ZOO = zoo()
_TASKS = {"AutoModelForCausalLM": "causal-lm", "AutoModelForSequenceClassification": "reward"}


@pytest.mark.parametrize("entry", _ZOO, ids=lambda entry: entry["name"])
def test_published_models_have_their_published_counts(entry: dict[str, Any], published: Callable[[str], Any]) -> None:
    spec = read_spec(published(entry["name"]))
    assert spec.task == _TASKS.get(entry["auto"], "process-reward")
    # DeepSeek publishes the 256 routing biases of its 58 sparse layers as parameters; transformers has them as buffers.
    routing = 58 * 256 if entry["model_type"] == "deepseek_v3" else 0
    assert spec.n_params + routing == (entry["published_params"] or entry["params"])
    n_buffers = sum(tensor.n_elements for tensor in spec.tensors if tensor.is_buffer and not tensor.is_alias)
    assert n_buffers == entry["buffers"]
    n_layers = entry["layers"] - (entry["model_type"] == "bert")  # there BertEmbeddings was counted as one
    assert spec.n_blocks == n_layers
    assert bool(spec.ties) is entry["tied"]
    assert spec.weight_bytes >= 2 * spec.n_params
    _well_formed(spec)


def _well_formed(spec: ModelSpec) -> None:
    names = [name for block in spec.blocks for name in (*block.names, *block.followers)]
    assert sorted(names) == sorted(spec.order)
    assert len(set(names)) == len(names)
    assert not any(other.startswith(f"{name}.") for name in names for other in names)
    for index, block in enumerate(spec.blocks):
        held = [tensor for tensor in spec.tensors if tensor.block == index and not tensor.is_alias]
        assert block.n_bytes == sum(tensor.n_bytes for tensor in held)
        assert all(spec.piece_of(tensor.name) in (*block.names, *block.followers) for tensor in held)


# fmt: off
_TEXT_MODELS = [
    "bert", "bloom", "cohere", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox",
    "granite", "lfm2", "llama", "mistral", "mixtral", "mpt", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "roberta", "smollm3", "stablelm", "t5", "xglm",
]
# fmt: on


@pytest.mark.parametrize("model_type", _TEXT_MODELS)
def test_the_chain_is_in_the_order_in_which_modules_run(model_type: str, small_config: Callable[..., Any]) -> None:
    config = small_config(model_type)
    inputs = {"input_ids": torch.randint(3, 100, (2, 7))}
    if model_type in ("bert", "roberta"):
        config.is_decoder = True
    cls = auto_class(config, "causal-lm")
    if model_type == "t5":
        cls, inputs["decoder_input_ids"] = transformers.AutoModelForSeq2SeqLM, inputs["input_ids"]
    model = cls.from_config(config).eval()
    spec = spec_of_module(model)
    _well_formed(spec)

    ran: list[str] = []
    holding = {spec.piece_of(tensor.name) for tensor in spec.tensors}
    for name in (name for name in spec.order if name in holding):
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        model(**inputs)
    piece = {name: index for index, block in enumerate(spec.blocks) for name in block.names}
    visits = [piece[name] for name in dict.fromkeys(ran) if name in piece]
    assert visits == sorted(visits)
    assert spec.n_blocks == (6 if model_type == "t5" else 3)
    heads = [name for name in dict.fromkeys(ran) if name == spec.head]
    assert heads == [list(dict.fromkeys(ran))[-1]]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_follows_the_embedding_and_is_counted_once(tied: bool, small_config: Callable[..., Any]) -> None:
    spec = read_spec(small_config("qwen3", tie_word_embeddings=tied))
    embedding = spec.blocks[0]
    assert embedding.names == ("model.embed_tokens", "model.rotary_emb")
    assert embedding.followers == (("lm_head",) if tied else ())
    assert embedding.weight_bytes == 128 * 32 * 2
    assert embedding.buffer_bytes == 2 * 4 * 4, "inverse frequencies, twice, are fp32 in a bf16 model"
    assert spec.blocks[-1].names == (("model.norm",) if tied else ("lm_head",))
    assert spec.head == "lm_head"
    assert spec.ties == ((("model.embed_tokens.weight", "lm_head.weight"),) if tied else ())


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Own(nn.Module):
    """Not a transformers model; blocks in a ModuleList, a parameter and a buffer of its own."""

    def __init__(self, n_layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.layers = nn.ModuleList(Layer() for _ in range(n_layers))
        self.out = nn.Linear(4, 7)


@pytest.mark.parametrize("classes", [None, ["Layer"], "Layer"])
def test_an_own_module_with_a_list_of_blocks(classes: Any) -> None:
    spec = read_spec(Own(), no_split_module_classes=classes)
    assert [block.names for block in spec.blocks] == [
        ("scale", "shift", "embed"),
        *((f"layers.{i}",) for i in range(5)),
        ("out",),
    ]
    assert spec.blocks[0].n_bytes == 4 * (4 + 4 + 7 * 4)
    assert spec.dtype == "float32"
    assert read_spec(Own(), dtype="bf16").weight_bytes * 2 == spec.weight_bytes
    _well_formed(spec)


def test_ties_in_pairs_join_to_one_group_and_tied_blocks_stay_together() -> None:
    model = Own(6)
    model.layers[2].linear.weight = model.layers[1].linear.weight
    model.layers[3].linear.weight = model.layers[2].linear.weight
    model.layers[4].linear.bias = model.layers[3].linear.bias
    spec = read_spec(model)
    assert ("layers.1.linear.weight", "layers.2.linear.weight", "layers.3.linear.weight") in spec.ties
    assert [block.names for block in spec.blocks][2] == ("layers.1", "layers.2", "layers.3", "layers.4")
    assert spec.n_params == sum(parameter.numel() for parameter in model.parameters())
    _well_formed(spec)


def test_ties_that_only_the_declaration_knows_are_found(small_config: Callable[..., Any]) -> None:
    model = build_on_meta(small_config("gpt2"), dtype=torch.float32)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert spec_of_module(model).ties == (("transformer.wte.weight", "lm_head.weight"),)


def test_a_module_with_no_blocks_is_one_piece() -> None:
    spec = read_spec(nn.Linear(3, 3))
    assert spec.n_blocks == 0
    assert [block.names for block in spec.blocks] == [("",)]


def test_a_peft_model_is_read_through_its_wrappers(small_config: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model

    config = small_config("qwen3", tie_word_embeddings=True)
    base = auto_class(config, "causal-lm").from_config(config)
    plain = spec_of_module(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    spec = read_spec(model)
    assert spec.order == tuple(f"base_model.model.{name}" for name in plain.order)
    assert [block.kind for block in spec.blocks] == [block.kind for block in plain.blocks]
    assert spec.blocks[0].followers == ("base_model.model.lm_head",)
    assert spec.n_params == sum(parameter.numel() for parameter in model.parameters())
    assert (spec.task, spec.architecture) == ("causal-lm", "Qwen3ForCausalLM")
    _well_formed(spec)


def test_id_folder_config_and_modules_give_the_same_chain(small_config: Callable[..., Any], tmp_path: Path) -> None:
    config = small_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    module = auto_class(config, "causal-lm").from_config(config, dtype=torch.bfloat16)
    on_meta = build_on_meta(config, dtype=torch.bfloat16)
    specs = [read_spec(given) for given in (tmp_path, str(tmp_path), config, module, on_meta)]
    assert all(spec.blocks == specs[0].blocks and spec.tensors == specs[0].tensors for spec in specs)
    assert read_spec(specs[0]) is specs[0]
    assert len({hash(spec) for spec in specs[:2]}) == 1


@pytest.mark.parametrize(
    ("architecture", "n_labels", "task"),
    [
        ("Qwen2ForCausalLM", 2, "causal-lm"),
        ("GPT2LMHeadModel", 2, "causal-lm"),
        ("Qwen2ForSequenceClassification", 1, "reward"),
        ("Qwen2ForTokenClassification", 1, "value"),
        ("Qwen2ForTokenClassification", 2, "process-reward"),
        ("Qwen2Model", 2, "other"),
    ],
)
def test_the_task_is_what_the_architecture_says(
    architecture: str, n_labels: int, task: str, small_config: Callable[..., Any]
) -> None:
    model_type = "gpt2" if architecture.startswith("GPT2") else "qwen2"
    spec = read_spec(small_config(model_type, architectures=[architecture], num_labels=n_labels))
    assert (spec.task, spec.architecture) == (task, architecture)


def test_labels_follow_the_task_but_not_against_a_trained_head(small_config: Callable[..., Any]) -> None:
    assert config_for(small_config("qwen2"), "reward").num_labels == 1
    assert config_for(small_config("qwen2"), "value").num_labels == 1
    trained = small_config("qwen2", architectures=["Qwen2ForSequenceClassification"], num_labels=3)
    assert config_for(trained, "reward").num_labels == 3


def test_devices_of_resolves_any_map(small_config: Callable[..., Any]) -> None:
    spec = read_spec(small_config("qwen3", tie_word_embeddings=False))
    assert spec.devices_of({"": 3}) == (3,) * len(spec.blocks)
    assert spec.devices_of({"model": 0, "model.layers.2": 1, "lm_head": 2}) == (0, 0, 0, 1, 0, 2)
    with pytest.raises(ConfigError, match=r"no device for lm_head\.weight"):
        spec.devices_of({"model": 0})
    with pytest.raises(ConfigError, match=r"model\.layers\.1 must be on one device, not on 0, 1"):
        spec.devices_of({"": 0, "model.layers.1.mlp": 1})
    assert sum(spec.loads({"model": 0, "lm_head": 1}).values()) == spec.n_bytes


def test_weights_that_stay_in_fp32_are_counted_so(small_config: Callable[..., Any]) -> None:
    model = build_on_meta(small_config("qwen2"), dtype=torch.bfloat16)
    before = spec_of_module(model, dtype=torch.bfloat16).weight_bytes
    model._keep_in_fp32_modules_strict = {"norm"}
    assert spec_of_module(model, dtype=torch.bfloat16).weight_bytes == before + 2 * 32
