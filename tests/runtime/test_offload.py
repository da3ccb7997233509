"""offload_model: what is done with which words, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model
from accelerate.hooks import AlignDevicesHook, CpuOffload, remove_hook_from_module
from runtime.fake_copies import FakeCopies
from torch import nn

from verl_shard import offload_model
from verl_shard.common.errors import ConfigError, DoesNotFitError
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime import offload
from verl_shard.runtime.dispatch import input_device
from verl_shard.runtime.offload import offload_of, undo_offload
from verl_shard.runtime.offload_choice import Share
from verl_shard.runtime.stream_model import shares_of, stream_model


@pytest.fixture
def model(small_config: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    config = small_config("qwen2", num_labels=1)
    made = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    return made.requires_grad_(False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two GPUs that compute on the CPU."""
    FakeCopies.made.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(offload, "stream_model", partial(stream_model, copies=FakeCopies))
    monkeypatch.setattr(offload, "torch_device", lambda device: torch.device("cpu"))
    yield
    FakeCopies.made.clear()


def _ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("gpus")
def test_stream_is_the_default_and_two_calls_undo_it(model: Any) -> None:
    expected = model(input_ids=_ids()).logits
    assert offload_of(model) is None
    assert offload_model(model, "cuda:0") is model
    told = offload_of(model)
    assert told is not None
    assert (told.how, told.why, told.pageable_bytes) == ("stream", "it was asked for", 0)
    assert told.pinned_bytes == FakeCopies.made[0].pinned > 0
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    told.release()
    with pytest.raises(ConfigError, match="its blocks are streamed already"):
        offload_model(model, 0)
    remove_hook_from_module(model, recurse=True)
    assert offload_of(model) is None
    offload_model(model, 0, embeddings_on_host=True, prefetch=True, ahead=3)
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    assert undo_offload(undo_offload(model)) is model
    assert offload_of(model) is None
    assert torch.equal(model(input_ids=_ids()).logits, expected)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("how", ["cpu_offload", "cpu_offload_with_hook"])
def test_the_middle_two_are_accelerates(how: str, model: Any) -> None:
    expected = model(input_ids=_ids()).logits
    offload_model(model, 0, offload=how)
    told = offload_of(model)
    assert told is not None
    assert told.how == how
    hook = model.model.embed_tokens._hf_hook if how == "cpu_offload" else model._hf_hook
    assert isinstance(hook, AlignDevicesHook if how == "cpu_offload" else CpuOffload)
    if how == "cpu_offload":
        assert hook.offload_buffers
        assert model.score.weight.device.type == "meta"
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    told.release()
    with pytest.raises(ConfigError, match="accelerate has offloaded it already"):
        offload_model(model, 0)
    undo_offload(model)
    assert offload_of(model) is None
    assert torch.equal(model(input_ids=_ids()).logits, expected)


@pytest.mark.usefixtures("gpus")
def test_buffers_that_are_read_from_outside_of_their_module_stay(small_config: Callable[..., Any]) -> None:
    """DeepSeek-V3's blocks read their router's correction after its forward, when accelerate has it on meta again."""
    torch.manual_seed(0)
    config = small_config("deepseek_v3", num_labels=1)
    made = transformers.AutoModelForSequenceClassification.from_config(config).eval().requires_grad_(False)
    gate = made.model.layers[1].mlp.gate
    gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.5, 0.0, -0.5]))
    expected = made(input_ids=_ids()).logits
    cpu_offload(made, torch.device("cpu"), offload_buffers=True)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):  # accelerate's own
        made(input_ids=_ids())
    remove_hook_from_module(made, recurse=True)
    offload_model(made, 0, offload="cpu_offload")
    assert gate.e_score_correction_bias.tolist() == [0.0, 0.5, 0.0, -0.5]
    assert gate.weight.device.type == "meta"
    for _ in range(2):
        assert torch.equal(made(input_ids=_ids()).logits, expected)
    undo_offload(made)
    assert torch.equal(made(input_ids=_ids()).logits, expected)
    assert {t.device.type for t in (*made.parameters(), *made.buffers())} == {"cpu"}


@pytest.mark.usefixtures("gpus")
def test_large_buffers_leave_with_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = (
        nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    )  # 16 and 24 bytes of buffers
    small = nn.Sequential(nn.Linear(1, 1), norms).requires_grad_(False)
    monkeypatch.setattr(offload, "LARGE_BUFFER", 17)
    offload_model(small, 0, offload="cpu_offload")
    assert {name: tensor.device.type for name, tensor in norms.named_buffers() if "mean" in name} == {
        "0.running_mean": "cpu", "1.running_mean": "meta",
    }  # fmt: skip


