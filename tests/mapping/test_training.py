"""Maps for training: cut by the traced peak, and as low as any cut of the chain allows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from shapes import small_qwen2

from verl_shard import build_device_map, estimate_memory
from verl_shard.common.errors import ConfigError, DoesNotFitError
from verl_shard.mapping.costs import peak_cost
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.memory.in_flight import Stage
from verl_shard.memory.passes import PassSpec
from verl_shard.memory.trace import Trace, trace
from verl_shard.models.meta import config_for
from verl_shard.models.read import read_spec, spec_of_config
from verl_shard.models.spec import ModelSpec

_GB = 10**9


def _traced(config: Any, wanted: PassSpec) -> tuple[ModelSpec, Trace]:
    spec, module = spec_of_config(config_for(config, "causal-lm"), name="model", task="causal-lm", dtype=torch.float32)
    return spec, trace(spec, module, wanted)


def _cuts(spec: ModelSpec, device_map: DeviceMap) -> list[int]:
    path = spec.devices_of(device_map)
    return [0, *(i for i, (a, b) in enumerate(pairwise(path), 1) if a != b), len(path)]


def _small(n_layers: int, **fields: Any) -> Any:
    return small_qwen2(**{"num_hidden_layers": n_layers, "vocab_size": 3000, **fields})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("n_layers", "n_gpus"), [(3, 2), (5, 3), (8, 3)])
def test_no_cut_is_lower(n_layers: int, n_gpus: int, checkpointing: bool, tied: bool) -> None:
    """Against every cut of the chain: none has a lower peak, and of those with that peak none a faster slowest GPU."""
    config = _small(n_layers, tie_word_embeddings=tied)
    fields: dict[str, Any] = {"batch_size": 4, "seq_len": 128, "gradient_checkpointing": checkpointing}
    device_map = build_device_map(config, n_gpus, purpose="training", **fields)
    spec, traced = _traced(config, PassSpec(**fields))
    flops = [forward + backward for forward, backward in traced.flops]
    alone = [block.stands_alone for block in spec.blocks]

    def value(cuts: tuple[int, ...]) -> tuple[int, int]:
        runs = list(pairwise(cuts))
        return max(traced.peak(i, j) for i, j in runs), max(sum(flops[i:j]) for i, j in runs)

    possible = [
        (0, *inner, traced.n_blocks)
        for inner in combinations(range(1, traced.n_blocks), n_gpus - 1)
        if all(any(alone[i:j]) for i, j in pairwise((0, *inner, traced.n_blocks)))
    ]
    assert value(tuple(_cuts(spec, device_map))) == min(map(value, possible))
    assert max(device_map.loads.values()) == value(tuple(_cuts(spec, device_map)))[0]


@pytest.mark.parametrize("name", ["llama-3.1-70b", "gemma-2-9b", "mixtral-8x7b"])
def test_no_move_of_a_block_is_lower(name: str, published: Callable[[str], Any]) -> None:
    device_map = build_device_map(published(name), 8, purpose="training", batch_size=2, seq_len=1024)
    spec, traced = _traced(published(name), PassSpec(batch_size=2, seq_len=1024))
    cuts = _cuts(spec, device_map)
    best = max(traced.peak(i, j) for i, j in pairwise(cuts))
    assert best == max(device_map.loads.values())
    for index in range(1, 8):
        for step in (-1, 1):
            moved = [*cuts[:index], cuts[index] + step, *cuts[index + 1 :]]
            if all(i < j for i, j in pairwise(moved)):
                assert max(traced.peak(i, j) for i, j in pairwise(moved)) >= best


def test_it_is_lower_than_a_map_that_is_even_in_weights(published: Callable[[str], Any]) -> None:
    """Qwen2-7B on four GPUs, 4 x 2048 tokens, bf16: the head's GPU pays for the logits."""
    config = published("qwen2-7b")
    fields: dict[str, Any] = {"batch_size": 4, "seq_len": 2048, "precision": "bf16"}
    spec, traced = _traced(config, PassSpec(**fields))
    by_weight = _cuts(spec, build_device_map(config, 4))
    by_peak = build_device_map(config, 4, purpose="training", **fields)
    weight_peak = max(traced.peak(i, j) for i, j in pairwise(by_weight))
    assert max(by_peak.loads.values()) < 0.9 * weight_peak
    assert by_peak.purpose == "training"
    assert "peak of training (4 x 2048 tokens, bf16, adamw)" in by_peak.report()


