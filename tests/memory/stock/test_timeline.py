"""Peaks around a traced micro-batch against torch's own FSDP over four ranks that exist in name only, on the host."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench.host_meter import HostMeter
from shapes import small_qwen2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from verl_shard.memory.stand_ins import as_on_gpu
from verl_shard.memory.stock import outputs
from verl_shard.memory.stock.micro_batch import MicroBatch, record_micro_batch
from verl_shard.memory.stock.timeline import Sharding, peak_of
from verl_shard.memory.stock.units import units_of
from verl_shard.models.read import read_model

RANKS, SEQUENCES, LENGTH = 4, 2, 30


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """Collectives that do nothing, and so leave only FSDP's own memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def _fsdp2(model: Any, mesh: Any, *, tied: bool) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    own = list(model.model.layers) + ([] if tied else [model.model.embed_tokens, model.lm_head])
    for module in (*own, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def _fsdp(model: Any, mesh: Any) -> Any:
    layers = {type(model.model.layers[0])}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.float32),
        device_mesh=mesh,
        use_orig_params=False,
    )


def _micro_batch(model: Any) -> None:
    """As verl runs one, packed, with log-probabilities taken row by row; trained where gradients are on."""
    n = SEQUENCES * LENGTH
    with torch.autocast("cpu", torch.bfloat16):
        out = model(
            input_ids=torch.zeros(1, n, dtype=torch.long),
            position_ids=torch.arange(n)[None],
            attention_mask=torch.ones(1, 1, n, n, dtype=torch.bool),
            use_cache=False,
        )
        log_probs = outputs.RowLogProbs.apply(out.logits.flatten(0, 1), torch.float32)  # type: ignore[no-untyped-call]
        loss = torch.exp(log_probs - log_probs.detach()).mean()
    del out, log_probs
    if torch.is_grad_enabled():
        loss.backward()  # type: ignore[no-untyped-call]


def _nothing(*_: Any) -> None: ...


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "tied", "held", "checkpointing"),
    [
        ("fsdp2", True, torch.float32, True),
        ("fsdp2", False, torch.bfloat16, False),
        ("fsdp", True, torch.float32, True),
        ("fsdp", False, torch.bfloat16, False),
    ],
)
def test_peaks_are_those_of_torchs_fsdp(
    backend: Any, tied: bool, held: torch.dtype, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_qwen2(
        hidden_size=256, intermediate_size=640, vocab_size=2048, tie_word_embeddings=tied, num_hidden_layers=3
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=held, attn_implementation="eager")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh("cpu", (RANKS,))
    model = _fsdp2(model, mesh, tied=tied) if backend == "fsdp2" else _fsdp(model, mesh)
    model.train()
    meter = HostMeter()

    def more(run: Callable[[], None]) -> int:
        gc.collect()
        before = meter.peak = meter.now
        with as_on_gpu(_nothing, _nothing), meter.on():
            run()
        return meter.peak - before

    spec, module = read_model(config, task="causal-lm", dtype=held)
    units = units_of(spec, backend, tied=tied)
    sharding = Sharding(backend=backend, ranks=RANKS, held=held.itemsize, gathered=2)

    def predicted(*, training: bool, later: bool = False) -> int:
        wanted = MicroBatch(
            sequences=SEQUENCES, length=LENGTH, packed=True, training=training, flash=False, masked=True,
            gradient_checkpointing=training and checkpointing, attn_implementation="eager",
        )  # fmt: skip
        return peak_of(record_micro_batch(spec, module, wanted), units, sharding, later=later).n_bytes

    for _ in range(2):  # what the first use makes and keeps is not looked at
        first = more(lambda: _micro_batch(model))
        later = more(lambda: _micro_batch(model))
        with torch.no_grad():
            score = more(lambda: _micro_batch(model))
        for parameter in model.parameters():
            parameter.grad = None
    gradients = sharding.held * sharding.shard(units.n_trained)
    root = 2 * units.units[units.root].n_params
    stays = root if backend == "fsdp" else 0  # of the forward before, and so there already
    assert first == pytest.approx(predicted(training=True) - stays, rel=2e-3)
    assert later == pytest.approx(predicted(training=True, later=True) - gradients, rel=2e-3)
    assert score == pytest.approx(predicted(training=False), rel=2e-3)
