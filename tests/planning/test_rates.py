"""Rates: of a card, from a file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.notices import ShardNotice
from verl_shard.config.cards import CARDS
from verl_shard.planning.rates import NUMBERS, SCHEMA, Rates


def test_no_card_reaches_more_than_its_data_sheet() -> None:
    for card in CARDS.values():
        rates = Rates.of(card)
        for name in ("bf16_flops", "fp32_flops", "memory_bandwidth", "host_bandwidth", "link_bandwidth"):
            assert 0.5 * getattr(card, name) < getattr(rates, name) <= getattr(card, name)


def test_a_faster_card_has_higher_rates() -> None:
    slow, fast = Rates.of(CARDS["a100-80g"]), Rates.of(CARDS["h200-141g"])
    assert fast.bf16_flops / slow.bf16_flops == pytest.approx(989 / 312)
    assert fast.memory_bandwidth / slow.memory_bandwidth == pytest.approx(4800 / 2039)


def test_saved_is_loaded(tmp_path: Path) -> None:
    rates = replace(Rates.of(CARDS["l4-24g"]), decode_s=0.0, source="measured")
    rates.save(tmp_path / "rates.json", {"gpus": ["NVIDIA L4"]})
    assert Rates.load(tmp_path / "rates.json") == rates
    content = json.loads((tmp_path / "rates.json").read_text())
    assert content["schema"] == "verl_shard/bench-rates/1"
    assert content["machine"] == {"gpus": ["NVIDIA L4"]}


def test_a_file_of_before_the_cpu_was_measured_has_the_default_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    rates = replace(Rates.of(CARDS["l4-24g"]), source="measured")
    later = ("cpu_flops", "graph_kernel_s")
    old = {name: value for name, value in asdict(rates).items() if name not in later}
    path.write_text(json.dumps({"schema": SCHEMA, "rates": old}))
    with pytest.warns(ShardNotice) as said:
        assert Rates.load(path) == rates
    words = [str(one.message) for one in said]
    assert "cpu_flops" in words[0]
    assert "Using 2.39e+12, as 16 cores beside an H200 reached, instead" in words[0]
    assert "graph_kernel_s" in words[1]
    assert "Using 2.9e-06, as an H200 took, instead" in words[1]
    Rates.load(path)  # warnings are errors: it is said once
    assert rates.cpu_source == "as 16 cores beside an H200 reached; verl-shard bench rates measures another host"
    assert replace(rates, cpu_flops=1e12).cpu_source == "measured"


def test_all_faults_at_once() -> None:
    given = {**asdict(Rates.of(CARDS["l4-24g"])), "bf16_flops": 0.0, "kernel_s": -1e-6, "link_bandwidth": float("nan")}
    with pytest.raises(ConfigError) as caught:
        Rates(**given)
    assert [fault.where for fault in caught.value.findings] == ["bf16_flops", "link_bandwidth", "kernel_s"]


def test_files_that_are_no_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        Rates.load(path)
    for text, words in (
        ("{", "cannot be read"),
        ("[]", "schema"),
        (json.dumps({"schema": "verl_shard/bench-times/1"}), f"schema is not {SCHEMA}"),
        (json.dumps({"schema": SCHEMA}), "missing are"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Rates.load(path)
    rates = asdict(Rates.of(CARDS["l4-24g"]))
    path.write_text(json.dumps({"schema": SCHEMA, "rates": {**rates, "tensor_flops": 1.0}}))
    with pytest.raises(ConfigError, match="unknown are tensor_flops"):
        Rates.load(path)
    for name in NUMBERS:
        path.write_text(json.dumps({"schema": SCHEMA, "rates": {**rates, name: "fast"}}))
        with pytest.raises(ConfigError, match=name):
            Rates.load(path)
