"""Flash attention: each reason for which it cannot run is found, said once, and raised when strict."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from verl_shard import load_sharded
from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime.attention import choose_attention, head_sizes, why_not_flash_attention


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with flash-attn and one A100."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("torch" if name == "flash_attn" else name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device == 0 else (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


def _why(
    config: Any, dtype: torch.dtype = torch.bfloat16, devices: tuple[Any, ...] = (0,), **options: Any
) -> str | None:
    return why_not_flash_attention(config, dtype=dtype, devices=devices, **options)


@pytest.mark.usefixtures("ampere")
def test_it_runs_where_nothing_speaks_against_it(small_config: Callable[..., Any]) -> None:
    config = small_config("qwen3")
    assert _why(config, model_class=transformers.Qwen3ForCausalLM) is None
    assert _why(config, torch.float32, autocast_dtype=torch.bfloat16) is None
    assert choose_attention("flash_attention_2", config, dtype=torch.float16, devices=[0]) == "flash_attention_2"


@pytest.mark.usefixtures("ampere")
def test_each_reason(small_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("qwen3")
    assert _why(config, devices=(0, 1)) == "GPU 1 (Tesla T4) has compute capability 7.5, and it needs 8.0"
    assert _why(config, devices=("cpu",)) == "it runs on CUDA GPUs only, and the model is mapped to the CPU"
    assert (
        _why(small_config("qwen3", head_dim=264))
        == "heads have 264 dimensions (head_dim), and its kernels take at most 256"
    )
    assert (
        _why(small_config("qwen3", head_dim=20))
        == "heads have 20 dimensions (head_dim), and its kernels take multiples of 8"
    )
    assert _why(config, torch.float32) == "weights are float32 without autocast, and it takes float16 or bfloat16"
    assert _why(config, torch.float32, autocast_dtype=torch.float32) is not None
    assert _why(config, model_class=transformers.BloomForCausalLM) == "BloomForCausalLM does not support it"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _why(config) == "torch sees no CUDA GPU here"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _why(config) == 'the package flash_attn is not installed (pip install "verl_shard[flash-attn]")'


def test_head_sizes_are_read_under_every_name(small_config: Callable[..., Any]) -> None:
    assert head_sizes(small_config("qwen3")) == {"head_dim": 8}
    assert head_sizes(small_config("gpt2")) == {"hidden_size / num_attention_heads": 8}
    assert head_sizes(small_config("deepseek_v3"))["qk_head_dim"] == 16


@pytest.mark.parametrize(("cls", "used"), [("Qwen3ForCausalLM", "sdpa"), ("BloomForCausalLM", "eager")])
def test_what_stands_in_is_what_the_architecture_has(cls: str, used: str, small_config: Callable[..., Any]) -> None:
    model_class = getattr(transformers, cls)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "devices": ["cpu"], "model_class": model_class}
    with pytest.warns(ShardNotice, match=f"flash_attention_2: .* Using {used} instead"):
        assert choose_attention("flash_attention_2", small_config("qwen3"), **options) == used
    with pytest.raises(ConfigError, match=f'Ask for attn_implementation="{used}"'):
        choose_attention("flash_attention_2", small_config("qwen3"), strict=True, **options)
    assert choose_attention(None, small_config("qwen3"), **options) == used


def test_sdpa_that_the_architecture_lacks_and_names_that_are_none(small_config: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "devices": ["cpu"]}
    with pytest.warns(ShardNotice, match="BloomForCausalLM does not support it. Using eager instead"):
        choose_attention("sdpa", small_config("bloom"), model_class=transformers.BloomForCausalLM, **options)
    with pytest.raises(ConfigError, match='Use one of "flash_attention_2", "sdpa", "eager"'):
        choose_attention("fast", small_config("qwen3"), **options)
    assert choose_attention("owner/kernel", small_config("qwen3"), **options) == "owner/kernel"


def test_a_load_says_it_once_and_uses_what_it_says(small_config: Callable[..., Any], tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(small_config("qwen3")).save_pretrained(tmp_path)
    with pytest.warns(ShardNotice, match="attn_implementation = flash_attention_2") as said:
        model = load_sharded(tmp_path, "cpu")
    assert len(said) == 1
    assert model.config._attn_implementation == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_sharded(tmp_path, "cpu")
    with pytest.raises(ConfigError, match="attn_implementation = flash_attention_2"):
        load_sharded(tmp_path, "cpu", strict=True)
