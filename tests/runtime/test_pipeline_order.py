"""Each device's own order of forwards and backwards, the time that it takes, and threads that end whatever happens."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_links import FakeLinks
from shapes import small_qwen2

from verl_shard.common import notices
from verl_shard.common.notices import ShardNotice
from verl_shard.memory.in_flight import issued
from verl_shard.runtime import pipeline_backwards, pipeline_threads
from verl_shard.runtime.micro_batches import run_micro_batches
from verl_shard.runtime.pipeline import dispatch_model, pipeline_of
from verl_shard.runtime.pipeline_links import Parcel
from verl_shard.runtime.pipeline_order import issue
from verl_shard.runtime.pipeline_window import Window


def causal() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_qwen2(), attn_implementation="sdpa")


def placed(layers: Sequence[int]) -> dict[str, int]:
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": layers[-1], "lm_head": layers[-1]}
    return ends | {f"model.layers.{i}": gpu for i, gpu in enumerate(layers)}


def batches(n: int) -> list[dict[str, Any]]:
    made = [torch.randint(1, 500, (2, 6), generator=torch.Generator().manual_seed(number)) for number in range(n)]
    return [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in made]


def gradients_like(model: Any, other: Any, distance: float) -> None:
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < distance


Order = dict[int, list[str]]


def order_of(layers: Sequence[int], n: int, in_flight: int) -> Order:
    """What each GPU is given: F0 is the forward of micro-batch 0. Taken at the last layer of each."""
    links, model = FakeLinks(), causal()
    dispatch_model(model, placed(layers), links=links)
    given: Order = {gpu: [] for gpu in layers}

    def note(gpu: int, kind: str) -> None:
        given[gpu].append(f"{kind}{sum(entry[0] == kind for entry in given[gpu])}")

    def watch(gpu: int) -> Any:
        def hook(_: Any, args: Any, output: torch.Tensor) -> None:
            note(gpu, "F")
            output.register_hook(lambda gradient: note(gpu, "B"))

        return hook

    for gpu in set(layers):
        model.model.layers[max(i for i, at in enumerate(layers) if at == gpu)].register_forward_hook(watch(gpu))
    with links:
        assert run_micro_batches(model, batches(n), in_flight=in_flight).in_flight == min(n, in_flight)
    return given


def time_of(given: Order, forward: int = 1, backward: int = 2) -> int:
    """How long GPUs take that do what they are given in its order, each as soon as its neighbour has made what it needs."""
    last = max(given)
    ends: dict[tuple[int, str], int] = {}
    todo, free = {gpu: list(given[gpu]) for gpu in given}, dict.fromkeys(given, 0)
    while any(todo.values()):
        for gpu, left in todo.items():
            while left:
                kind = left[0][0]
                before = gpu - 1 if kind == "F" else gpu + 1
                needs = (before, left[0]) if 0 <= before <= last else (gpu, left[0].replace("B", "F"))
                if needs not in ends and (kind == "B" or gpu > 0):
                    break
                free[gpu] = max(free[gpu], ends.get(needs, 0)) + (forward if kind == "F" else backward)
                ends[gpu, left.pop(0)] = free[gpu]
    return max(free.values())


class TimedLinks(FakeLinks):
    """What each GPU is given, and what it waits for: `seconds` of work, or a copy, which waits for its GPU's work so far."""

    def __init__(self, n_gpus: int) -> None:
        super().__init__()
        self.given: dict[str, list[int | tuple[str, int]]] = {f"gpu{gpu}": [] for gpu in range(n_gpus)}
        self._sent: dict[int, tuple[torch.Tensor, str, int]] = {}

    def watch(self, module: Any, gpu: str, forward: int = 1, backward: int = 2) -> None:
        """module: the last block of that GPU: it comes after what the GPU took in, and before what it sends on."""

        def forwards(*_: Any) -> None:
            self.given[gpu].append(forward)

        def backwards(_: Any, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: self.given[gpu].append(backward))

        module.mlp.register_forward_pre_hook(forwards)  # a checkpointed block that runs again does not come to its end
        module.register_forward_hook(backwards)

    def mark(self, device: str) -> Any:
        return len(self.given[device]) if device in self.given else None

    def start(self, tensor: torch.Tensor, device: str, after: Any = None) -> Parcel:
        source = self.of(tensor)
        parcel = super().start(tensor, device, after)
        mark = self.mark(source) if after is None else after
        if mark is not None:
            self._sent[id(parcel.tensor)] = parcel.tensor, source, mark
        return Parcel(parcel.tensor, parcel.done, mark)

    def arrive(self, parcel: Parcel) -> torch.Tensor:
        if (sent := self._sent.get(id(parcel.tensor))) is not None:
            self.given[self.of(parcel.tensor)].append(sent[1:])
        return super().arrive(parcel)

    def seconds(self) -> int:
        """Until all GPUs have done all that they were given, in its order; copies take none, and go in order."""
        free: dict[str, list[int]] = {gpu: [0] for gpu in self.given}
        links: Counter[tuple[str, str]] = Counter()
        while any(len(free[gpu]) <= len(entries) for gpu, entries in self.given.items()):
            before = {gpu: len(done) for gpu, done in free.items()}
            for gpu, entries in self.given.items():
                for entry in entries[len(free[gpu]) - 1 :]:
                    if isinstance(entry, int):
                        free[gpu].append(free[gpu][-1] + entry)
                        continue
                    source, at = entry
                    if at >= len(free[source]):
                        break
                    links[source, gpu] = max(links[source, gpu], free[source][at])
                    free[gpu].append(max(free[gpu][-1], links[source, gpu]))
            assert before != {gpu: len(done) for gpu, done in free.items()}, "they wait for each other"
        return max(done[-1] for done in free.values())


