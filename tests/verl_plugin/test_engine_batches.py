"""Micro-batches in flight on the engine, over devices that the host plays: numbers of one device, and no device waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_links import FakeLinks
from tensordict import TensorDict
from transformers import masking_utils
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_shard.common.errors import ConfigError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import RUN_DIR_VARIABLE
from verl_shard.models.packed import PACKED
from verl_shard.runtime.packed import packed_sdpa
from verl_shard.runtime.pipeline import dispatch_model
from verl_shard.verl_plugin.config import DeviceMapEngineConfig
from verl_shard.verl_plugin.engine import ENGINES
from verl_shard.verl_plugin.engine_batches import MicroBatches
from verl_shard.verl_plugin.engine_inputs import Reading, prepare

ROWS = [
    [5, 9, 3, 44, 17, 8],
    [7, 7, 21],
    [90, 4, 55, 31, 12, 6, 80, 11],
    [64, 2],
    [3, 9, 9],
    [8] * 7,
    [1, 2, 3, 4],
    [6, 5],
]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    ENGINES.clear()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def _engine(folder: Path, kind: str = "language_model", *, model: Any = (), **engine: Any) -> Any:
    options = {
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "sdpa"},
        **dict(model),
    }
    made = EngineRegistry.new(
        model_type=kind,
        backend="device_map",
        model_config=HFModelConfig(path=str(folder), model_type=kind, load_tokenizer=False, **options),
        engine_config=DeviceMapEngineConfig(role="critic" if kind == "value_model" else "actor", **engine),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=10, lr_warmup_steps=0, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def _laid_out(engine: Any, layers: tuple[int, ...] = (0, 0, 1, 1)) -> FakeLinks:
    """The engine's module over devices that the host plays."""
    links, head = FakeLinks(), "score" if hasattr(engine.module, "score") else "lm_head"
    placed = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": layers[-1], head: layers[-1]}
    if head == "score":
        placed["dropout"] = layers[-1]
    placed |= {f"model.layers.{i}": device for i, device in enumerate(layers)}
    dispatch_model(engine.module, placed, links=links, force_hooks=True)
    return links


def _batch(micro: int = 2, *, packed: bool = False, tokens: int | None = None) -> TensorDict:
    """tokens: of a micro-batch, which verl then makes of as many sequences as fit."""

    def nested(rows: list[Any]) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested(ROWS),
            "position_ids": nested([list(range(len(row))) for row in ROWS]),
            "loss_mask": nested([[1] * len(row) for row in ROWS]),
        }
    )
    size = {"max_token_len_per_gpu": tokens} if tokens else {"micro_batch_size_per_gpu": micro}
    tu.assign_non_tensor(
        data, use_dynamic_bsz=tokens is not None, use_remove_padding=packed, temperature=0.9, pad_token_id=0,
        use_fused_kernels=False, calculate_entropy=True, **size,
    )  # fmt: skip
    return data


def _loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Waits for nothing. Of each token and its place in the micro-batch's data, so that rows mixed up would show."""
    del dp_group
    value = model_output.get("log_probs", model_output.get("values"))
    assert value is not None
    weights = data["input_ids"].values().float()
    loss = -(value.values() * weights).sum() / 100
    if "entropy" in model_output:
        loss = loss + model_output["entropy"].values().square().sum() / 50
    return loss, {"rows": len(data)}


def _gradients(engine: Any, batch: TensorDict) -> tuple[dict[str, torch.Tensor], Any]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        made = engine.forward_backward_batch(batch, _loss)
        return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}, made


@pytest.mark.parametrize(
    "batch", [{}, {"packed": True}, {"micro": 1}, {"tokens": 16}, {"tokens": 12, "packed": True}], ids=str
)
@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_gradients_and_scores_are_those_of_one_device(batch: dict[str, Any], kind: str, folder: Path) -> None:
    one, engine = _engine(folder, kind), _engine(folder, kind)
    links = _laid_out(engine)
    expected, made = _gradients(one, _batch(**batch))
    with links:
        found, ours = _gradients(engine, _batch(**batch))
    assert found.keys() == expected.keys()
    assert max((found[name] - expected[name]).abs().max().item() for name in found) < 1e-6
    assert ours["loss"] == pytest.approx(made["loss"], abs=1e-5)
    assert ours["metrics"] == made["metrics"]
    assert ours["model_output"] == {}
    assert (one._batches().most, engine._batches().most) == (1, min(2, len(made["loss"])))

    with one.eval_mode():
        expected_output = one.infer_batch(_batch(**batch))
    with links, engine.eval_mode():
        output = engine.infer_batch(_batch(**batch))
    assert output["loss"] == expected_output["loss"] == [1.0] * len(made["loss"])
    for name, values in expected_output["model_output"].items():
        assert [len(row) for row in values.unbind()] == [len(row) for row in ROWS]
        torch.testing.assert_close(output["model_output"][name].values(), values.values(), atol=1e-5, rtol=1e-4)


