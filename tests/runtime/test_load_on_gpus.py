"""load_sharded on real GPUs; skipped where there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from verl_shard import load_sharded
from verl_shard.common.errors import ConfigError

N_GPUS = torch.cuda.device_count()


@pytest.fixture
def folder(small_config: Callable[..., Any], tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = small_config("qwen3", tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.skipif(N_GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("device_map", [0, "cuda:0", "cuda", {"": 0}])
def test_one_gpu_by_all_its_names(device_map: Any, folder: Path) -> None:
    model = load_sharded(folder, device_map, attn_implementation="sdpa", strict=True)
    assert model.hf_device_map == {"": 0}
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda", 0)}
    said = "there is 1 GPU, numbered 0" if N_GPUS == 1 else f"there are {N_GPUS} GPUs, numbered 0 to {N_GPUS - 1}"
    with pytest.raises(ConfigError, match=said):
        load_sharded(folder, N_GPUS, attn_implementation="sdpa")


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("devices", [[0, 1], [1, 0]])
def test_balanced_over_two_gpus_computes_what_the_cpu_computes(devices: list[int], folder: Path) -> None:
    ids = torch.randint(3, 100, (2, 7))
    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": "fp32", "gradient_checkpointing": True}
    expected = load_sharded(folder, "cpu", **options).train()
    model = load_sharded(folder, "balanced", devices=devices, strict=True, **options).train()
    assert list(dict.fromkeys(model.hf_device_map.values())) == devices
    ours, theirs = model(ids.to(devices[0])).logits, expected(ids).logits
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-3)
    ours.sum().backward()
    theirs.sum().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-3, rtol=1e-3)