def seconds_of(layers: Sequence[int], n: int, in_flight: int, *, checkpointed: bool = False, **how: Any) -> int:
    """Of n micro-batches whose inputs and labels are on the first GPU. A GPU's share of a forward takes 1, of a backward 2."""
    links, model = TimedLinks(len(set(layers))), causal()
    dispatch_model(model, placed(layers), links=links)
    if checkpointed:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for gpu in set(layers):
        links.watch(model.model.layers[max(i for i, at in enumerate(layers) if at == gpu)], f"gpu{gpu}")
    given = batches(n)
    for batch in given:
        links.give(batch["input_ids"], "gpu0")
    with links:
        run_micro_batches(model, given, in_flight=in_flight, **how)
    return links.seconds()


@pytest.mark.parametrize("scale", ["sum", "tokens"])
def test_no_device_waits_longer_than_for_its_neighbours_work(scale: str) -> None:
    # n micro-batches of 3 on each GPU, and the way of one through the GPUs before.
    two, three, four = (0, 0, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)
    assert seconds_of(two, 6, 1, scale=scale) == 6 * 2 * 3
    assert seconds_of(two, 6, 2, scale=scale) == (6 + 1) * 3
    assert seconds_of(two, 6, 4, scale=scale) == (6 + 1) * 3
    assert seconds_of(two, 6, 6, scale=scale) == (6 + 1) * 3
    assert seconds_of(three, 6, 3, scale=scale) == (6 + 2) * 3
    assert seconds_of(three, 6, 6, scale=scale) == (6 + 2) * 3
    assert seconds_of(four, 6, 4, scale=scale) == (6 + 3) * 3
    assert seconds_of(four, 6, 8, scale=scale) == (6 + 3) * 3


def test_checkpointed_blocks_wait_no_longer_either() -> None:
    assert seconds_of((0, 0, 1, 1), 6, 2, checkpointed=True) == (6 + 1) * 4
    assert seconds_of((0, 1, 2, 2), 6, 3, checkpointed=True) == (6 + 2) * 4


