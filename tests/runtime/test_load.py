"""load_sharded on real, small models that were saved to a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from verl_shard import build_device_map, load_sharded
from verl_shard.common.errors import ConfigError, RunError
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime import offload
from verl_shard.runtime.verify import check_checkpointing, check_placement, misplaced


@pytest.fixture
def folder(small_config: Callable[..., Any], tmp_path: Path) -> Path:
    """A causal language model of the Qwen3 architecture with a tied head, in fp32."""
    config = small_config("qwen3", tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def _load(folder: Path, device_map: Any = "cpu", attn_implementation: str | None = "sdpa", **options: Any) -> Any:
    return load_sharded(folder, device_map, attn_implementation=attn_implementation, **options)


def test_it_computes_what_from_pretrained_computes(folder: Path) -> None:
    ids = torch.randint(3, 100, (2, 7))
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = _load(folder, dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert model.hf_device_map == {"": "cpu"}
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16), ("fp32", torch.float32)],
)
def test_weights_have_the_dtype_asked_for(given: Any, dtype: torch.dtype, folder: Path) -> None:
    model = _load(folder, dtype=given)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_balanced_without_a_gpu_is_the_cpu_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.warns(ShardNotice, match="torch sees no GPU here. Using the CPU instead"):
        model = _load(folder, "balanced")
    assert model.hf_device_map == {"": "cpu"}
    with pytest.raises(ConfigError, match='Write device_map="cpu", or leave strict out'):
        _load(folder, "balanced", strict=True)
    assert _load(folder, "balanced", devices=["cpu"], strict=True).hf_device_map == {"": "cpu"}


def test_a_map_of_many_names_is_applied(folder: Path) -> None:
    names = dict.fromkeys(build_device_map(str(folder), 2), "cpu")
    model = _load(folder, names, strict=True)
    assert model.hf_device_map == names
    assert misplaced(model, names) == []


@pytest.mark.parametrize(
    ("task", "cls", "n_labels"),
    [
        (None, "Qwen3ForCausalLM", 2),
        ("causal-lm", "Qwen3ForCausalLM", 2),
        ("value", "Qwen3ForTokenClassification", 1),
    ],
)
def test_the_task_picks_the_class(task: str | None, cls: str, n_labels: int, folder: Path) -> None:
    model = _load(folder, task=task, strict=True)
    assert (type(model).__name__, model.config.num_labels) == (cls, n_labels)


def test_a_reward_head_that_is_not_in_the_checkpoint_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.warns(ShardNotice, match=r"lack the reward head \(score\.weight\)"):
        model = _load(folder, task="reward")
    assert (type(model).__name__, model.score.out_features) == ("Qwen3ForSequenceClassification", 1)
    with pytest.raises(ConfigError, match="Give a checkpoint with a reward head"):
        _load(folder, task="reward", strict=True)

    trained = tmp_path / "trained"
    model.save_pretrained(trained)
    for task in ("reward", None):
        again = _load(trained, task=task, strict=True)
        torch.testing.assert_close(again.score.weight, model.score.weight)


def test_gradient_checkpointing_is_on_non_reentrant_and_changes_no_gradient(folder: Path) -> None:
    ids = torch.randint(3, 100, (2, 7))
    gradients = []
    for checkpointing in (False, True):
        model = _load(folder, dtype="fp32", gradient_checkpointing=checkpointing).train()
        assert model.is_gradient_checkpointing is checkpointing
        model(ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
    torch.testing.assert_close(*gradients)

    check_checkpointing(model)
    model.model.layers[1].gradient_checkpointing = False
    with pytest.raises(RunError, match=r"off in \['model\.layers\.1'\]"):
        check_checkpointing(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RunError, match="reentrant in"):
        check_checkpointing(model)


def test_checkpointing_that_the_architecture_lacks_is_refused_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="gradient_checkpointing = True: Qwen3ForCausalLM does not support it"):
        _load(folder, gradient_checkpointing=True)


def test_a_map_that_was_not_applied_is_found(folder: Path) -> None:
    model = _load(folder)
    with pytest.raises(RunError) as error:
        check_placement(model, {"": 0})
    assert "model.embed_tokens.weight is on cpu, and the map says GPU 0" in str(error.value)
    assert "more" in str(error.value)
    assert misplaced(model, {"model": "cpu"}) == ["lm_head.weight is on cpu, and the map does not name it"]
    model.model.norm.to("meta")
    assert misplaced(model, {"": "cpu"}) == ["model.norm.weight has no data (it is on meta), and the map says cpu"]


def test_an_offloaded_module_is_found(folder: Path) -> None:
    from accelerate import cpu_offload

    model = _load(folder)
    cpu_offload(model.model.norm, execution_device=torch.device("cpu"))
    assert "model.norm is offloaded" in misplaced(model, {"": "cpu"})


def test_a_given_config_is_used_and_not_changed(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    before = config.to_dict()
    model = _load(folder, task="value", config=config, trust_remote_code=True)
    assert config.to_dict() == before
    assert model.dropout.p == 0.0, "transformers' default of 0.1 would make values noisy in training"
    assert _load(folder, task="value", config=config, classifier_dropout=0.3).dropout.p == 0.3


def test_keywords_of_the_loader_and_of_the_configuration_arrive(folder: Path) -> None:
    model = _load(folder, use_safetensors=True, attention_dropout=0.25, num_labels=3, task="value")
    assert model.config.attention_dropout == 0.25
    assert model.score.out_features == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_dtype": torch.bfloat16}, "torch_dtype = torch.bfloat16: not taken here. Write dtype="),
        ({"load_in_4bit": True}, "quantization_config"),
        ({"offload_folder": "x"}, "load_sharded never offloads"),
        ({"atention_dropout": 0.1}, "Did you mean attention_dropout?"),
        ({"dtype": "bf17"}, 'dtype = bf17: .* Use one of "bfloat16"'),
        ({"autocast_dtype": "no"}, "autocast_dtype = no"),
        ({"task": "chat"}, "task = chat"),
        ({"attn_implementation": "flash"}, 'Use one of "flash_attention_2"'),
        ({"device_map": "auto"}, 'Write "balanced"'),
        ({"device_map": "gpu"}, 'Write "balanced", a map'),
        ({"device_map": -1}, "device_map = -1: not a device map"),
        ({"device_map": 0}, "names GPU 0, and torch sees 0 GPUs here"),
        ({"device_map": "cuda:7"}, "names GPU 7"),
        ({"device_map": "balanced", "devices": [0, 1]}, "names GPU 0, 1"),
        ({"device_map": "disk"}, "is offloaded"),
        ({"device_map": {"model": "cpu"}, "config": None}, None),
        ({"device_map": {"model.layers": "cpu"}}, "the map gives no device for 8.09 KiB of the model"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "is offloaded"),
        ({"max_memory": {0: "1GB"}}, "the device map cpu says already what goes where"),
        ({"embeddings_on_host": True}, r'embeddings_on_host = True: offload="none" streams nothing'),
        ({"pin_limit": "1GB", "offload": "cpu_offload"}, r'pin_limit = 1GB: offload="cpu_offload" pins nothing'),
        (
            {"embeddings_on_host": True, "offload": "stream"},
            r"lm_head computes with the weights of the input embedding",
        ),
        ({"devices": [0]}, "the device map cpu says already what goes where"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: dict[str, Any], message: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=message or "lm_head"):
        _load(folder, **options)


def test_a_model_is_offloaded_as_it_was_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the CPU, where offload_model would do nothing: what it is asked for is what counts."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(offload, "offload_model", lambda model, placed, **given: asked.append(given) or model)
    _load(folder, task="value", offload="stream", embeddings_on_host=True, pin_limit="1MiB")
    assert asked == [
        {"offload": "stream", "ahead": 2, "prefetch": True, "embeddings_on_host": True, "pin_limit": "1MiB"}
    ]


def test_all_unknown_keywords_come_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        _load(folder, torch_dtype="bf16", foo=1, low_cpu_mem_usage=True)
    assert [finding.where for finding in error.value.findings] == ["torch_dtype", "foo", "low_cpu_mem_usage"]


def test_weights_that_are_absent_damaged_or_of_another_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="holds the weights of this very model"):
        _load(folder, hidden_size=64)
    with pytest.raises(ConfigError, match=r"its weights lack model\.layers\.3\.input_layernorm\.weight.* and 6 more"):
        _load(folder, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError) as error:
        _load(folder)
    assert error.value.findings[0].code == "no-weights"
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
        _load(folder)
