"""Streaming on the CPU: the code of a GPU, over copies that come as late as they may."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from runtime.fake_copies import FakeCopies
from torch import nn

from verl_shard.common.errors import ConfigError, RunError
from verl_shard.common.notices import ShardNotice
from verl_shard.runtime import pinned
from verl_shard.runtime.dispatch import keep_outputs_in_place
from verl_shard.runtime.offload import Offload, several_calls
from verl_shard.runtime.pinned import pinned_bytes, room_to_pin
from verl_shard.runtime.stream_hooks import InputsHook, hooks_of
from verl_shard.runtime.stream_model import blocks_of, host_embedding, stream_model, undo_stream

ONE = {"": torch.device("cpu")}


@pytest.fixture(autouse=True)
def _no_fakes_before() -> Iterator[None]:
    FakeCopies.made.clear()
    before = pinned_bytes()
    yield
    FakeCopies.made.clear()
    if pinned_bytes() != before:
        gc.collect()
    assert pinned_bytes() == before, "every test gives its pinned memory back"


def _make(config: Any, auto: str = "AutoModelForSequenceClassification", **fields: Any) -> Any:
    torch.manual_seed(0)
    config.num_labels = 1
    model = getattr(transformers, auto).from_config(config, **fields).eval()
    return model.requires_grad_(False)


def _ids(n: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 100, (n, length), generator=torch.Generator().manual_seed(n))


def _stream(model: Any, **options: Any) -> Any:
    return stream_model(model, ONE, **{"copies": FakeCopies, **options})


def _state(model: nn.Module) -> dict[str, tuple[int, torch.dtype, torch.Tensor]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.dtype, tensor.detach().clone()) for name, tensor in tensors}


def _same(model: nn.Module, before: dict[str, tuple[int, torch.dtype, torch.Tensor]]) -> None:
    after = _state(model)
    assert list(after) == list(before)
    for name, (key, dtype, value) in before.items():
        assert after[name][:2] == (key, dtype), name
        assert torch.equal(after[name][2], value), name
    assert not any(hasattr(module, "_hf_hook") or hasattr(module, "_old_forward") for module in model.modules())
    assert "to" not in model.__dict__


MODELS = [
    ("qwen2", "AutoModelForSequenceClassification", {"tie_word_embeddings": False}),
    ("qwen3", "AutoModelForCausalLM", {"tie_word_embeddings": True}),
    ("deepseek_v3", "AutoModelForCausalLM", {}),  # its first block is dense and of another size
    ("mixtral", "AutoModelForCausalLM", {}),
    ("gpt2", "AutoModelForSequenceClassification", {}),  # buffers in its blocks
    ("opt", "AutoModelForCausalLM", {}),
    ("bloom", "AutoModelForTokenClassification", {}),
]


@pytest.mark.parametrize(("kind", "auto", "fields"), MODELS, ids=[kind for kind, _, _ in MODELS])
@pytest.mark.parametrize(("ahead", "prefetch"), [(1, False), (2, False), (2, True), (3, True), (9, True)])
def test_results_are_those_of_the_resident_model_and_undoing_leaves_nothing(
    kind: str, auto: str, fields: dict[str, Any], ahead: int, prefetch: bool, small_config: Callable[..., Any]
) -> None:
    model = _make(small_config(kind, **fields), auto)
    calls = [_ids(2, 7), _ids(3, 5), _ids(1, 9)]
    expected = [model(input_ids=ids).logits for ids in calls]
    before = _state(model)
    _stream(model, ahead=ahead, prefetch=prefetch)
    for ids, logits in zip(calls, expected, strict=True):
        assert torch.equal(model(input_ids=ids).logits, logits)
    remove_hook_from_module(model, recurse=True)
    _same(model, before)
    assert FakeCopies.made[0].pinned == 0
    assert torch.equal(model(input_ids=calls[0]).logits, expected[0])
    _stream(model)
    assert torch.equal(model(input_ids=calls[0]).logits, expected[0])
    undo_stream(model)
    _same(model, before)


def test_each_block_is_copied_once_a_call_in_order_one_ahead(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    streamed = _stream(model)
    blocks = streamed.root.streams[0].blocks
    fake = FakeCopies.made[0]
    addresses = [block.buffer.data.data_ptr() for block in blocks]
    running: list[tuple[int, list[int]]] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(
            lambda *_, index=index: running.append((index, [v for k, v in fake.log if k == "copy"]))
        )
    model(input_ids=_ids())
    # torch's pre-hooks run before the block's own: when the first comes two copies are under way, and one more for each.
    assert running == [(0, addresses[:2]), (1, addresses[:3]), (2, addresses[:3])]
    sizes = {block.n_bytes for block in blocks}
    assert [size for kind, size in fake.log if kind == "buffer"] == [max(sizes)] * 2
    # q, k, v with biases, o, gate, up, down and two norms of width 32 with heads of 8, two of them for keys: fp32.
    width, inner, keys = 32, 64, 16
    tensors = [width * width, width, keys * width, keys, keys * width, keys, width * width]
    tensors += [inner * width] * 3 + [width] * 2
    assert sizes == {sum(-(-4 * n // 512) * 512 for n in tensors)}
    assert streamed.pinned_bytes == 3 * max(sizes) == pinned_bytes() == fake.pinned
    assert streamed.buffer_bytes == 0
    undo_stream(model)


def test_prefetch_keeps_the_buffers_with_the_first_blocks_of_the_next_call(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    streamed = _stream(model, prefetch=True)
    size = streamed.root.streams[0].blocks[0].n_bytes
    fake = FakeCopies.made[0]
    addresses = [block.buffer.data.data_ptr() for block in streamed.root.streams[0].blocks]
    model(input_ids=_ids())
    copied = [value for kind, value in fake.log if kind == "copy"]
    assert copied == [*addresses, *addresses[:2]]
    assert streamed.buffer_bytes == 2 * size
    model(input_ids=_ids())
    copied = [value for kind, value in fake.log if kind == "copy"]
    assert copied == [*addresses, *addresses, *addresses[:2]]
    streamed.root.release()
    assert streamed.buffer_bytes == 0
    assert fake.pending == []
    first = model(input_ids=_ids()).logits
    undo_stream(model)
    assert torch.equal(model(input_ids=_ids()).logits, first)


class _Odd(nn.Module):
    """Several dtypes, a transposed weight, an empty one, a counter and a table that its forward writes to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Linear(8, width)
        self.outside = nn.Linear(width, 8, dtype=torch.float64)
        self.turned = nn.Parameter(torch.randn(8, width).t())
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.register_buffer("codes", torch.randint(0, 100, (2**20,), dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.table += x.sum(0)
        scale = self.codes[:8].float() / 100
        return (self.outside((self.inside(x) + x @ self.turned.t()).double())).float() * scale + x


class _Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = list(range(len(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def _chain(*widths: int) -> _Chain:
    torch.manual_seed(1)
    return _Chain(*(_Odd(width) for width in widths)).eval().requires_grad_(False)


def test_blocks_of_any_size_and_dtype_and_what_they_write_to() -> None:
    ours, theirs = _chain(3, 40, 1, 7), _chain(3, 40, 1, 7)
    strides = ours.layers[0].turned.stride()
    streamed = _stream(ours)
    assert max(block.n_bytes for block in streamed.root.streams[0].blocks) > 2**20
    x = torch.randn(5, 8)
    with torch.inference_mode():
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), theirs(x))
    assert ours.layers[0].turned.stride() == strides == (1, 3)
    undo_stream(ours)
    for (name, mine), yours in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine, yours), name
    assert all(
        torch.equal(a.table, b.table) and int(a.calls) == 2 for a, b in zip(ours.layers, theirs.layers, strict=True)
    )
    ours.layers[0].inside.requires_grad_(True)
    ours(x).sum().backward()  # it can be trained again


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 0, 1, 3], [2], [], [0, 1, 2, 3, 0, 1, 2, 3], [1, 3]])
def test_blocks_that_run_in_another_order_twice_or_not_at_all(order: list[int], prefetch: bool) -> None:
    ours, theirs = _chain(3, 5, 4, 7), _chain(3, 5, 4, 7)
    _stream(ours, prefetch=prefetch)
    ours.order = theirs.order = order
    x = torch.randn(5, 8)
    for _ in range(3):
        assert torch.equal(ours(x), theirs(x))
    undo_stream(ours)


