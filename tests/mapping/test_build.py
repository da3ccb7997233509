"""build_device_map on published models: complete, disjoint, contiguous, and as balanced as can be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from verl_shard import build_device_map, check_device_map
from verl_shard.bench.maps import zoo
from verl_shard.common.errors import ConfigError, DoesNotFitError
from verl_shard.common.notices import ShardNotice
from verl_shard.mapping.device_map import DeviceMap
from verl_shard.models.meta import build_on_meta
from verl_shard.models.read import read_spec
from verl_shard.models.spec import ModelSpec, device_of

_ZOO = zoo()


def _sound(spec: ModelSpec, device_map: DeviceMap) -> None:
    """Complete, disjoint, whole blocks, one run a device, every buffer, and loads that are what the tensors say."""
    assert check_device_map(spec, device_map) == []
    keys = list(device_map)
    assert not any(other != key and (not key or other.startswith(f"{key}.")) for key in keys for other in keys)
    path = spec.devices_of(device_map)
    assert len(list(dict.fromkeys(path))) == sum(a != b for a, b in zip(path, (None, *path), strict=False))
    assert device_map.loads == spec.loads(device_map)
    assert sum(device_map.loads.values()) == spec.n_bytes
    assert len({device_map[key] for key in keys}) > 1 or keys == [""]


def _smallest_maximum(sizes: Sequence[int], n_devices: int) -> int:
    """Another algorithm than ours: bisection on the answer, with a greedy fill as the test."""

    def fits(limit: int) -> bool:
        used, room = 1, limit
        for size in sizes:
            if size > limit:
                return False
            if size > room:
                used, room = used + 1, limit
            room -= size
        return used <= n_devices

    low, high = 0, sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@pytest.mark.parametrize("entry", _ZOO, ids=lambda entry: entry["name"])
def test_every_published_model_is_split_at_the_optimum(entry: dict[str, Any], published: Callable[[str], Any]) -> None:
    spec = read_spec(published(entry["name"]))
    sizes = [block.n_bytes for block in spec.blocks]
    for n_gpus in (1, 2, 3, 4, 5, 6, 8):
        device_map = build_device_map(spec, n_gpus)
        _sound(spec, device_map)
        best = _smallest_maximum(sizes, n_gpus)
        assert max(device_map.loads.values()) == best
        assert list(device_map.loads) == list(range(n_gpus)), "no GPU is left empty"
        assert all(device_map.loads.values())

        tight = {gpu: int(1.1 * spec.n_bytes / n_gpus) for gpu in range(n_gpus)}
        if best <= tight[0]:
            assert build_device_map(spec, n_gpus, max_memory=tight) == device_map
        else:
            with pytest.raises(DoesNotFitError):
                build_device_map(spec, n_gpus, max_memory=tight)


_7B = ("qwen2-7b", 3584, 18944, 4 * 128, 28, 152064)
_72B = ("qwen2-72b", 8192, 29568, 8 * 128, 80, 152064)


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "kv", "layers", "vocabulary", "n_gpus"),
    [(*_7B, 2), (*_7B, 3), (*_7B, 4), (*_7B, 5), (*_72B, 2), (*_72B, 3), (*_72B, 4)],
)
def test_qwen2_against_arithmetic_and_every_split(
    name: str,
    hidden: int,
    inner: int,
    kv: int,
    layers: int,
    vocabulary: int,
    n_gpus: int,
    published: Callable[[str], Any],
) -> None:
    """Sizes from the shapes of the paper, not from a module; all ways to cut the layers, one after the other."""
    layer = 2 * (hidden * (2 * hidden + 2 * kv) + hidden + 2 * kv + 3 * hidden * inner + 2 * hidden)
    table, rotary = 2 * vocabulary * hidden, 2 * 64 * 4

    best = min(
        max(
            table + rotary + cuts[0] * layer,
            *((b - a) * layer for a, b in pairwise(cuts)),
            (layers - cuts[-1]) * layer + 2 * hidden + table,
        )
        for cuts in combinations(range(layers + 1), n_gpus - 1)
    )
    device_map = build_device_map(published(name), n_gpus)
    assert max(device_map.loads.values()) == best
    assert sum(device_map.loads.values()) == 2 * table + rotary + layers * layer + 2 * hidden
    if (name, n_gpus) == ("qwen2-7b", 4):
        assert [stage.n_blocks for stage in device_map.stages] == [6, 8, 8, 6]


class Chain(nn.Module):
    """Blocks of any sizes; some may share their weight with an earlier one."""

    def __init__(self, sizes: list[int], shared: list[tuple[int, int]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 5)
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)
        self.register_buffer("table", torch.zeros(3))
        self.head = nn.Linear(5, 3, bias=False)
        for one, other in shared:
            self.layers[other].weight = self.layers[one].weight


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=8),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=2),
    st.booleans(),
    st.permutations(range(9)),
)
@settings(max_examples=100, deadline=None)
def test_any_chain_ties_and_ids(
    sizes: list[int], n_gpus: int, shared: list[tuple[int, int]], tied_head: bool, ids: list[int]
) -> None:
    with torch.device("meta"):
        model = Chain(sizes, [(a, b) for a, b in shared if a < b < len(sizes)])
    if tied_head:
        model.head.weight = model.embed.weight
    spec = read_spec(model)
    n_gpus = min(n_gpus, sum(block.stands_alone for block in spec.blocks))
    devices = ids[:n_gpus]
    device_map = build_device_map(model, devices=devices)
    _sound(spec, device_map)
    assert list(device_map.loads) == devices
    named = build_device_map(model, n_gpus)
    assert dict(device_map) == {name: devices[gpu] for name, gpu in named.items()}, "other ids, same map"


def test_a_tied_head_is_with_the_embedding_and_the_norm_at_the_end(published: Callable[[str], Any]) -> None:
    device_map = build_device_map(published("qwen2-0.5b"), 3)
    assert device_map["lm_head"] == device_map["model.embed_tokens"] == device_map["model.rotary_emb"] == 0
    assert device_map["model.norm"] == 2


def test_meta_real_and_peft_modules(small_config: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = small_config("llama")
    expected = build_device_map(config, 2)
    assert build_device_map(build_on_meta(config, dtype=torch.bfloat16), 2) == expected
    model = AutoModelForCausalLM.from_config(config)
    assert build_device_map(model, 2) == expected
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    device_map = build_device_map(adapted, 2)
    assert list(device_map) == [f"base_model.model.{name}" for name in expected]
    _sound(read_spec(adapted), device_map)


def test_more_gpus_than_pieces_uses_what_is_useful_and_says_so(small_config: Callable[..., Any]) -> None:
    with pytest.warns(
        ShardNotice,
        match=r"n_gpus = 8: .* has 5 pieces .* \(3 blocks.* Using GPU 0, GPU 1, GPU 2, GPU 3, GPU 4 instead",
    ):
        device_map = build_device_map(small_config("llama"), 8)
    assert sorted(device_map.loads) == [0, 1, 2, 3, 4]
    with pytest.warns(ShardNotice, match="has nothing for GPU 0"):
        device_map = build_device_map(small_config("llama"), 2, max_memory={0: 100})
    assert device_map == {"": 1}


def test_unequal_cards_fit_whenever_a_split_fits(published: Callable[[str], Any]) -> None:
    """145 GB on 80 + 80 + 24 GB, which accelerate spills to the CPU."""
    caps = {0: "80GB", 1: "80GB", 2: "24GB"}
    device_map = build_device_map(published("qwen2-72b"), 3, max_memory=caps)
    assert device_map.loads[2] <= 24 * 10**9
    assert max(device_map.loads.values()) <= 80 * 10**9
    assert "head-room" in device_map.report()


def test_what_does_not_fit_says_by_how_much(published: Callable[[str], Any]) -> None:
    spec = read_spec(published("qwen2-7b"))
    caps = {0: 4 * 2**30, 1: 6 * 2**30}
    with pytest.raises(DoesNotFitError) as error:
        build_device_map(spec, 2, max_memory=caps)
    text = str(error.value)
    assert "14.19 GiB of weights and buffers (bfloat16)" in text
    assert "(4.00 GiB + 6.00 GiB = 10.00 GiB)" in text
    assert "GPU 1: " in text
    more = int(re.search(r"\((\d+) bytes\) more on each", text)[1])  # type: ignore[index]
    assert "or with 1 more of 6.00 GiB" in text
    _sound(spec, build_device_map(spec, 2, max_memory={gpu: cap + more for gpu, cap in caps.items()}))
    with pytest.raises(DoesNotFitError):
        build_device_map(spec, 2, max_memory={gpu: cap + more - 1 for gpu, cap in caps.items()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_gpus": 0}, "n_gpus = 0: a model needs at least one GPU"),
        ({"n_gpus": -1}, "n_gpus = -1"),
        ({"n_gpus": True}, "n_gpus = True: it is no whole number but of the type bool"),
        ({"n_gpus": 2.0}, r"n_gpus = 2\.0: it is no whole number but of the type float"),
        ({"n_gpus": "2"}, "n_gpus = '2': it is no whole number but of the type str"),
        ({"devices": [1, 1]}, "1 is named more than once"),
        ({"devices": []}, "the list is empty"),
        ({"devices": ["gpu0"]}, "devices = gpu0: not a device"),
        ({"devices": [0, "cpu"]}, "would be offloaded, and never trained"),
        ({"devices": [0, 1], "n_gpus": 3}, "n_gpus is 3 and 2 devices are named"),
        ({"n_gpus": 2, "batch_size": 4}, "the KV cache also needs a length"),
        ({"n_gpus": 2, "batchsize": 4}, 'Did you mean "batch_size"'),
        ({"n_gpus": 2, "optimizer": "sgd"}, r'it changes nothing of weights.*use purpose="training"'),
        ({"n_gpus": 2, "purpose": "training", "batch_size": 0}, "batch_size = 0"),
        ({"n_gpus": 2, "purpose": "training", "dtype": "fp16"}, "holds weights in torch.float32"),
        ({"n_gpus": 2, "purpose": "training", "seq_len": 10**6}, "positions"),
        ({"n_gpus": 2, "purpose": "fun"}, '"inference" or "training"'),
        ({"n_gpus": 2, "max_memory": {2: "1GB"}}, r"max_memory\[2\] = 1GB: the map is made over 0, 1"),
        ({"n_gpus": 2, "max_memory": {"cpu": "1GB"}}, "a map never offloads"),
        ({"n_gpus": 2, "max_memory": {0: "lots"}}, r"max_memory\[0\] = lots: not a number of bytes"),
        ({"n_gpus": 2, "dtype": "int3"}, "dtype = int3"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str, small_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        build_device_map(small_config("llama"), **arguments)


def test_several_faults_come_at_once(small_config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as error:
        build_device_map(small_config("llama"), 0, devices=[1, "x", 1])
    assert [finding.code for finding in error.value.findings] == ["n-gpus", "not-a-device", "device-twice"]


def test_the_gpus_that_torch_sees_are_the_default(
    small_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="torch sees no GPU on this machine"):
        build_device_map(small_config("llama"))
    assert build_device_map(small_config("llama"), devices=["cpu"]) == {"": "cpu"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert list(build_device_map(small_config("llama")).loads) == [0, 1]
    assert list(build_device_map(small_config("llama"), devices=["cuda:4", torch.device("cuda", 2)]).loads) == [4, 2]


def test_a_module_without_blocks_goes_to_one_device_only() -> None:
    assert build_device_map(nn.Linear(2, 2), 1) == {"": 0}
    with pytest.raises(ConfigError, match="Name the class of its blocks in no_split_module_classes"):
        build_device_map(nn.Linear(2, 2), 2)


def test_what_an_unknown_quantization_packs_is_not_claimed(small_config: Callable[..., Any]) -> None:
    config = small_config("llama", quantization_config={"quant_method": "spqr"})
    with pytest.warns(ShardNotice, match="how its quantization packs weights is not known"):
        build_device_map(config, 2)


def test_every_key_is_a_module_or_tensor_and_covers_what_it_says(small_config: Callable[..., Any]) -> None:
    model = build_on_meta(small_config("deepseek_v3"), dtype=torch.bfloat16)
    device_map = build_device_map(model, 3)
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(), *model.named_modules()]:
        if name and not any(key.startswith(f"{name}.") for key in device_map):
            assert device_of(device_map, name) in (0, 1, 2)


def test_the_same_map_in_every_process() -> None:
    from transformers import AutoConfig

    code = (
        "from transformers import AutoConfig; from verl_shard import build_device_map;"
        "print(dict(build_device_map(AutoConfig.for_model('gpt2'), devices=['cuda:5', 'cuda:1', 'cuda:3'])))"
    )
    environment = {"PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    here = build_device_map(AutoConfig.for_model("gpt2"), devices=["cuda:5", "cuda:1", "cuda:3"])
    assert run.stdout == f"{dict(here)}\n"


def test_a_limit_that_only_a_norm_fits_under(small_config: Callable[..., Any]) -> None:
    """A GPU of its own for the last norm and the score is not worth it, but better than not to fit."""
    spec = read_spec(small_config("llama"), task="reward")
    sizes = [block.n_bytes for block in spec.blocks]
    assert not any(block.stands_alone for block in spec.blocks[-2:])
    device_map = build_device_map(spec, 2, max_memory={0: sum(sizes[:-2]), 1: sum(sizes[-2:])})
    assert list(device_map.loads.values()) == [sum(sizes[:-2]), sum(sizes[-2:])]


def test_a_spec_is_as_it_was_read(small_config: Callable[..., Any]) -> None:
    spec = read_spec(small_config("llama"))
    with pytest.raises(ConfigError) as caught:
        build_device_map(spec, 2, dtype="float32", task="reward")
    assert [finding.where for finding in caught.value.findings] == ["task", "dtype"]
    with pytest.raises(ConfigError, match="a ModelSpec does not say what is cached"):
        build_device_map(spec, 2, batch_size=1, seq_len=8)