def test_forwards_alone_wait_for_their_own_hidden_states_only() -> None:
    assert seconds_of((0, 0, 1, 1), 6, 2, forward_only=True) == 6 + 1
    assert seconds_of((0, 1, 2, 3), 6, 4, forward_only=True) == 6 + 3


def test_no_device_is_kept_waiting_by_what_another_is_given() -> None:
    """As where a GPU takes no more launches for now: meanwhile the next micro-batch comes to the last one, and to its loss."""
    links, model = FakeLinks(), causal()
    dispatch_model(model, placed((0, 0, 1, 1)), links=links)
    seen: dict[str, bool] = {}
    second_loss = threading.Event()

    def slow(_: Any, args: Any, output: torch.Tensor) -> None:
        if not seen:
            seen["begun"] = True
            output.register_hook(
                lambda gradient: seen.update(waited=second_loss.wait(20)) if "waited" not in seen else None
            )

    def loss_fn(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        if "first" in seen:
            second_loss.set()
        seen["first"] = True
        loss: torch.Tensor = output.loss
        return loss

    model.model.layers[1].register_forward_hook(slow)
    with links:
        run_micro_batches(model, batches(3), loss_fn, in_flight=2)
    assert seen["waited"]


def log_of(n: int, held: int, until: int, seconds: float, **how: Any) -> list[str]:
    """Begins and ends of n backwards on two devices, of which one is held up on the first until another begins, or so long."""
    links, model = FakeLinks(), causal()
    pipe, log = pipeline_of(dispatch_model(model, placed((0, 0, 1, 1)), links=links)), []
    begun, forwards = threading.Event(), itertools.count()

    def slow(_: Any, args: Any, output: torch.Tensor) -> None:
        if next(forwards) == held:
            output.register_hook(lambda gradient: log.append(f"waited {begun.wait(seconds)}"))

    def backward(number: int, loss: torch.Tensor) -> None:
        log.append(f"begin {number}")
        if number == until:
            begun.set()
        torch.autograd.backward(loss)
        log.append(f"end {number}")

    model.model.layers[1].register_forward_hook(slow)
    given = batches(n)
    with links:
        issue(
            pipe, n, lambda number: model(**given[number]), lambda number, output: output.loss,
            window=Window(pipe, 2), backward=backward, **how,
        )  # fmt: skip
    return log


@pytest.mark.parametrize("autocast", [False, True])
def test_under_autocast_a_backward_begins_when_the_one_before_has_ended(autocast: bool) -> None:
    """Casts that are kept belong to the first forward, and autograd comes to them last: with the next backward in front of
    them, one would wait for the other."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        log = log_of(4, held=0, until=1, seconds=1 if autocast else 20)
    assert (log.index("end 0") < log.index("begin 1")) == autocast
    assert f"waited {not autocast}" in log


def test_a_backward_that_is_not_done_in_time_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where autograd's one thread of a device has both, and the later one in front. It is said, and those that follow begin
    one after the other."""
    monkeypatch.setattr(pipeline_backwards, "_PATIENCE_S", 0.1)
    links, model = FakeLinks(), causal()
    pipe = pipeline_of(dispatch_model(model, placed((0, 0, 1, 1)), links=links))
    assert pipe is not None
    forwards, passed = itertools.count(), threading.Event()
    said: list[Any] = []
    waited: list[bool] = []

    def in_one_thread(_: Any, args: Any, output: torch.Tensor) -> None:
        number = next(forwards)
        if number == 0:
            output.register_hook(lambda gradient: waited.append(passed.wait(20)))
        elif number == 1:
            output.register_hook(lambda gradient: passed.set())

    model.model.layers[1].register_forward_hook(in_one_thread)
    monkeypatch.setattr(pipeline_backwards, "notice", lambda *words: said.append(words[3]))
    with links:
        run_micro_batches(model, batches(4), in_flight=2)
    assert waited == [True]
    assert len(said) == 1
    alone = causal()
    run_micro_batches(alone, batches(4))
    gradients_like(model, alone, 1e-6)
    assert pipe.travels.apart  # the next pass does not begin with waiting in vain


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_blocks_that_are_computed_again_draw_what_they_drew(dropout: float) -> None:
    """They set the generators back to what they were, while nobody else may draw from them."""

    def trained(in_flight: int) -> tuple[list[torch.Tensor], list[float], bytes]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            small_qwen2(attention_dropout=dropout), attn_implementation="eager"
        ).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        links = FakeLinks()
        dispatch_model(model, placed((0, 0, 1, 1)), links=links)
        torch.manual_seed(1)
        with links:
            ran = run_micro_batches(model, batches(6), in_flight=in_flight)
        losses = [float(loss) for loss in ran.losses]
        return [p.grad for p in model.parameters()], losses, torch.get_rng_state().numpy().tobytes()

    expected = trained(1)
    for in_flight in (2, 2, 4):
        notices._said.clear()
        said = pytest.warns(ShardNotice, match="Using backwards that run by themselves") if dropout else nullcontext()
        with said:
            gradients, losses, state = trained(in_flight)
        assert losses == expected[1]
        assert state == expected[2]
        assert all((a - b).abs().max() < 1e-6 for a, b in zip(gradients, expected[0], strict=True))


