"""DeviceMap: a dict for transformers, frozen, with a report and a file form."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_shard import build_device_map
from verl_shard.common.errors import ConfigError
from verl_shard.mapping.device_map import DeviceMap


@pytest.fixture
def device_map(published: Callable[[str], Any]) -> DeviceMap:
    return build_device_map(published("qwen2-7b"), 4)


def test_the_report_names_blocks_bytes_and_shares(device_map: DeviceMap) -> None:
    report = device_map.report()
    assert report.splitlines()[0] == (
        "qwen2: 14.19 GiB of weights and buffers (bfloat16); the fullest, GPU 3, holds 1.021 x an even share"
    )
    assert "model.embed_tokens, model.rotary_emb, model.layers.0-5 │      6 │ 3.62 GiB │ 25.5%" in report
    assert "model.layers.22-27, model.norm, lm_head" in report
    assert "limit" not in report


def test_saved_and_read_back_it_is_the_same(device_map: DeviceMap, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    device_map.save(path)
    assert path.read_text().startswith('{\n  "schema": "verl_shard/device_map/1"')
    again = DeviceMap.load(path)
    assert again == device_map
    assert again.to_dict() == device_map.to_dict()
    assert again.loads == device_map.loads


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "verl_shard/plan/1"}', '{"schema": "verl_shard/device_map/1"}']
)
def test_what_is_no_map_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"Give what DeviceMap\.save wrote"):
        DeviceMap.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        DeviceMap.load(tmp_path / "absent.json")


def test_it_is_a_dict_that_cannot_be_changed(device_map: DeviceMap) -> None:
    assert isinstance(device_map, dict)
    assert json.loads(json.dumps(device_map)) == device_map
    for change in (
        lambda: device_map.__setitem__("lm_head", 0),
        lambda: device_map.pop("lm_head"),
        lambda: device_map.update(lm_head=0),
        lambda: device_map.clear(),
    ):
        with pytest.raises(TypeError, match="cannot be changed"):
            change()
    free = device_map.copy()
    free["lm_head"] = 0
    assert device_map["lm_head"] == 3


def test_copies_and_pickles_keep_everything(device_map: DeviceMap) -> None:
    for again in (copy.copy(device_map), copy.deepcopy(device_map), pickle.loads(pickle.dumps(device_map))):
        assert isinstance(again, DeviceMap)
        assert again.to_dict() == device_map.to_dict()


def test_devices_are_written_in_any_form_and_kept_as_ints() -> None:
    assert DeviceMap({"a": "cuda:1", "b": 2, "c": "cpu"}) == {"a": 1, "b": 2, "c": "cpu"}
    with pytest.raises(ConfigError, match=r"device_map\['a'\] = tpu"):
        DeviceMap({"a": "tpu"})