def test_passes_do_without_attention_that_is_planned_for_each_shape(folder: Path) -> None:
    """In the forward, where a block is computed again, and where nothing is learnt; and outside it is as it was."""
    engine = _engine(folder, model={"enable_gradient_checkpointing": True})
    seen: list[bool] = []
    engine.module.model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    )
    _gradients(engine, _batch(4))
    with engine.eval_mode():
        engine.infer_batch(_batch(4))
    assert seen == [False] * (2 + 2 + 2)
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_checkpointing_adapters_and_mixed_precision_over_two_devices(folder: Path) -> None:
    for options in ({"model": {"enable_gradient_checkpointing": True}}, {"precision": "bf16-mixed"}):
        one, engine = _engine(folder, **options), _engine(folder, **options)  # type: ignore[arg-type]
        links = _laid_out(engine)
        expected, _ = _gradients(one, _batch())
        with links:
            found, _ = _gradients(engine, _batch())
        distance = 1e-6 if "model" in options else 2e-2
        assert max((found[name] - expected[name]).abs().max().item() for name in found) < distance


def _seen(engine: Any, links: FakeLinks) -> list[int]:
    """How often the host had waited for a device when each forward began."""
    seen: list[int] = []
    engine.module.model.embed_tokens.register_forward_pre_hook(lambda *_: seen.append(len(links.waits)))
    return seen


def _as_a_kernel(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any) -> Any:
    """Takes the ends of sequences as they are, like a GPU's kernel; on the host attention asks for them."""
    if mask is None:
        return packed_sdpa(module, query, key, value, mask, **_)
    assert mask.dtype == torch.int32
    ends = mask.view(-1)
    return query.transpose(1, 2) * ends[-1] / ends[-1], None