def test_what_later_micro_batches_keep_is_counted_too() -> None:
    """Beside the backwards of earlier ones, whose gradients may come to a device while a forward is counted there: here copies
    do not count."""

    copied: Counter[str] = Counter()

    class Without(FakeLinks):
        def start(self, tensor: torch.Tensor, device: str, after: Any = None) -> Parcel:
            parcel = super().start(tensor, device, after)
            size = parcel.tensor.untyped_storage().nbytes()
            copied[device] += size
            weakref.finalize(parcel.tensor.untyped_storage(), lambda: copied.subtract({device: size}))
            return parcel

        def held(self, device: str) -> int:
            return super().held(device) - copied[device]

    links, model = Without(), causal()
    pipe = pipeline_of(dispatch_model(model, placed((0, 0, 1, 1)), links=links))
    long = [torch.randint(1, 500, (2, n), generator=torch.Generator().manual_seed(n)) for n in (6, 60, 60, 60)]
    given = [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in long]

    def kept(given: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        window = Window(pipe, "auto", limits=2**40)
        with links:
            issue(
                pipe, len(given), lambda number: model(**given[number]), lambda number, output: output.loss,
                window=window, backward=lambda number, loss: torch.autograd.backward(loss),
            )  # fmt: skip
        return window._kept

    assert pipe is not None
    short, both, alone = kept(given[:1]), kept(given), kept(given[1:2])
    for device in ("gpu0", "gpu1"):
        assert both[device] > 5 * short[device]
        assert both[device] == pytest.approx(alone[device], rel=0.03)


@pytest.mark.parametrize("apart", [False, True])
def test_the_last_backward_begins_when_all_others_have_ended_where_that_is_asked(apart: bool) -> None:
    """As where gradients are averaged over processes meanwhile. The one before it is held up on the first device."""
    log = log_of(3, held=1, until=2, seconds=1 if apart else 20, last_apart=apart)
    assert (log.index("end 1") < log.index("begin 2")) == apart
    assert f"waited {not apart}" in log


def test_each_device_has_its_own_order() -> None:
    given = order_of((0, 0, 1, 1), 4, 2)
    assert given[0] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert given[1] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    given = order_of((0, 1, 2, 2), 5, 3)
    assert given[0] == ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "B3", "B4"]
    assert given[1] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "F4", "B3", "B4"]
    assert given[2] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4"]
    given = order_of((0, 0, 1, 1), 4, 4)
    assert given[0] == ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"]
    assert given[1] == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]