@pytest.mark.parametrize(
    ("n_layers", "n_gpus", "in_flight", "tied"), [(4, 2, 2, False), (5, 3, 3, True), (5, 3, 2, False), (4, 2, 4, True)]
)
def test_no_cut_is_lower_in_a_pipeline(n_layers: int, n_gpus: int, in_flight: int, tied: bool) -> None:
    """Each GPU counts the micro-batches of its own place; against every cut into as many runs, or fewer."""
    config = _small(n_layers, tie_word_embeddings=tied)
    fields: dict[str, Any] = {"batch_size": 4, "seq_len": 128, "in_flight": in_flight, "accumulating": True}
    device_map = build_device_map(config, n_gpus, purpose="training", **fields)
    spec, traced = _traced(config, PassSpec(**fields))
    alone = [block.stands_alone for block in spec.blocks]

    def loads(cuts: tuple[int, ...]) -> list[int]:
        return [traced.peak(i, j, Stage(k, len(cuts) - 1)) for k, (i, j) in enumerate(pairwise(cuts))]

    possible = [
        (0, *inner, traced.n_blocks)
        for n in range(n_gpus)
        for inner in combinations(range(1, traced.n_blocks), n)
        if all(any(alone[i:j]) for i, j in pairwise((0, *inner, traced.n_blocks)))
    ]
    assert list(device_map.loads.values()) == loads(tuple(_cuts(spec, device_map)))
    assert max(device_map.loads.values()) == min(max(loads(cuts)) for cuts in possible)
    whole = build_device_map(config, 1, purpose="training", **fields)
    assert whole.loads == {0: traced.peak(0, traced.n_blocks)}


@pytest.mark.parametrize(
    ("n_gpus", "in_flight", "checkpointing", "blocks"),
    [
        (2, 2, False, [13, 15]),
        (4, 4, False, [5, 7, 9, 7]),
        (4, 4, True, [7, 9, 9, 3]),
    ],
)
def test_in_a_pipeline_it_is_no_higher_than_a_map_that_is_even_in_weights(
    n_gpus: int, in_flight: int, checkpointing: bool, blocks: list[int], published: Callable[[str], Any]
) -> None:
    """Qwen2-7B, micro-batches of 2 x 1024 tokens, bf16, SGD, by estimate_memory. One cost for all GPUs put 16 and 12 blocks
    on two with two in flight: 32.2 GB, where the map that is even in weights takes 28.5."""
    config = published("qwen2-7b")
    fields: dict[str, Any] = {"batch_size": 2, "seq_len": 1024, "precision": "bf16", "optimizer": "sgd"}
    fields |= {"in_flight": in_flight, "accumulating": True, "gradient_checkpointing": checkpointing}
    by_peak = build_device_map(config, n_gpus, purpose="training", **fields)
    assert [stage.n_blocks for stage in by_peak.stages] == blocks
    ours, even = (
        estimate_memory(config, device_map=device_map, **fields)
        for device_map in (by_peak, build_device_map(config, n_gpus))
    )
    assert ours.peak <= even.peak
    if (n_gpus, in_flight, checkpointing) == (2, 2, False):
        assert (ours.peak / _GB, even.peak / _GB) == (pytest.approx(27.63, abs=0.01), pytest.approx(28.47, abs=0.01))


def test_a_piece_that_fits_where_fewer_micro_batches_wait() -> None:
    """What a piece needs at least, by which it is said that no number of GPUs is enough."""
    config = _small(2)
    fields: dict[str, Any] = {"batch_size": 4, "seq_len": 512, "in_flight": 4, "accumulating": True}
    _, traced = _traced(config, PassSpec(**fields))
    cost = peak_cost(traced, PassSpec(**fields))
    assert traced.n_blocks == 5
    # The second layer is the third of four at best, or the last of three: two of four micro-batches are there.
    lowest = traced.peak(2, 3, Stage(2, 4))
    assert traced.peak(2, 3, Stage(0, 3)) > traced.peak(2, 3, Stage(1, 4)) > lowest
    assert cost.least(2) == lowest == traced.peak(2, 3, Stage(2, 3))
    assert cost.least(0) == traced.peak(0, 1), "all of them"


def test_limits_hold_for_the_peak(published: Callable[[str], Any]) -> None:
    config = published("qwen2-0.5b")
    fields: dict[str, Any] = {"purpose": "training", "batch_size": 2, "seq_len": 1024}
    free = build_device_map(config, 2, **fields)
    low = max(free.loads.values())
    assert build_device_map(config, 2, max_memory={0: low, 1: low}, **fields).loads == free.loads
    with pytest.raises(
        DoesNotFitError, match="These need less: gradient checkpointing, a smaller batch_size"
    ) as caught:
        build_device_map(config, 2, max_memory={0: low - 1, 1: low - 1}, **fields)
    assert "peak of training (2 x 1024 tokens, bf16-mixed, adamw)" in str(caught.value)


