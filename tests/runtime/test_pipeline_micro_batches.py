"""Micro-batches in flight: their order, how many, and gradients as of one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_links import FakeLinks
from shapes import small_qwen2

from verl_shard.common.errors import ConfigError
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import trace
from verl_shard.models.read import read_model
from verl_shard.runtime import pipeline_window
from verl_shard.runtime.micro_batches import clip_gradients, count_tokens, run_micro_batches
from verl_shard.runtime.pipeline import dispatch_model
from verl_shard.runtime.pipeline_window import in_flight_that_fits

N_GPUS = torch.cuda.device_count()
TWO = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
TWO |= {f"model.layers.{i}": int(i >= 2) for i in range(4)}


def causal() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_qwen2(), attn_implementation="sdpa")


def batches(n: int = 4, padded: bool = False) -> list[dict[str, Any]]:
    made = []
    for number in range(n):
        ids = torch.randint(1, 500, (2, 6), generator=torch.Generator().manual_seed(number))
        labels = ids.clone()
        if padded:
            labels[0, : number + 1] = -100
        made.append({"input_ids": ids, "labels": labels, "use_cache": False})
    return made


def dispatched(links: FakeLinks, **options: Any) -> Any:
    return dispatch_model(causal(), TWO, links=links, **options)


def gradients_like(model: Any, other: Any) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None, name
        assert (a.grad - b.grad).abs().max() < 1e-6, name


@pytest.mark.parametrize(("in_flight", "most"), [("auto", 2), (1, 1), (2, 2), (3, 3), (9, 4)])
def test_gradients_are_those_of_one_after_the_other(in_flight: Any, most: int) -> None:
    links = FakeLinks()
    model, one = dispatched(links), causal()
    with links:
        ran = run_micro_batches(model, batches(), in_flight=in_flight)
    losses = [one(**batch).loss for batch in batches()]
    sum(losses).backward()  # type: ignore[union-attr]
    assert ran.in_flight == most
    torch.testing.assert_close(torch.stack(ran.losses), torch.stack(losses).detach())
    assert ran.loss is not None
    assert ran.loss.item() == pytest.approx(sum(losses).item(), abs=1e-5)  # type: ignore[union-attr]
    gradients_like(model, one)
    with links:
        run_micro_batches(model, batches(), in_flight=in_flight)  # is added
    sum(one(**batch).loss for batch in batches()).backward()  # type: ignore[union-attr]
    gradients_like(model, one)


def test_forwards_are_issued_ahead_of_losses_and_results_are_in_order() -> None:
    links = FakeLinks()
    model, one = dispatched(links), causal()
    log: list[str] = []
    model.model.layers[0].register_forward_hook(lambda *_: log.append("forward"))
    model.model.layers[0].register_full_backward_hook(lambda *_: log.append("backward"))

    def loss_fn(output: Any, batch: Mapping[str, Any]) -> Any:
        log.append("loss")
        return output.logits.square().mean(), int(batch["input_ids"][0, 0])

    with links:
        ran = run_micro_batches(model, batches(5), loss_fn, in_flight=3)
    losses = [at for at, entry in enumerate(log) if entry == "loss"]
    for number, at in enumerate(losses):
        before = Counter(log[:at])
        assert before["forward"] >= min(5, number + 2)
        assert before["backward"] <= number
    for at in range(len(log)):
        assert log[:at].count("forward") - log[:at].count("backward") <= 3
    assert ran.results == tuple(int(batch["input_ids"][0, 0]) for batch in batches(5))
    for batch in batches(5):
        one(**batch).logits.square().mean().backward()
    gradients_like(model, one)


def test_losses_are_weighed_by_tokens_evenly_or_as_said() -> None:
    # In a micro-batch of 2 x 6, 10 labels follow something; with the first n of a row ignored, n - 1 fewer count.
    assert [int(count_tokens(batch)) for batch in batches(padded=True)] == [10, 9, 8, 7]
    assert count_tokens({"input_ids": torch.ones(3, 5), "attention_mask": torch.tensor([[0, 1], [1, 1]])}) == 3
    assert count_tokens({"input_ids": torch.ones(3, 5)}) == 15
    whole = causal()
    together = {key: torch.cat([batch[key] for batch in batches(padded=True)]) for key in ("input_ids", "labels")}
    whole(**together).loss.backward()
    for options in ({"scale": "tokens"}, {"scale": [10 / 34, 9 / 34, torch.tensor(8 / 34), 7 / 34]}):
        links = FakeLinks()
        model = dispatched(links)
        given = [
            {key: links.give(v, "gpu0") if key != "use_cache" else v for key, v in b.items()}
            for b in batches(padded=True)
        ]
        with links:
            ran = run_micro_batches(model, given, **options)  # type: ignore[arg-type]
        gradients_like(model, whole)
        assert ran.loss is not None
        assert ran.loss.item() == pytest.approx(whole(**together).loss.item(), abs=1e-5)
    links = FakeLinks()
    model, one = dispatched(links), causal()
    with links:
        run_micro_batches(model, batches(), scale="mean")
    for batch in batches():
        (one(**batch).loss / 4).backward()
    gradients_like(model, one)


def test_gradients_are_clipped_to_a_norm_over_all_devices() -> None:
    links = FakeLinks()
    model, one = dispatched(links), causal()
    ran = run_micro_batches(model, batches(), max_grad_norm=0.5)
    for batch in batches():
        one(**batch).loss.backward()
    norm = torch.cat([p.grad.double().flatten() for p in one.parameters()]).norm()
    assert norm > 1
    assert ran.grad_norm is not None
    assert ran.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for parameter in one.parameters():
        parameter.grad *= 0.5 / norm  # type: ignore[operator]
    gradients_like(model, one)
    assert clip_gradients(model, 9.0).item() == pytest.approx(0.5, rel=1e-4)
    gradients_like(model, one)


def test_scoring_overlaps_and_keeps_no_graph() -> None:
    links = FakeLinks()
    model, one = dispatched(links), causal()
    log: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: log.append("forward"))

    def score(output: Any, batch: Mapping[str, Any]) -> Any:
        assert not output.logits.requires_grad
        log.append("score")
        return output.logits.sum()

    with links:
        ran = run_micro_batches(model, batches(), score, forward_only=True, in_flight=2)
    assert log == ["forward", *["forward", "score"] * 3, "score"]
    assert (ran.losses, ran.loss, ran.grad_norm, ran.in_flight) == ((), None, None, 2)
    expected = [one(**batch).logits.sum().item() for batch in batches()]
    assert [result.item() for result in ran.results] == pytest.approx(expected, abs=1e-3)
    outputs = run_micro_batches(model, batches(), forward_only=True).results
    torch.testing.assert_close(outputs[3].logits, one(**batches()[3]).logits)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_on_one_device_runs_one_after_the_other() -> None:
    model, one = causal(), causal()
    assert run_micro_batches(model, batches()).in_flight == 1
    for batch in batches():
        one(**batch).loss.backward()
    gradients_like(model, one)


def kept_by_one() -> dict[str, int]:
    """Bytes that the graph of one micro-batch holds on each device, counted from outside."""
    links = FakeLinks()
    model = dispatched(links)
    with links:
        before = dict(links.bytes)
        batch = batches()[0]  # its copies live as long as it does
        output = model(**batch)
        kept = {device: links.bytes[device] - before[device] for device in ("gpu0", "gpu1")}
    assert output.loss.requires_grad
    return kept


def test_in_flight_is_what_the_memory_holds_of_what_each_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_window, "_A_STAGE", 2)
    # GPU 0 holds all that are in flight. GPU 1 holds those whose forward has come so far: of 2 one, of 3 two.
    kept = kept_by_one()
    assert min(kept.values()) > 10_000
    for memory, most in (
        ({0: 2 * kept["gpu0"], 1: "1GiB"}, 2),
        ({0: 3 * kept["gpu0"] - 4096}, 2),
        ({1: 2 * kept["gpu1"]}, 3),
        ({1: 2 * kept["gpu1"] - 4096}, 2),
        ({0: 2 * kept["gpu0"] - 4096, 1: 2 * kept["gpu1"]}, 1),
        (1, 1),
        ("1GiB", 4),
    ):
        links = FakeLinks()
        model = dispatched(links)
        with links:
            assert run_micro_batches(model, batches(6), memory=memory).in_flight == most, memory  # type: ignore[arg-type]
    links = FakeLinks(kept={"gpu0": 5 * kept["gpu0"]})  # half of what is left holds two and a half
    model = dispatched(links)
    with links:
        assert run_micro_batches(model, batches()).in_flight == 2


def test_in_flight_is_what_the_memory_holds_by_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_window, "_A_STAGE", 2)
    spec, module = read_model(causal())
    made = trace(spec, module, PassSpec(batch_size=2, seq_len=6, precision="fp32"))
    sizes = made.recording.kept.tolist()
    # Embedding and rotations, 4 layers, norm, head: what the map puts on GPU 0 is the first three.
    devices = list(spec.devices_of(TWO))
    on_0 = sum(size for size, device in zip(sizes, devices, strict=True) if device == 0)
    # GPU 1 has copies of the hidden states and of both rotations, the latter of 6 x 16 numbers in one piece of 512 bytes.
    on_1 = sum(sizes) - on_0 + 4 * 2 * 6 * 64 + 2 * 512
    assert [made.kept([i for i, at in enumerate(devices) if at == device]) for device in (0, 1)] == [on_0, on_1]
    assert 0 < on_0 < on_1
    for memory, most in (
        ({0: 3 * on_0}, 3),
        ({0: 3 * on_0 - 1}, 2),
        ({0: 9 * on_0, 1: on_1}, 2),
        ({0: 9 * on_0, 1: 3 * on_1 - 1}, 3),
        ({0: 9 * on_0, 1: 3 * on_1}, 4),
        ({0: 1}, 1),
        ({1: on_1 - 1}, 1),
    ):
        assert in_flight_that_fits(made, devices, memory) == most, memory
    assert in_flight_that_fits(made, devices, {0: 2 * on_0, 1: 0}, beside_one=True) == 2
    assert in_flight_that_fits(made, devices, {0: 2 * on_0, 1: on_1}, beside_one=True) == 3
    links = FakeLinks()
    model = dispatched(links)
    with links:
        assert run_micro_batches(model, batches(), trace=made, memory=3 * on_0).in_flight == 2 + (on_1 <= 1.5 * on_0)
        assert run_micro_batches(model, batches(), trace=made, memory={0: 2 * on_0}).in_flight == 2


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_host_waits_for_no_device(forward_only: bool) -> None:
    """The model's own code included, for inputs without padding."""
    links = FakeLinks()
    model = dispatched(links)
    given = [{key: links.give(v, "gpu0") if key != "use_cache" else v for key, v in b.items()} for b in batches()]
    options: dict[str, Any] = {} if forward_only else {"scale": "tokens"}
    with links:
        run_micro_batches(model, given, forward_only=forward_only, **options)
        assert links.waits == []
        float(links.give(torch.ones(2), "gpu0").sum())
    assert len(links.waits) == 1