def test_a_block_inside_a_block_and_a_model_that_calls_itself() -> None:
    class Twice(_Chain):
        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            x = super().forward(x)
            return self(x, again=False) if again else x

    torch.manual_seed(0)
    model = Twice(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(False)
    x = torch.randn(2, 4)
    expected = model(x)
    _stream(model)
    assert torch.equal(model(x), expected)
    undo_stream(model)


def test_tensors_that_blocks_share_stay_on_the_device() -> None:
    def tied() -> _Chain:
        chain = _chain(6, 6, 6)
        chain.layers[2].inside.weight = chain.layers[0].inside.weight
        return chain

    ours, theirs = tied(), tied()
    x = torch.randn(5, 8)
    streamed = _stream(ours)
    shared = ours.layers[0].inside.weight
    held = {id(place.tensor) for block in streamed.root.streams[0].blocks for place in block.places}
    assert id(shared) not in held
    assert torch.equal(ours(x), theirs(x))
    remove_hook_from_module(ours, recurse=True)
    assert ours.layers[2].inside.weight is ours.layers[0].inside.weight is shared
    assert torch.equal(ours(x), theirs(x))


def test_one_block_used_many_times_is_one_block() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = _Chain(*[layer] * 3).requires_grad_(False)
    x = torch.randn(2, 4)
    expected = model(x)
    assert list(blocks_of(model)) == ["layers.0"]
    _stream(model)
    assert torch.equal(model(x), expected)
    undo_stream(model)


@pytest.mark.parametrize("kind", ["qwen2", "deepseek_v3", "gpt2", "gemma3_text"])
def test_an_embedding_on_the_host_sends_the_rows_that_are_used(
    kind: str, small_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _make(small_config(kind, pad_token_id=120), "AutoModelForSequenceClassification")
    ids = _ids(3, 6)  # fewer rows than the number of the padding token
    expected = model(input_ids=ids).logits
    before = _state(model)
    embedding = host_embedding(model)
    streamed = _stream(model, embedding=embedding)
    seen: list[int] = []
    plain = nn.functional.embedding

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(len(args[1]))
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "embedding", spy)
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert seen[0] == len(ids.unique())
    assert streamed.pinned_bytes >= embedding.weight.numel() * 4
    padding = None if kind == "gpt2" else 120
    assert embedding.padding_idx == padding
    with pytest.raises(IndexError):
        model(input_ids=ids + 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "embedding", None)
        with pytest.raises(TypeError):
            model(input_ids=ids)
    assert (len(embedding.weight), embedding.padding_idx) == (128, padding)
    assert torch.equal(model(input_ids=ids).logits, expected)
    remove_hook_from_module(model, recurse=True)
    _same(model, before)


def test_a_tied_embedding_and_no_embedding_do_not_go_to_the_host(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen3", tie_word_embeddings=True), "AutoModelForCausalLM")
    with pytest.raises(ConfigError, match="lm_head computes with the weights of the input embedding"):
        host_embedding(model)
    with pytest.raises(ConfigError, match="has no input embedding"):
        host_embedding(_chain(3))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("at", ["model.layers.0", "model.layers.1.mlp", "model.layers.2", "model.norm", "score"])
def test_an_error_in_the_middle_loses_nothing(at: str, prefetch: bool, small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    before, ids = _state(model), _ids()
    expected = model(input_ids=ids).logits
    streamed = _stream(model, prefetch=prefetch, embedding=host_embedding(model))
    failing = True

    def fail(*_: Any) -> None:
        if failing:
            raise ZeroDivisionError

    handle = model.get_submodule(at).register_forward_pre_hook(fail)
    inside = model.get_submodule(at).register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids)
        assert streamed.buffer_bytes == 0
        assert FakeCopies.made[0].pending == []
        for name, (_, _, value) in before.items():
            assert torch.equal(model.state_dict().get(name, value), value), name
    failing = False
    assert torch.equal(model(input_ids=ids).logits, expected)
    failing = True
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids)
    handle.remove()
    inside.remove()
    remove_hook_from_module(model, recurse=True)
    _same(model, before)


def test_a_second_thread_waits_and_goes_on_after_an_error() -> None:
    order: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            name = threading.current_thread().name
            order.append(name)
            if name == "first":
                inside.set()
                assert go_on.wait(60)
                raise ZeroDivisionError
            return self.linear(x)

    torch.manual_seed(0)
    model = _Chain(Slow(), Slow(), Slow()).requires_grad_(False)
    _stream(model)
    results: dict[str, Any] = {}

    def call() -> None:
        name = threading.current_thread().name
        try:
            results[name] = model(torch.ones(1, 4))
        except ZeroDivisionError as error:
            results[name] = error

    first, second = (threading.Thread(target=call, name=name) for name in ("first", "second"))
    first.start()
    assert inside.wait(60)
    second.start()
    second.join(0.2)
    assert order == ["first"]
    go_on.set()
    first.join(60)
    second.join(60)
    assert isinstance(results["first"], ZeroDivisionError)
    assert order == ["first", "second", "second", "second"]
    undo_stream(model)
    assert torch.equal(results["second"], model(torch.ones(1, 4)))


def test_a_part_of_the_model_can_be_called_by_itself(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    expected = model.model(input_ids=_ids()).last_hidden_state
    streamed = _stream(model)
    assert torch.equal(model.model(input_ids=_ids()).last_hidden_state, expected)
    assert torch.equal(model.forward(input_ids=_ids()).logits, model(input_ids=_ids()).logits)
    assert streamed.buffer_bytes == 0
    undo_stream(model)


def test_a_host_with_too_little_room_is_told_and_copies_from_pageable_memory(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    expected = model(input_ids=_ids()).logits
    size = _stream(model).pinned_bytes // 3
    undo_stream(model)
    start = pinned_bytes()
    with pytest.warns(ShardNotice, match="could not be pinned.*Using pageable memory"):
        streamed = _stream(model, pin_limit=start + 2 * size + 5)
    assert (streamed.pinned_bytes, streamed.pageable_bytes) == (2 * size, size)
    assert pinned_bytes() == start + 2 * size
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_stream(model)
    with pytest.warns(ShardNotice, match="could not be pinned"):
        streamed = _stream(model, copies=lambda device: FakeCopies(device, can_pin=size))  # the system refuses
    assert (streamed.pinned_bytes, pinned_bytes()) == (size, start + size)
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_stream(model)


def test_pinned_memory_goes_with_the_model(small_config: Callable[..., Any]) -> None:
    start = pinned_bytes()
    model = _make(small_config("qwen2"))
    kept = _stream(model).root.streams[0].blocks[0].places[0].tensor
    expected = kept.clone()
    assert pinned_bytes() > start
    del model
    gc.collect()
    assert pinned_bytes() == start
    assert torch.equal(kept, expected)  # whoever looks at it still does


def test_what_the_host_has_and_a_limit_are_the_room_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, limit, room in (
        (None, None, None),
        (None, 5 * 2**30, 2**30),
        (None, 2**30, 0),
        (100 * 2**30, None, 95 * 2**30),  # a twentieth stays
        (10 * 2**30, None, 9 * 2**30),  # a GiB stays
        (2**29, 2**40, 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(pinned, "_pinned", 4 * 2**30)
            patch.setattr(pinned, "available_host_memory", lambda available=available: available)
            assert room_to_pin(limit) == room


def test_a_setup_that_fails_leaves_the_model_as_it_was(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    before = _state(model)

    class Refusing(FakeCopies):
        def pin(self, buffer: torch.Tensor) -> bool:
            if self.pinned:
                raise MemoryError
            return super().pin(buffer)

    with pytest.raises(MemoryError):
        _stream(model, copies=Refusing)
    _same(model, before)


def test_a_model_that_is_streamed_is_not_moved_and_not_half_undone(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    _stream(model)
    for move in (lambda: model.to("cpu"), lambda: model.cuda()):
        with pytest.raises(ConfigError, match="Undo it first"):
            move()
    remove_hook_from_module(model.model.layers[1])
    with pytest.raises(RunError, match="Undo the offload of the whole model"):
        model(input_ids=_ids())
    undo_stream(model)
    assert model.to("cpu") is model


def test_a_hook_that_somebody_adds_later_comes_with_it(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    expected = model(input_ids=_ids()).logits
    _stream(model)
    for module in (model, model.model.layers[1]):
        add_hook_to_module(module, ModelHook(), append=True)
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_stream(model)
    assert [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")] == ["", "model.layers.1"]
    assert torch.equal(model(input_ids=_ids()).logits, expected)


def test_several_devices_each_stream_their_own_blocks(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2", num_hidden_layers=5))
    before, ids = _state(model), _ids()
    expected = model(input_ids=ids).logits
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    layers = {f"model.layers.{i}": first if i < 2 else second for i in range(5)}
    placed = {"model.embed_tokens": first, "model.rotary_emb": first, **layers, "model.norm": second, "score": second}
    streamed = stream_model(model, placed, copies=FakeCopies)
    assert [fake.name for fake in FakeCopies.made] == [first, second]
    moved = [name for name, module in model.named_modules() if any(isinstance(h, InputsHook) for h in hooks_of(module))]
    assert set(moved) == set(placed)
    assert [len(stream.blocks) for stream in streamed.root.streams] == [2, 3]
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert [sum(kind == "copy" for kind, _ in fake.log) for fake in FakeCopies.made] == [2, 3]
    remove_hook_from_module(model, recurse=True)
    _same(model, before)
    del placed["score"]
    with pytest.raises(ConfigError, match=r"it gives no device for score\.weight"):
        stream_model(model, placed, copies=FakeCopies)
    _same(model, before)


def test_a_dispatched_model_keeps_accelerates_hooks(small_config: Callable[..., Any]) -> None:
    model = _make(small_config("qwen2"))
    expected = model(input_ids=_ids()).logits
    dispatch_model(model, {"model": "cpu", "score": "cpu"}, force_hooks=True)
    hooked = {name: type(module._hf_hook) for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    streamed = _stream(model)
    assert not streamed.root.io_same_device
    keep_outputs_in_place(model)
    assert torch.equal(model(input_ids=_ids()).logits, expected)
    undo_stream(model)
    assert hooked == {n: type(module._hf_hook) for n, module in model.named_modules() if hasattr(module, "_hf_hook")}
    assert torch.equal(model(input_ids=_ids()).logits, expected)


def test_a_streamed_model_can_be_saved(small_config: Callable[..., Any], tmp_path: Any) -> None:
    model = _make(small_config("qwen2"))
    expected = model(input_ids=_ids()).logits
    _stream(model)
    model.save_pretrained(tmp_path)
    undo_stream(model)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=_ids()).logits, expected)


def test_calls_that_follow_each_other_begin_early_and_leave_nothing_behind(small_config: Callable[..., Any]) -> None:
    """The first blocks are asked for before the first call has its inputs, and given back after the last, or an error."""
    model = _make(small_config("qwen2", num_hidden_layers=3))
    expected = model(_ids()).logits
    streamed = _stream(model, ahead=2, prefetch=True)
    model.__dict__["_verl_shard_offload"] = Offload("stream", "a test", streamed=streamed)
    (copies,) = FakeCopies.made
    (stream,) = streamed.root.streams
    with several_calls(model):
        assert [kind for kind, _ in copies.log] == ["buffer", "buffer", "copy", "copy"]
        for _ in range(2):
            assert torch.equal(model(_ids()).logits, expected)
        assert stream.buffer_bytes > 0
    assert stream.buffer_bytes == 0
    # Each call copies its three blocks once, and the last one the two that no call came for.
    assert sum(kind == "copy" for kind, _ in copies.log) == 2 * 3 + 2
    # Told how many come, it copies for no other.
    before = len(copies.log)
    with several_calls(model, each=2):
        for _ in range(2):
            assert torch.equal(model(_ids()).logits, expected)
        assert stream.buffer_bytes == 0
    assert sum(kind == "copy" for kind, _ in copies.log[before:]) == 2 * 3
    with several_calls(model, each=1):  # and one that comes unexpectedly has its weights
        for _ in range(2):
            assert torch.equal(model(_ids()).logits, expected)
    assert (stream.buffer_bytes, stream.to_come) == (0, None)
    with pytest.raises(ValueError, match="no inputs"), several_calls(model):
        raise ValueError("no inputs")
    assert stream.buffer_bytes == 0
    undo_stream(model)
    with several_calls(model, nn.Linear(1, 1)):
        assert torch.equal(model(_ids()).logits, expected)