@pytest.mark.parametrize(
    ("layers", "n", "in_flight"),
    [((0, 1, 2, 3), 5, 4), ((0, 1, 1, 2), 5, 2), ((0, 0, 1, 1), 4, 3), ((0, 0, 1, 1), 2, 4)],
)
def test_estimates_suppose_the_order_that_is_issued(layers: Sequence[int], n: int, in_flight: int) -> None:
    supposed: Order = {gpu: [] for gpu in layers}
    for number, stage in issued(n, len(supposed), in_flight):
        for gpu in supposed if stage is None else (stage,):
            supposed[gpu].append(f"{'B' if stage is None else 'F'}{number}")
    assert order_of(layers, n, in_flight) == supposed


def test_fewer_micro_batches_than_may_be_in_flight_are_no_more_ahead_than_if_they_were_all() -> None:
    # The last device would hold two of them for nothing: the second has no third to wait for.
    assert (
        order_of((0, 0, 1, 1), 2, 4)
        == order_of((0, 0, 1, 1), 2, 2)
        == {0: ["F0", "F1", "B0", "B1"], 1: ["F0", "B0", "F1", "B1"]}
    )


def test_as_many_in_flight_as_devices_take_no_longer_than_all() -> None:
    # A GPU's share of a micro-batch is 1 forward and 2 backward. n of them, and the first one's way through the others.
    assert time_of(order_of((0, 0, 1, 1), 6, 6)) == time_of(order_of((0, 0, 1, 1), 6, 2)) == 3 * (6 + 1)
    assert time_of(order_of((0, 1, 2, 2), 6, 3)) == 3 * (6 + 2)
    assert time_of(order_of((0, 0, 1, 1), 6, 1)) == 3 * 6 * 2
    # One order for all devices, whole forwards and backwards in turn, makes the last wait for the first.
    turns = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "F4", "B3", "F5", "B4", "B5"]
    assert time_of({0: turns, 1: turns}) > 30


