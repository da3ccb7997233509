"""What is said when memory runs out: the module that was computing and the tensors that were there."""

from typing import Any

import pytest
import torch
from shapes import small_qwen2
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from verl_shard.runtime.oom_report import LiveTensor, largest_tensors, report_out_of_memory

IDS = torch.tensor([[3, 4, 5, 6, 7]])
SAID = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB of which 3.00 MiB is free."
)


def causal() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_qwen2(), attn_implementation="sdpa")


def failing_in(module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch allocates: inside of the module's forward."""

    def forward(self: Any, *_: Any, **__: Any) -> None:
        activation = torch.zeros(1000, 1000)  # noqa: F841 - what the frame holds
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(module, "forward", forward.__get__(module))


def test_the_innermost_module_and_what_its_frame_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal()
    failing_in(model.model.layers[2].mlp.up_proj, monkeypatch)
    try:
        model(input_ids=IDS)
    except torch.OutOfMemoryError as error:
        report = report_out_of_memory(error, model, "actor, train", planned=5 * 2**20)
    assert report.module == "model.layers.2.mlp.up_proj"
    assert LiveTensor("", (1000, 1000), "float32", "cpu", 4_000_000) in report.largest
    text = str(report)
    assert text.startswith("actor, train: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
    assert "which 3.00 MiB is free.\nComputing: model.layers.2.mlp.up_proj." in text
    assert "The plan expected at most 5.00 MiB in this pass." in text
    assert "3.81 MiB: [1000, 1000] float32 on cpu, a tensor that is no weight" in text
    assert report.to_dict()["largest"][0]["device"] == "cpu"


def test_outside_of_the_model() -> None:
    model = causal()
    try:
        raise torch.OutOfMemoryError(SAID)
    except torch.OutOfMemoryError as error:
        report = report_out_of_memory(error, model, "actor, train")
    assert report.module == ""
    assert "Computing: outside of the model." in str(report)
    assert "plan" not in str(report)


def test_weights_and_gradients_by_name_and_equal_ones_together() -> None:
    model = causal()
    model(input_ids=IDS, labels=IDS).loss.backward()
    owned = {kind.owner: kind for kind in largest_tensors(model, 10_000) if kind.owner}
    weight = model.lm_head.weight
    assert owned["lm_head.weight"].size == weight.numel() * 4 == owned["gradient of lm_head.weight"].size
    extra = [torch.zeros(777, 33) for _ in range(3)]
    views = [one[0] for one in extra]
    kinds = [kind for kind in largest_tensors(model, 10_000) if kind.shape == (777, 33)]
    assert kinds == [LiveTensor("", (777, 33), "float32", "cpu", 777 * 33 * 4, 3)]
    del views


def test_fake_tensors_take_no_memory() -> None:
    """Estimates of the same process leave some; they say "cpu" and are nowhere."""
    with FakeTensorMode():
        fake = torch.zeros(778, 34)
    assert fake.device == torch.device("cpu")
    assert not [kind for kind in largest_tensors(causal(), 10_000) if kind.shape == (778, 34)]