@pytest.mark.parametrize("layers", [(0, 0, 1, 1), (0, 0, 0, 0)], ids=["two", "one"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_the_host_waits_for_no_device_between_forwards(
    packed: bool, layers: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(folder, model={"use_remove_padding": True} if packed else {})
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, PACKED, _as_a_kernel)
    links = _laid_out(engine, layers)
    seen = _seen(engine, links)
    with links, engine.eval_mode():
        engine.infer_batch(_batch(packed=packed))
    assert seen == [0] * 4
    assert links.waits == []
    seen.clear()
    with links:
        _gradients(engine, _batch(packed=packed))
    assert seen == [0] * 4
    assert len(links.waits) == 4, "the losses, after all that was issued"


@pytest.mark.parametrize("layers", [None, (0, 0, 1, 1)], ids=["one", "two"])
def test_whether_rows_are_packed_is_asked_only_of_packed_ones(
    layers: tuple[int, ...] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    plain = masking_utils.find_packed_sequence_indices

    def find(position_ids: torch.Tensor) -> Any:
        asked.append(position_ids.flatten().tolist())
        return plain(position_ids)

    engine = _engine(folder)
    links: Any = nullcontext() if layers is None else _laid_out(engine, layers)
    reading = engine._batches()._reading
    engine._batches()._reading = replace(reading, told=None)  # as of attention that finds ends by itself
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)
    with links:
        padded, _ = _gradients(engine, _batch(4))
    assert asked == []
    with links:
        packed, _ = _gradients(engine, _batch(4, packed=True))
    rows = [len(row) for row in ROWS]
    assert asked == [[i for n in part for i in range(n)] for part in (rows[:4], rows[4:])]
    assert max((padded[name] - packed[name]).abs().max().item() for name in padded) < 1e-5


def test_a_wait_would_be_seen(folder: Path) -> None:
    engine = _engine(folder)
    links = _laid_out(engine)
    seen = _seen(engine, links)
    engine.module.lm_head.register_forward_hook(lambda module, args, output: output[0, 0, 0].item() and None)
    with links, engine.eval_mode():
        engine.infer_batch(_batch())
    assert seen == [0, 1, 2, 3]


class Without:
    """Of verl's engine what makes a model's inputs, around a module."""

    pad_to_length = use_ulysses_sp = False

    def __init__(self, module: Any) -> None:
        self.module = module
        self.prepare_model_inputs = partial(FSDPEngineWithLMHead.prepare_model_inputs, self)

    def _get_packed_pad_size(self, length: int) -> int:
        return 0

    def autocast(self) -> Any:
        return nullcontext()


def test_a_mask_is_left_out_only_where_it_masks_nothing_that_counts(
    folder: Path, small_config: Callable[..., Any]
) -> None:
    causal = transformers.AutoModelForCausalLM.from_pretrained(folder)
    both_ways = transformers.AutoModelForMaskedLM.from_config(small_config("bert"))
    assert (Reading.of(causal).causal, Reading.of(both_ways).causal) == (True, False)
    batch = _batch()
    for reading, rows, keys in (
        (Reading(True, None, True), slice(0, 2), {"input_ids"}),
        (Reading(False, None, True), slice(0, 2), {"input_ids", "attention_mask", "position_ids"}),
        (Reading(False, None, True), slice(5, 6), {"input_ids"}),
    ):
        part = tu.index_select_tensor_dict(batch, list(range(8))[rows])
        tu.assign_non_tensor(part, use_remove_padding=False, temperature=0.9, pad_token_id=0)
        made = prepare(Without(causal), part, reading, None)
        assert made.inputs.keys() == keys
        lengths = [len(row) for row in ROWS[rows]]
        if len(lengths) == 2:  # 6 and 3 tokens
            assert made.rows is not None
            assert made.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        else:
            assert made.rows is None
    part = tu.index_select_tensor_dict(batch, [0, 1])
    tu.assign_non_tensor(part, use_remove_padding=False, temperature=0.9, pad_token_id=0)
    part["position_ids"] = torch.nested.nested_tensor(
        [torch.arange(6) + 2, torch.arange(3)], layout=torch.jagged
    )  # such as of a prompt that was cut on the left
    assert "position_ids" in prepare(Without(causal), part, Reading(True, None, True), None).inputs


def test_as_many_are_in_flight_as_a_plan_leaves_room_for(folder: Path) -> None:
    engine = _engine(folder)
    links = _laid_out(engine)

    def most(**options: Any) -> int:
        batches = MicroBatches(engine, **options)
        with links, engine.train_mode():
            batches.run(_batch(1), _loss, forward_only=False)
        return batches.most

    room = 2**30
    assert most() == most(free={0: room, 1: room}) == 2  # one for each device
    assert most(free={0: 0, 1: room}) == 1
    assert most(free={0: room, 1: 0}) == 2  # the last device holds one as it is
    assert most(in_flight=3, free={0: 0, 1: 0}) == 3
    engine.module.get_base_model = lambda: engine.module  # as adapters have it, which are not traced
    assert most(free={0: room, 1: 0}) == 2


def test_the_plan_and_the_configuration_say_how_many(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    engine = _engine(folder, in_flight=2)
    with _laid_out(engine):
        _gradients(engine, _batch())
    (line,) = read_json_lines(tmp_path / "memory.jsonl")
    assert (line["phase"], line["in_flight"]) == ("train", 2)
    engine._planned = {"settings": {"in_flight": 3}}
    assert engine._batches().in_flight == 2
    engine = _engine(folder)
    engine._planned = {"settings": {"in_flight": 3}}
    assert engine._batches().in_flight == 3
    for bad in (0, True, "many"):
        with pytest.raises(ConfigError, match="not a number of micro-batches"):
            DeviceMapEngineConfig(in_flight=bad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("logits", ["full", "responses"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_gpu_is_waited_for_by_no_forward(packed: bool, logits: str, folder: Path) -> None:
    from verl_shard.runtime.packed import use_packed_sdpa

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda:0")
    if packed:
        use_packed_sdpa(model)
    engine: Any = SimpleNamespace(module=model, prepare_model_inputs=Without(model).prepare_model_inputs)
    engine.logits, engine.autocast = logits, nullcontext
    batches = MicroBatches(engine)
    data = _batch(8, packed=packed)
    for name, part in (("prompts", slice(1)), ("responses", slice(1, None))):
        rows = [torch.tensor(row[part]) for row in ROWS]
        data[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    batches.forward(data, None)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            batches.forward(data, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