def test_a_piece_larger_than_every_gpu(published: Callable[[str], Any]) -> None:
    with pytest.raises(DoesNotFitError, match="is never cut: no number of such GPUs is enough"):
        build_device_map(published("qwen2-7b"), 8, max_memory=dict.fromkeys(range(8), "400MiB"))


def test_without_lengths_it_is_one_sequence_of_what_the_model_takes() -> None:
    short = build_device_map(_small(3, max_position_embeddings=128), 2, purpose="training")
    assert short.counts == "peak of training (1 x 128 tokens, bf16-mixed, adamw)"


def test_a_spec_alone_cannot_be_traced() -> None:
    with pytest.raises(ConfigError, match="a ModelSpec has no module to run"):
        build_device_map(read_spec(_small(2)), 2, purpose="training")


@pytest.mark.parametrize("task", ["reward", "value", "process-reward"])
def test_other_tasks_train_too(task: str) -> None:
    device_map = build_device_map(_small(4), 2, purpose="training", task=task, seq_len=64)
    assert set(device_map.loads) == {0, 1}


def test_a_model_wrapped_by_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(_small(4))
    whole = build_device_map(model, 2, purpose="training", seq_len=64)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    device_map = build_device_map(adapted, 2, purpose="training", seq_len=64)
    assert all(name.startswith("base_model.model.") for name in device_map)
    assert max(device_map.loads.values()) < max(whole.loads.values())


def test_it_is_kept_in_a_file(tmp_path: Any) -> None:
    device_map = build_device_map(_small(4), 2, purpose="training", seq_len=64)
    device_map.save(tmp_path / "map.json")
    read = DeviceMap.load(tmp_path / "map.json")
    assert (read, read.loads, read.counts, read.purpose) == (
        device_map,
        device_map.loads,
        device_map.counts,
        "training",
    )


def test_a_picture(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    build_device_map(_small(4), 2, purpose="training", seq_len=64, max_memory={0: "1GiB"}).draw(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]


@pytest.mark.parametrize(
    ("name", "fields", "purpose", "blocks", "measured"),
    [
        ("qwen2-7b", {"batch_size": 4, "seq_len": 2048, "precision": "bf16"}, "training", [17, 11], (55.28, 52.84)),
        ("qwen2-7b", {"batch_size": 4, "seq_len": 2048, "precision": "bf16"}, "inference", [14, 14], (46.21, 61.91)),
        (
            "qwen2-7b",
            {"batch_size": 4, "seq_len": 2048, "precision": "bf16", "gradient_checkpointing": True},
            "training",
            [15, 13],
            (37.80, 37.18),
        ),
        (
            "qwen2-7b",
            {"batch_size": 4, "seq_len": 2048, "precision": "bf16", "gradient_checkpointing": True},
            "inference",
            [14, 14],
            (35.62, 38.54),
        ),
        ("llama-3.1-8b", {"batch_size": 2, "seq_len": 1024, "precision": "bf16"}, "training", [16, 16], (37.46, 37.46)),
        (
            "qwen2-0.5b",
            {"batch_size": 8, "seq_len": 1024, "precision": "bf16-mixed"},
            "training",
            [0, 24],
            (18.08, 17.10),
        ),
        (
            "qwen2-0.5b",
            {"batch_size": 8, "seq_len": 1024, "precision": "bf16-mixed"},
            "inference",
            [7, 17],
            (22.99, 12.18),
        ),
    ],
)
def test_peaks_of_two_h200s(
    name: str,
    fields: dict[str, Any],
    purpose: str,
    blocks: list[int],
    measured: tuple[float, float],
    published: Callable[[str], Any],
) -> None:
    """GiB on each of two GPUs in the third step of a real run over the map: torch 2.11, accelerate's dispatch, outputs
    left where they are made, AdamW, random weights."""
    config = published(name)
    device_map = build_device_map(config, 2, purpose=purpose, **(fields if purpose == "training" else {}))
    assert [stage.n_blocks for stage in device_map.stages] == blocks
    estimate = estimate_memory(config, device_map=device_map, **fields)
    assert [estimate.gpus[gpu].peak / 2**30 for gpu in (0, 1)] == pytest.approx(measured, rel=0.003)
