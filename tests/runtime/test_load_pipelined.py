"""load_sharded over several devices that the host plays: laid out as dispatch_model does it, and useful as any model."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from runtime.fake_links import FakeLinks
from shapes import small_qwen2

from verl_shard.runtime import load as module
from verl_shard.runtime.load import load_sharded
from verl_shard.runtime.pipeline import dispatch_model, pipeline_of
from verl_shard.runtime.stream_hooks import hooks_of

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
TWO = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
TWO |= {f"model.layers.{i}": int(i >= 2) for i in range(4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(small_qwen2()).save_pretrained(path)
    return path


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> FakeLinks:
    """Two devices: weights are read onto the host, with accelerate's hooks on it, and laid out from there."""
    links, read = FakeLinks(), module._read_weights

    def on_host(cls: Any, spec: Any, arguments: dict[str, Any]) -> Any:
        model, missing = read(cls, spec, {**arguments, "device_map": {"": "cpu"}})
        import accelerate

        return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True), missing

    monkeypatch.setattr(module, "_read_weights", on_host)
    monkeypatch.setattr(module, "check_placement", lambda *_: None)
    monkeypatch.setattr(module, "dispatch_model", functools.partial(dispatch_model, links=links))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return links


def _load(folder: Path, device_map: Any = TWO, **options: Any) -> Any:
    return load_sharded(folder, device_map, dtype="float32", attn_implementation="sdpa", **options)


def _plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_map_over_several_devices_is_a_pipeline(folder: Path, links: FakeLinks) -> None:
    model = _load(folder, gradient_checkpointing=True).train()
    hooks = [hook for part in model.modules() for hook in hooks_of(part)]
    assert not any(isinstance(hook, AlignDevicesHook) for hook in hooks)
    pipe = pipeline_of(model)
    assert pipe is not None
    assert pipe.devices == ("gpu0", "gpu1")
    assert model.hf_device_map == TWO
    with links:
        output = model(input_ids=IDS, labels=IDS, use_cache=False)
        assert links.of(output.logits) == "gpu1"
        forward = Counter(links.copies)
        output.loss.backward()
    # The hidden states once, the cosines and sines once each: not once for each layer.
    assert {shape: n for (a, b, shape), n in forward.items() if (a, b) == ("gpu0", "gpu1")} == {
        (2, 5, 64): 1, (1, 5, 16): 2,
    }  # fmt: skip
    plain = _plain(folder).train()
    plain(input_ids=IDS, labels=IDS).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-6


def test_balanced_is_a_pipeline_and_one_device_has_no_hooks_of_ours(folder: Path, links: FakeLinks) -> None:
    pipe = pipeline_of(_load(folder, "balanced", devices=[1, 0]))
    assert pipe is not None
    assert pipe.devices == ("gpu1", "gpu0")
    assert pipeline_of(_load(folder, {"": 1})) is None


def test_generation_saving_adapters_and_undoing(folder: Path, links: FakeLinks, tmp_path: Path) -> None:
    model, plain = _load(folder), _plain(folder)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with links:
        made = model.generate(IDS, **options)
    assert made.tolist() == plain.generate(IDS, **options).tolist()
    model.save_pretrained(tmp_path / "saved")
    for name, weight in _plain(tmp_path / "saved").state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    state = {name: weight + 1 for name, weight in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)
    with links, torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=True))
    assert pipeline_of(peft) is pipeline_of(model)
    torch.testing.assert_close(peft(input_ids=IDS).logits, plain(input_ids=IDS).logits)  # adapters begin with nothing
    remove_hook_from_module(model, recurse=True)  # accelerate cannot begin at the adapters' wrapper
    assert pipeline_of(peft) is None
    torch.testing.assert_close(peft(input_ids=IDS).logits, plain(input_ids=IDS).logits)