def test_the_last_device_holds_one_micro_batch() -> None:
    def held(in_flight: int) -> list[int]:
        model = causal()

        class Counting(FakeLinks):
            def give(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
                given = super().give(tensor, device)
                there = [p.grad.nbytes for p in model.parameters() if p.grad is not None and self.of(p) == device]
                most[device] = max(most[device], self.bytes[device] - before[device] - sum(there))
                return given

        links, before, most = Counting(), Counter[str](), Counter[str]()
        dispatch_model(model, placed((0, 0, 1, 1)), links=links)
        before |= links.bytes
        most.clear()
        with links:
            run_micro_batches(
                model,
                [{**b, "labels": None} for b in batches(6)],
                lambda output, batch: output.logits.square().mean(),
                in_flight=in_flight,
            )
        return [most["gpu0"], most["gpu1"]]

    one, two, six = held(1), held(2), held(6)
    assert two[1] == pytest.approx(one[1], rel=0.1)
    # What a backward makes beside, as much as a micro-batch keeps, is there once.
    assert six[1] > 3 * one[1]
    assert 1.4 * one[0] < two[0] < 2 * one[0]
    assert six[0] > 3.5 * one[0]
    assert six[0] - two[0] == pytest.approx(4 * (two[0] - one[0]), rel=0.1)


class Casts(FakeLinks):
    """Counts the casts of tensors of a shape, in all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_to_copy" in str(func):
            self.shapes[tuple(args[0].shape)] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_threads_compute_as_their_caller_would_and_cast_weights_once() -> None:
    links, model, one = Casts(), causal(), causal()
    dispatch_model(model, placed((0, 0, 1, 1)), links=links)
    threads: set[int] = set()
    model.model.layers[0].register_forward_hook(lambda *_: threads.add(threading.get_ident()))
    seen: list[torch.dtype] = []

    def loss_fn(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        seen.append(output.logits.dtype)
        return output.logits.float().square().mean()  # type: ignore[no-any-return]

    plain = [{"input_ids": b["input_ids"], "use_cache": False} for b in batches(4)]
    with links, torch.autocast("cpu", torch.bfloat16):
        run_micro_batches(model, plain, loss_fn, in_flight=3)
    with torch.autocast("cpu", torch.bfloat16):
        for batch in plain:
            loss_fn(one(**batch), batch).backward()
    assert threading.get_ident() not in threads
    assert set(seen) == {torch.bfloat16}
    weight = tuple(model.model.layers[3].mlp.down_proj.weight.shape)
    # One cast for all, of each layer, and that of each gradient back.
    assert links.shapes[weight] == 4 + 4 * 4
    gradients_like(model, one, 1e-4)
    assert not torch.is_autocast_enabled("cpu")


def flying() -> int:
    """Threads that have a pass to do."""
    there = [thread for thread in threading.enumerate() if thread.name in ("verl_shard forward", "verl_shard backward")]
    return len(there) - sum(map(len, pipeline_threads._IDLE.values()))


@pytest.mark.parametrize(("layers", "in_flight"), [((0, 0, 1, 1), 2), ((0, 0, 1, 1), 4), ((0, 1, 1, 2), 3)])
def test_later_micro_batches_and_steps_have_the_same_threads(layers: tuple[int, ...], in_flight: int) -> None:
    """What libraries keep by thread, as cuDNN its plans, would be made anew in each new one. A forward has a thread while it
    waits between two devices: at each of them but the last one may."""
    links, model, seen = FakeLinks(), causal(), []
    dispatch_model(model, placed(layers), links=links)
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(threading.get_ident()))
    with links:
        for _ in range(3):
            run_micro_batches(model, batches(8), in_flight=in_flight)
    assert len(seen) == 24
    assert len(set(seen)) == len(set(layers)) - 1
    assert flying() == 0


def test_a_thread_is_left_as_it_was() -> None:
    """Autocast, gradients and the count of open autocasts are a thread's own: nothing of a step may reach the next."""
    links, model, states = FakeLinks(), causal(), []

    def state(*_: Any) -> None:
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        states.append((nesting, dtype, torch.is_grad_enabled()))

    dispatch_model(model, placed((0, 0, 1, 1)), links=links)
    model.model.layers[0].register_forward_pre_hook(state)
    plain = [{"input_ids": b["input_ids"], "use_cache": False} for b in batches(4)]

    def square(output: Any, batch: Any) -> torch.Tensor:
        return output.logits.float().square().mean()  # type: ignore[no-any-return]

    with links:
        for dtype in (torch.bfloat16, None, torch.float16):
            with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
                run_micro_batches(model, plain, square, in_flight=2)
    # In the thread's own autocast, and in the one that the step is in.
    assert states == [(2, dtype, True) for dtype in (torch.bfloat16, None, torch.float16) for _ in range(4)]


def test_an_error_ends_all_forwards_and_is_the_callers() -> None:
    links, model = FakeLinks(), causal()
    dispatch_model(model, placed((0, 0, 1, 1)), links=links)
    calls: list[int] = []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.cuda.OutOfMemoryError("no room")

    handle = model.model.layers[1].register_forward_hook(fails)
    with links, pytest.raises(torch.cuda.OutOfMemoryError, match="no room"):
        run_micro_batches(model, batches(5), in_flight=2)
    assert flying() == 0
    handle.remove()

    def stops(output: Any, batch: Any) -> Any:
        assert flying()  # the second is half-way
        raise KeyboardInterrupt

    with links, pytest.raises(KeyboardInterrupt):
        run_micro_batches(model, batches(5), stops, in_flight=2)
    assert flying() == 0
    model.zero_grad()
    with links:
        run_micro_batches(model, batches(4), in_flight=2)
    one = causal()
    for batch in batches(4):
        one(**batch).loss.backward()
    gradients_like(model, one, 1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_that_are_computed_again_do_not_stop(checkpointing: bool) -> None:
    links, model, one = FakeLinks(), causal(), causal()
    dispatch_model(model, placed((0, 1, 1, 0)), links=links)  # the last device is one that was there before
    for each in (model, one):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with links:
        run_micro_batches(model, batches(4), in_flight=2)
    for batch in batches(4):
        one(**batch).loss.backward()
    gradients_like(model, one, 1e-6)