@pytest.mark.parametrize("how", ["stream", "cpu_offload", "cpu_offload_with_hook", "auto"])
@pytest.mark.parametrize("device", ["cpu", None, {"": "cpu"}])
def test_on_the_cpu_nothing_is_done_which_is_said(
    how: str, device: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(ShardNotice, match="it computes on the CPU.*Using the model as it is"):
        assert offload_model(model, device, offload=how) is model
    assert not hasattr(model, "_hf_hook")
    told = offload_of(model)
    assert told is not None
    assert told.how == "none"
    told.release()
    undo_offload(model)


@pytest.mark.usefixtures("gpus")
def test_none_leaves_everything_on_its_device(model: Any) -> None:
    offload_model(model, 0, offload="none")
    assert not hasattr(model, "_hf_hook")
    assert offload_of(model).how == "none"  # type: ignore[union-attr]


LAYERS = {"model.embed_tokens": 0, "model.layers.0": 0, "model": 1, "score": 1}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("before", [None, {"": "cpu"}])
@pytest.mark.parametrize(
    ("how", "given", "placed"),
    [
        *[(how, "cuda:1", {"": 1}) for how in ("stream", "cpu_offload", "cpu_offload_with_hook", "none", "auto")],
        ("stream", LAYERS, LAYERS),
        ("stream", {"": "cuda:0"}, {"": 0}),
    ],
)
def test_the_model_says_where_it_computes_and_afterwards_what_it_said_before(
    how: str, given: Any, placed: dict[str, int], before: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is not None:
        model.hf_device_map = dict(before)
    if how == "auto":
        monkeypatch.setattr(offload, "_shares", lambda *_: [Share("cuda:0", 10, 9, 3, 0, 1, 5)])
    offload_model(model, given, offload=how)
    assert model.hf_device_map == placed
    assert input_device(model) == torch.device("cpu" if how == "none" else f"cuda:{next(iter(placed.values()))}")
    undo_offload(model)
    after = before if how != "none" or before is None else placed  # "none" has moved it for good
    assert getattr(model, "hf_device_map", None) == after
    assert input_device(model) == torch.device("cpu")


@pytest.mark.usefixtures("gpus")
def test_what_accelerate_undoes_is_no_map_of_the_next_call(model: Any) -> None:
    offload_model(model, LAYERS)
    remove_hook_from_module(model, recurse=True)
    assert input_device(model) == torch.device("cpu")
    offload_model(model, 1)  # and not "dispatched over 2 GPUs already"
    assert model.hf_device_map == {"": 1}
    remove_hook_from_module(model, recurse=True)
    undo_offload(model)
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize(("map_before", "after"), [(None, {"": "cpu"}), ({"": 0}, {"": "cpu"})])
def test_a_model_on_the_cpu_says_so(map_before: Any, after: Any, model: Any) -> None:
    if map_before is not None:
        model.hf_device_map = map_before
    offload_model(model, "cpu", offload="none")
    assert model.hf_device_map == after
    assert input_device(model) == torch.device("cpu")


def test_the_device_is_the_models_or_the_one_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert offload._placement(model, None) == {"": 3}
    assert offload._placement(model, "cuda") == {"": 3}
    assert offload._placement(model, "cuda:1") == {"": 1}
    assert offload._placement(model, torch.device("cuda", 2)) == {"": 2}
    model.hf_device_map = {"model": 0, "score": 1}
    assert offload._placement(model, None) == {"model": 0, "score": 1}
    with pytest.raises(ConfigError, match="dispatched over 2 GPUs already"):
        offload._placement(model, 0)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (lambda m: m.score.requires_grad_(True), {}, r"1 of its tensors are trained \(score\.weight is one\)"),
        (lambda m: m.score.to("meta"), {}, r"score\.weight has no data"),
        (lambda m: cpu_offload(m, torch.device("cpu")), {}, "accelerate has offloaded it already"),
        (lambda m: cpu_offload_with_hook(m, torch.device("cpu")), {}, "accelerate has offloaded it already"),
        (lambda m: setattr(m, "hf_device_map", {"model": 0, "score": "cpu"}), {}, "accelerate keeps score on cpu"),
        (lambda m: setattr(m.score, "weight", _Packed(m.score.weight)), {}, r"score\.weight is no plain tensor"),
        (None, {"offload": "strem"}, "Use one of stream, cpu_offload, cpu_offload_with_hook, none, auto"),
        (None, {"ahead": 0}, "streaming needs a buffer to copy into"),
        (None, {"pin_limit": "much"}, "pin_limit = much: not a number of bytes"),
        (None, {"offload": "cpu_offload", "pin_limit": 9}, r'pin_limit = 9: offload="cpu_offload" pins nothing'),
        (None, {"offload": "none", "embeddings_on_host": True}, r'embeddings_on_host = True: offload="none" streams nothing'),
        (None, {"offload": "auto", "embeddings_on_host": True}, "auto leaves the embedding on the host where that is needed"),
        (None, {"embeddings_on_host": "yes"}, "embeddings_on_host = yes: not True or False"),
        (None, {"head_room": "-1"}, "head_room = -1: not a number of bytes"),
        (None, {"execution_device": "disk"}, "nothing computes there"),
        (None, {"execution_device": "gpu"}, "not a device"),
        (None, {"execution_device": 2}, "torch sees 2 GPUs here"),
        (None, {"execution_device": {"model": 0, "score": "cpu"}}, "what a map puts on the CPU or disk is not streamed"),
        (None, {"execution_device": {"model": 0}}, r"it gives no device for score\.weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_offloaded_is_refused(
    spoil: Callable[[Any], object] | None, options: dict[str, Any], message: str, model: Any
) -> None:
    if spoil is not None:
        spoil(model)
    with pytest.raises(ConfigError, match=message):
        offload_model(model, **{"execution_device": 0, **options})


class _Packed(nn.Parameter):
    """As a quantized weight of bitsandbytes: a parameter that carries more."""

    def __new__(cls, data: torch.Tensor) -> _Packed:
        return torch.Tensor._make_subclass(cls, data.detach(), False)  # type: ignore[return-value]


@pytest.mark.usefixtures("gpus")
def test_all_faults_are_said_at_once(model: Any) -> None:
    model.score.requires_grad_(True)
    with pytest.raises(ConfigError) as caught:
        offload_model(model, "gpu", offload="stream", ahead=0, pin_limit="x", head_room="y")
    assert [finding.code for finding in caught.value.findings] == [
        "ahead", "trainable", "not-a-memory-size", "not-a-memory-size", "not-a-device",
    ]  # fmt: skip


@pytest.mark.usefixtures("gpus")
def test_a_model_without_blocks_is_not_streamed_and_goes_other_ways() -> None:
    linear = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(ConfigError, match="no list of blocks was found"):
        offload_model(linear, 0)
    offload_model(linear, 0, offload="cpu_offload")
    assert linear(torch.ones(1, 3)).shape == (1, 3)


@pytest.mark.usefixtures("gpus")
def test_accelerates_ways_take_one_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "torch_device", lambda device: torch.device("cuda", device))
    with pytest.raises(ConfigError, match="computes on one device"):
        offload_model(model, {"model": 0, "score": 1}, offload="cpu_offload")


@pytest.mark.usefixtures("gpus")
def test_auto_takes_what_fits_and_says_why(model: Any) -> None:
    expected = model(input_ids=_ids()).logits
    ((share, held),) = shares_of(model, {"": torch.device("cpu")})
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    assert share.weights == held == sum(t.numel() * t.element_size() for t in tensors)
    assert share.embedding == 128 * 32 * 4
    assert share.blocks == 3 * share.largest_block == sum(p.numel() * 4 for p in model.model.layers.parameters())
    assert share.largest_module == share.embedding
    for room, how, on_host in (
        (share.weights, "none", None),
        (share.weights - 1, "stream", False),
        (share.weights - share.largest_block, "stream", False),
        (share.weights - share.largest_block - 1, "stream", True),
    ):
        offload_model(model, 0, offload="auto", head_room=room)
        told = offload_of(model)
        assert told is not None
        assert (told.how, "embedding on the host" in told.why) == (how, bool(on_host))
        assert torch.equal(model(input_ids=_ids()).logits, expected)
        undo_offload(model)
    with pytest.raises(DoesNotFitError):
        offload_model(model, 0, offload="auto", head_room=10)


@pytest.mark.usefixtures("gpus")
def test_auto_measures_what_is_free(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ((share, _),) = shares_of(model, {"": torch.device("cpu")})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (share.weights - 70, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    # What is free, what torch keeps in reserve, what the model has there now (on this "GPU", all), less a tenth.
    rooms = [made.head_room for made in offload._shares(model, {"": 0}, None)]
    assert rooms == [share.weights - 70 + 30 + share.weights - 100]


def test_shares_of_two_devices_add_up(model: Any) -> None:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    placed = {"model.embed_tokens": one, "model.layers.0": one, "model": other, "score": other}
    (first, _), (second, _) = shares_of(model, placed)
    ((whole, _),) = shares_of(model, {"": one})
    assert first.weights + second.weights == whole.weights
    assert (first.blocks * 2, first.embedding, second.embedding) == (second.blocks, whole.embedding, 0)
    assert second.largest_module == 64 * 32 * 4


def test_a_dispatched_model_that_is_not_offloaded_is_taken(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch_model(model, {"model": "cpu", "score": "cpu"}, force_hooks=True)
    offload._check_model(model, "stream")
