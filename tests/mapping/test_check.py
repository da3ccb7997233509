"""Hand-made maps: every fault at once, and the maps that widely read articles tell people to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_shard import build_device_map, check_device_map
from verl_shard.common.errors import ConfigError
from verl_shard.models.read import read_spec
from verl_shard.models.spec import ModelSpec


@pytest.fixture
def spec(published: Callable[[str], Any]) -> ModelSpec:
    return read_spec(published("qwen2-7b"))


def _codes(spec: ModelSpec, device_map: dict[str, Any], **options: Any) -> list[str]:
    return [finding.code for finding in check_device_map(spec, device_map, **options)]


def test_a_good_map_has_no_findings(spec: ModelSpec) -> None:
    assert _codes(spec, build_device_map(spec, 4)) == []
    assert _codes(spec, {"": 0}) == []
    assert _codes(spec, {"model": 0, "lm_head": 0}) == []
    assert _codes(spec, {"": "cpu"}, trainable=True) == []


def test_the_articles_map_stops_at_layer_15(spec: ModelSpec) -> None:
    article = {
        "model.embed_tokens": 0,
        **{f"model.layers.{i}": i // 4 for i in range(16)},
        "model.norm": 3,
        "lm_head": 3,
    }
    (finding,) = check_device_map(spec, article)
    assert finding.code == "missing-modules"
    assert "model.rotary_emb, model.layers.16" in finding.given
    assert "7 more" in finding.given


def test_the_articles_round_robin(spec: ModelSpec) -> None:
    (finding,) = check_device_map(spec, {name: index % 4 for index, name in enumerate(spec.order)})
    assert (finding.code, finding.level) == ("back-and-forth", "warning")
    assert "changes devices 30 times, where 3 would do" in finding.why


def test_a_map_that_leaves_a_gpu_almost_nothing(spec: ModelSpec) -> None:
    names = list(spec.order)
    (finding,) = check_device_map(spec, {name: int(name == "lm_head") for name in names})
    assert (finding.code, finding.level, finding.given) == ("uneven", "warning", "GPU 0")
    assert "13.17 GiB of weights and buffers, where 7.09 GiB would do" in finding.why


def test_what_a_fault_costs(published: Callable[[str], Any]) -> None:
    """Published sizes: a hidden state of 3,584 in bf16, and an untied head of 152,064 x 3,584."""
    config = published("qwen2-7b")
    names = list(build_device_map(config, 2))
    finding, *_ = check_device_map(config, {name: index % 2 for index, name in enumerate(names)})
    assert "of 7.00 MiB for 1,024 tokens" in finding.why
    (finding,) = check_device_map(config, {name: 0 for name in names if name != "lm_head"})
    assert "1.02 GiB of the model" in finding.why


def test_gpus_that_do_not_exist(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    device_map = build_device_map(spec, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert _codes(spec, device_map) == [], "on a machine without GPUs numbers are not judged"
    assert _codes(spec, device_map, n_gpus=4) == []
    with pytest.raises(ConfigError, match="n_gpus = '4': it is no whole number but of the type str"):
        check_device_map(spec, device_map, n_gpus="4")  # type: ignore[arg-type]
    (finding,) = check_device_map(spec, device_map, n_gpus=2)
    assert (finding.code, finding.given) == ("no-such-gpu", "2, 3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (finding,) = check_device_map(spec, device_map)
    assert finding.given == "1, 2, 3"
    assert "there is 1 GPU, numbered 0" in finding.why


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"lm_head": None}, "missing-modules"),
        ({"lm_haed": 1}, "unknown-name"),
        ({"model": 1}, "overlapping-names"),
        ({"": 1}, "overlapping-names"),
        ({"model.layers.3": "tpu"}, "not-a-device"),
        ({"model.layers.3": None, "model.layers.3.mlp": 1, "model.layers.3.self_attn": 0}, "block-cut"),
        ({"model.layers.27": "cpu"}, "offloaded"),
        ({"model.layers.27": "disk"}, "offloaded"),
        ({"model.layers.3": 1, "model.layers.20": 0}, "back-and-forth"),
    ],
)
def test_each_fault_is_found(change: dict[str, Any], code: str, spec: ModelSpec) -> None:
    device_map = {**build_device_map(spec, 2), **change}
    assert code in _codes(spec, {name: device for name, device in device_map.items() if device is not None})


def test_all_faults_come_at_once_and_training_makes_offloading_one(spec: ModelSpec) -> None:
    device_map = {**build_device_map(spec, 2), "model.layers.1.mlp": 1, "nothing": 0, "model.layers.20": "disk"}
    del device_map["model.norm"]
    codes = _codes(spec, device_map, trainable=True)
    assert {"unknown-name", "overlapping-names", "missing-modules", "block-cut", "offloaded-and-trained"} <= set(codes)


def test_split_ties_and_a_cut_embedding(published: Callable[[str], Any]) -> None:
    spec = read_spec(published("gpt2"))
    device_map = {**build_device_map(spec, 2), "lm_head": 1, "transformer.wpe": 1}
    findings = {finding.code: finding for finding in check_device_map(spec, device_map)}
    assert set(findings) == {"tie-split", "embedding-cut"}
    assert findings["tie-split"].given == "transformer.wte.weight = lm_head.weight"
    assert "GPU 0 and GPU 1" in findings["tie-split"].why


def test_one_line_a_finding_and_something_to_do(spec: ModelSpec) -> None:
    for finding in check_device_map(spec, {"model.layers.0": 0, "x": "y"}):
        assert "\n" not in str(finding)
        assert finding.fix