def test_what_cannot_be_meant_is_refused_all_at_once() -> None:
    model = causal()
    with pytest.raises(ConfigError) as caught:
        run_micro_batches(model, [], in_flight=0, memory="much", scale="median", max_grad_norm=0.0)  # type: ignore[arg-type]
    assert {finding.code for finding in caught.value.findings} == {
        "batches", "in-flight", "memory", "scale", "max-grad-norm", "not-a-memory-size",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="nothing to scale or clip"):
        run_micro_batches(model, batches(), forward_only=True, max_grad_norm=1.0)
    with pytest.raises(ConfigError, match="4 micro-batches"):
        run_micro_batches(model, batches(), scale=[1.0, 2.0])
    with pytest.raises(ConfigError, match="a tensor of one element is needed"):
        run_micro_batches(model, batches(), lambda output, batch: output.logits)
    with pytest.raises(ConfigError, match="put labels into the batches"):
        run_micro_batches(model, [{"input_ids": batch["input_ids"]} for batch in batches()])


@pytest.mark.skipif(N_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_two_gpus(checkpointing: bool) -> None:
    one, model = causal().to("cuda:0"), dispatch_model(causal(), TWO)
    for each in (one, model):
        if checkpointing:
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.train()
    for _ in range(5):
        ran = run_micro_batches(model, batches(), scale="tokens", max_grad_norm=1.0)
        plain = run_micro_batches(one, [{k: v if k == "use_cache" else v.to("cuda:0") for k, v in b.items()} for b in batches()],
                                  scale="tokens", max_grad_norm=1.0)  # fmt: skip
        assert ran.in_flight == 2
        assert ran.grad_norm is not None
        torch.testing.assert_close(ran.grad_norm.cpu(), plain.grad_norm.cpu(), rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
        for a, b in zip(model.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a.grad.to("cuda:0"), b.grad, rtol=1e-4, atol=1e-6)
