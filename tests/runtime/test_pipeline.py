"""A model over several devices: what travels, when, and that gradients are those of one device."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from runtime.fake_links import FakeLinks
from shapes import small_qwen2
from torch import nn

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.runtime.offload import offload_model
from verl_shard.runtime.pipeline import _check_plain, dispatch_model, pipeline_of
from verl_shard.runtime.pipeline_hooks import Travels
from verl_shard.runtime.pipeline_links import GpuLinks, carry
from verl_shard.runtime.stream_hooks import hooks_of

N_GPUS = torch.cuda.device_count()
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])


def causal(**fields: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_qwen2(**fields), attn_implementation="sdpa")


def two_stages(head: str = "lm_head", cut: int = 2, head_on: int = 1) -> dict[str, int]:
    first = {"model.embed_tokens": 0, "model.rotary_emb": 0}
    return first | {f"model.layers.{i}": int(i >= cut) for i in range(4)} | {"model.norm": 1, head: head_on}


def worst(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of gradients."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)  # type: ignore[operator]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_tensor_travels_once_and_gradients_are_those_of_one_device(checkpointing: bool) -> None:
    one, model = causal(), causal()
    links = FakeLinks()
    assert dispatch_model(model, two_stages(), links=links) is model
    if checkpointing:
        for each in (one, model):
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            each.train()
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS, "use_cache": False}
    with links:
        loss = model(**batch).loss
        there = Counter(links.copies)
        loss.backward()
    # Of 4 layers 2 are on GPU 1: the hidden states (2 x 5 x 64), the cosines and sines (5 x 16 each), the mask once; not
    # once for each layer. Labels go straight to where the loss is.
    assert {key: n for key, n in there.items() if key[:2] == ("gpu0", "gpu1")} == {
        ("gpu0", "gpu1", (2, 5, 64)): 1,
        ("gpu0", "gpu1", (1, 5, 16)): 2,
        ("gpu0", "gpu1", (2, 1, 5, 5)): 1,
    }
    assert there["host", "gpu1", (2, 5)] == 1
    # The backward brings one gradient, and copies nothing again for what it computes again.
    assert Counter(links.copies) - there == Counter({("gpu1", "gpu0", (2, 5, 64)): 1})
    plain = one(**batch).loss
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), abs=1e-6)
    assert worst(model, one) < 1e-6


@pytest.mark.parametrize("norm_on", [0, 1])
def test_logits_to_keep_goes_to_what_it_is_cut_out_of(norm_on: int) -> None:
    """Which is what the head is given, where that is made."""
    model, links, keep = causal(), FakeLinks(), torch.tensor([1, 3])
    dispatch_model(model, two_stages() | {"model.norm": norm_on}, links=links)
    with links:
        logits = model(input_ids=IDS, use_cache=False, logits_to_keep=keep).logits
    assert links.of(logits) == "gpu1"
    assert [key for key in links.copies if key[2] == (2,)] == [("host", f"gpu{norm_on}", (2,))]
    assert torch.allclose(logits, causal()(input_ids=IDS, use_cache=False).logits[:, keep], atol=1e-6)


def test_the_rig_sees_two_devices_in_one_operation_and_what_has_not_arrived() -> None:
    links = FakeLinks()
    a, b = links.give(torch.ones(2), "gpu0"), links.give(torch.ones(2), "gpu1")
    with links:
        assert links.of(a * 2) == "gpu0"
        with pytest.raises(AssertionError, match="reads tensors of"):
            a + b
        parcel = links.start(a, "gpu1")
        assert parcel.tensor.isnan().all()
        assert links.arrive(parcel).tolist() == [1, 1]


def test_weights_are_where_the_map_says_and_there_is_an_order_of_devices() -> None:
    model, links = causal(), FakeLinks()
    dispatch_model(model, {name: 1 - device for name, device in two_stages().items()}, links=links)
    assert links.of(model.model.embed_tokens.weight) == "gpu1"
    assert links.of(model.model.rotary_emb.inv_freq) == "gpu1"
    assert {links.of(p) for p in model.model.layers[2].parameters()} == {"gpu0"}
    pipe = pipeline_of(model)
    assert pipe is not None
    assert pipe.devices == ("gpu1", "gpu0")
    assert model.hf_device_map["model.layers.3"] == 0


@pytest.mark.parametrize(("asked", "found"), [("last", "gpu1"), ("first", "gpu0"), (0, "gpu0"), ("cuda:1", "gpu1")])
def test_outputs_stay_or_go_where_they_are_asked_for(asked: Any, found: str) -> None:
    model, links = causal(), FakeLinks()
    dispatch_model(model, two_stages(), output_device=asked, links=links)
    with links:
        output = model(input_ids=IDS, use_cache=False)
        assert type(output).__name__ == "CausalLMOutputWithPast"
        assert links.of(output.logits) == found
        output.logits.square().mean().backward()
    one = causal()
    one(input_ids=IDS).logits.square().mean().backward()
    assert worst(model, one) < 1e-6


def test_ties_stay_ties_and_may_not_be_torn() -> None:
    model, links = causal(tie_word_embeddings=True), FakeLinks()
    with pytest.raises(ConfigError, match="one tensor, and the map puts it on GPU 0 and GPU 1"):
        dispatch_model(model, two_stages(), links=links)
    assert not hooks_of(model)
    dispatch_model(model, two_stages(head_on=0), links=links)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with links:
        output = model(input_ids=IDS, labels=IDS, use_cache=False)
        assert links.of(output.logits) == links.of(output.loss) == "gpu0"
        output.loss.backward()
    one = causal(tie_word_embeddings=True)
    one(input_ids=IDS, labels=IDS).loss.backward()
    assert worst(model, one) < 1e-6


def test_a_classifier_pools_where_its_scores_are() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = small_qwen2(num_labels=1, pad_token_id=0)
        return transformers.AutoModelForSequenceClassification.from_config(config).eval()

    model, links = make(), FakeLinks()
    dispatch_model(model, two_stages("score"), links=links)
    ids = links.give(torch.tensor([[3, 4, 5, 0, 0], [8, 9, 10, 11, 12]]), "gpu0")
    with torch.no_grad(), links:
        logits = model(input_ids=ids, attention_mask=ids != 0).logits
        assert links.of(logits) == "gpu1"
    # The ids went to the scores once, and from there not back: the body has those that were given.
    assert Counter(links.copies)["gpu0", "gpu1", (2, 5)] == 2
    assert not [copy for copy in links.copies if copy[:2] == ("gpu1", "gpu0")]
    torch.testing.assert_close(logits, make()(input_ids=ids, attention_mask=ids != 0).logits)


def test_accelerates_hooks_are_replaced_and_ours_are_taken_away() -> None:
    model = causal()
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert any(isinstance(hook, AlignDevicesHook) for module in model.modules() for hook in hooks_of(module))
    links = FakeLinks()
    dispatch_model(model, two_stages(), links=links)
    dispatch_model(model, two_stages(cut=3), links=links)
    assert not any(isinstance(hook, AlignDevicesHook) for module in model.modules() for hook in hooks_of(module))
    # Embedding, rotations, 4 layers, norm and head; the body; the whole.
    assert sum(len(hooks_of(module)) for module in model.modules()) == 10
    model.to(torch.float32)
    with pytest.raises(ConfigError, match="on several devices"):
        model.to("cpu")
    with pytest.raises(ConfigError, match="on several devices"):
        model.cuda()
    remove_hook_from_module(model, recurse=True)
    assert pipeline_of(model) is None
    assert not any("forward" in vars(m) and hasattr(m, "_old_forward") for m in model.modules())
    torch.testing.assert_close(model.to("cpu")(input_ids=IDS).logits, causal()(input_ids=IDS).logits)


def test_one_device_has_no_hooks_unless_they_are_forced() -> None:
    model = causal()
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    dispatch_model(model, {"": "cpu"})
    assert not any(hooks_of(module) for module in model.modules())
    assert model.hf_device_map == {"": "cpu"}
    links = FakeLinks()
    dispatch_model(model, {"": 0}, force_hooks=True, links=links)
    with links:
        assert links.of(model(input_ids=IDS).logits) == "gpu0"


def test_generation_adapters_and_saving_go_on_working(tmp_path: Path) -> None:
    model, links = causal().eval(), FakeLinks()
    dispatch_model(model, two_stages(), links=links)
    with links:
        made = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.tolist() == causal().eval().generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again.lm_head.weight, model.lm_head.weight)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))

    peft, one = adapted(model), adapted(causal().eval())
    for name, parameter in peft.named_parameters():
        if "lora" in name:
            links.give(parameter, f"gpu{int('layers.2' in name or 'layers.3' in name)}")
    pipe = pipeline_of(peft)
    assert pipe is not None
    with links:
        peft(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    one(input_ids=IDS, labels=IDS).loss.backward()
    for (name, a), b in zip(peft.named_parameters(), one.parameters(), strict=True):
        assert (a.grad is None) == ("lora" not in name)
        if a.grad is not None and b.grad is not None:
            assert (a.grad - b.grad).abs().max() < 1e-6


def test_what_cannot_be_meant_is_refused_all_at_once() -> None:
    model = causal()
    bad = two_stages() | {"model.nothing": 0}
    with pytest.raises(ConfigError) as caught:
        dispatch_model(model, bad, output_device="middle", offload_dir="here", state_dict={}, links=FakeLinks())
    assert [finding.code for finding in caught.value.findings] == [
        "offload-argument",
        "offload-argument",
        "unknown-name",
        "not-a-device",
    ]
    for given, code in ((two_stages() | {"lm_head": "cpu"}, "offloaded"), ("balanced", "not-a-device-map")):
        with pytest.raises(ConfigError) as caught:
            dispatch_model(model, given, links=FakeLinks())  # type: ignore[arg-type]
        assert caught.value.findings[0].code == code
    with pytest.raises(ConfigError, match="inputs go where the input embedding is, on 0"):
        dispatch_model(model, two_stages(), main_device=1, links=FakeLinks())
    with pytest.raises(ConfigError, match="on meta"):
        dispatch_model(causal().to("meta"), two_stages(), links=FakeLinks())
    assert not any(hooks_of(module) for module in model.modules())
    if N_GPUS < 2:
        with pytest.raises(ConfigError, match=r"torch sees \d GPUs here|there (is|are) \d GPU"):
            dispatch_model(model, two_stages())


def test_a_weight_that_is_no_plain_tensor_stays_or_is_refused() -> None:
    class Quantized(nn.Parameter):
        pass

    model = causal()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = Quantized(layer.weight.data)
    dispatch_model(model, {"": "cpu"})
    layer.weight = Quantized(layer.weight.data)
    with pytest.raises(ConfigError, match="is a Quantized on cpu"):
        _check_plain(model, {"": 0})


@pytest.mark.skipif(N_GPUS < 1, reason="needs a GPU")
def test_a_gradient_moves_with_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    GpuLinks().place(parameter, torch.device("cuda", 0))
    assert parameter.grad is not None
    assert (parameter.device.type, parameter.grad.device.type) == ("cuda", "cuda")


def test_an_offloaded_model_is_refused() -> None:
    model = causal().requires_grad_(False)
    accelerate.cpu_offload(model, "cpu")
    with pytest.raises(ConfigError, match="its weights are offloaded"):
        dispatch_model(model, two_stages(), links=FakeLinks())
    remove_hook_from_module(model, recurse=True)
    dispatch_model(model, two_stages(), links=FakeLinks())
    if not torch.cuda.is_available():  # GPUs 0 and 1 are fakes
        with pytest.raises(ConfigError):
            offload_model(model)


def test_a_freed_tensor_is_never_taken_for_another() -> None:
    links = FakeLinks()
    travels = Travels(links)
    with travels.forward_pass():
        for number in range(50):
            assert travels.move(links.give(torch.full((3,), float(number)), "gpu0"), "gpu1").tolist() == [number] * 3
            gc.collect()
    assert len(links.copies) == 50
    for number in range(50):  # outside of a pass too, with gradients, where copies are kept for what runs again
        made = links.give(torch.full((3,), float(number), requires_grad=True), "gpu0")
        assert travels.move(made, "gpu1").tolist() == [number] * 3
        del made
    assert len(travels._kept) == 0


def test_a_copy_is_remembered_while_it_is_what_it_was() -> None:
    links = FakeLinks()
    travels = Travels(links)
    source = links.give(torch.ones(3), "gpu0")
    with travels.forward_pass():
        first = travels.move(source, "gpu1")
        with travels.forward_pass():  # the model calls itself
            assert travels.move(source, "gpu1") is first
        assert travels.move(first, "gpu0") is source
        source += 1
        assert travels.move(source, "gpu1").tolist() == [2, 2, 2]
        assert travels.move(source, "gpu0") is source
    with pytest.raises(RuntimeError, match="broken"), travels.forward_pass():
        raise RuntimeError("broken")
    with travels.forward_pass():
        assert travels.move(source, "gpu1") is not first
    assert [copy[:2] for copy in links.copies] == [("gpu0", "gpu1")] * 3
    with torch.inference_mode(), travels.forward_pass():
        made = links.give(torch.ones(2), "gpu0")
        assert travels.move(made, "gpu1") is travels.move(made, "gpu1")


def test_a_copy_made_without_gradients_is_not_used_with_them() -> None:
    links = FakeLinks()
    travels = Travels(links)
    source = links.give(torch.ones(3, requires_grad=True), "gpu0")
    with travels.forward_pass():
        with torch.no_grad():
            assert not travels.move(source, "gpu1").requires_grad
        (travels.move(source, "gpu1") * 3).sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [3, 3, 3]


def test_structures_are_kept_and_left_alone_when_nothing_travels() -> None:
    links = FakeLinks()
    travels = Travels(links)
    tensor = links.give(torch.ones(1), "gpu0")
    cache = transformers.DynamicCache()
    value = {"a": (tensor, None), "b": [cache, 3], "skipped": tensor}
    with travels.forward_pass():
        assert travels.move_all(value, "gpu0") is value
        moved = travels.move_all(value, "gpu1", {"skipped"})
    assert links.of(moved["a"][0]) == "gpu1"
    assert moved["b"][0] is cache
    assert moved["skipped"] is tensor


def test_a_gradient_goes_back_as_often_as_a_graph_is_gone_through_and_not_twice_through() -> None:
    links = FakeLinks()
    source = links.give(torch.tensor([1.0, 2.0], requires_grad=True), "gpu0")
    copy = carry(links, source, "gpu1")
    with links:
        loss = (copy**2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert source.grad is not None
    assert source.grad.tolist() == [4, 8]
    assert links.copies == [("gpu0", "gpu1", (2,))] + [("gpu1", "gpu0", (2,))] * 2
    with pytest.raises(RunError, match="Gradients of gradients"):
        torch.autograd.grad((carry(links, source, "gpu1") ** 2).sum(), source, create_graph=True)


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_two_gpus(checkpointing: bool) -> None:
    one, model = causal().to("cuda:0"), causal()
    dispatch_model(model, two_stages())
    assert model.lm_head.weight.device == torch.device("cuda", 1)
    for each in (one, model):
        if checkpointing:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.train()
        for _ in range(3):
            each(input_ids=IDS.to("cuda:0"), labels=IDS.to("cuda:0"), use_cache=False).loss.backward()
    for a, b in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a.grad.to("cuda:0"), b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
def test_a_loaded_model_is_dispatched_anew(tmp_path: Path, small_config: Callable[..., Any]) -> None:
    from verl_shard import load_sharded

    causal().save_pretrained(tmp_path)
    model = load_sharded(tmp_path, two_stages(), dtype="float32", attn_implementation="sdpa")
    dispatch_model(model, model.hf_device_map)
    assert pipeline_of(model) is not None
    logits = model(input_ids=IDS).logits
    assert logits.device == torch.device("cuda", 1)
    torch.testing.assert_close(logits.cpu(), causal()(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
