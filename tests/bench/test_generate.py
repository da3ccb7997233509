"""The bench of generation: the load that it draws, ways that answer alike, and what it says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from shapes import small_qwen2
from typer.testing import CliRunner

from verl_shard.bench import generate as module
from verl_shard.bench.generate import (
    Answer,
    GenerateRow,
    Load,
    bench_generate,
    draw,
    measure,
    same_share,
    speedups,
    ways,
)
from verl_shard.cli.bench_generate import generate
from verl_shard.common.errors import ConfigError

CPU = torch.device("cpu")


def causal() -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_qwen2(initializer_range=0.3)).eval()


def test_lengths_are_even_in_their_logarithm_and_come_back_with_the_seed() -> None:
    load = draw(2000, 1024, 256, 500, seed=3)
    prompts = [len(prompt) for prompt in load.prompts]
    for lengths, low, high in ((prompts, 32, 1024), (load.responses, 16, 256)):
        assert (min(lengths), max(lengths)) == (low, high)
        # The mean of an even logarithm.
        assert sum(lengths) / 2000 == pytest.approx((high - low) / math.log(high / low), rel=0.05)
    assert min(token for prompt in load.prompts for token in prompt) == 5
    assert draw(2000, 1024, 256, 500, seed=3) == load != draw(2000, 1024, 256, 500, seed=4)


def test_all_ways_give_each_request_as_many_tokens_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal()
    load = Load(((5, 6, 7), (9,), (8, 8, 11, 12, 13), (9, 30), (4, 4)), (6, 1, 3, 9, 2))
    offered = {name: way for name, way in ways(5).items() if "continuous" not in name}
    offered["model.generate, batches of 8"] = lambda *given: module.plain(*given, batch=2)
    rows = measure(model, load, offered, CPU, runs=1, keep=list)
    assert [row.way for row in rows] == ["model.generate, one batch of 5", "ours", "model.generate, batches of 8"]
    assert [row.same for row in rows] == [1.0] * 3
    for way in offered.values():
        assert [len(ids) for ids in way(model, load, CPU).token_ids] == [6, 1, 3, 9, 2]
    # 5 rows of 5 + 8 columns: the last of 9 tokens is not computed with. The largest batch of two has as many columns.
    token = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their size, bytes
    assert [row.cache_bytes for row in rows[::2]] == [5 * 13 * token, 2 * 13 * token]


def test_the_first_warms_up_the_fastest_counts_and_others_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    costs = {"slow": iter((100.0, 9.0, 8.0)), "ours": iter((50.0, 2.0, 3.0))}
    expected = [[1, 2, 3], [4]]

    def way(name: str, made: list[list[int]]) -> Any:
        def run(model: Any, load: Load, device: Any) -> Answer:
            now[0] += next(costs[name])
            return Answer(made, 7)

        return run

    def broken(*_: Any) -> Answer:
        raise ValueError("not here")

    load = Load(((5,), (6,)), (3, 1))
    offered = {"slow": way("slow", expected), "ours": way("ours", [[1, 9, 3], [4]]), "other": broken}
    kept: list[list[str]] = []
    rows = measure(None, load, offered, CPU, runs=2, keep=lambda now: kept.append([row.way for row in now]))
    assert kept == [["slow"], ["slow", "ours"], ["slow", "ours", "other"]]
    assert [(row.seconds, row.tokens_per_second, row.same) for row in rows[:2]] == [(8.0, 0.5, 1.0), (2.0, 2.0, 0.5)]
    assert rows[2] == GenerateRow("other", None, None, None, None, None, None)
    assert speedups(rows) == {"slow": 4.0}
    with pytest.raises(ValueError, match="not here"):
        measure(None, load, {"ours": broken}, CPU, runs=1, keep=list)
    assert speedups(rows[:1]) == {}


def test_tokens_count_as_the_same_until_one_differs() -> None:
    assert same_share([[1, 2, 3, 4], [5]], [[1, 2, 9, 4], [5]]) == 3 / 5
    assert same_share([[1], [5]], [[1, 2, 3], [5]]) == 2 / 4


def test_the_command_on_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.SHAPES, "small", {"model_type": "qwen2", **_fields()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    whole = ways(16)
    assert list(ways(16, cuda=True)) == [*list(whole)[:3], "ours, enforce_eager", list(whole)[3]]
    assert list(whole)[1] == "ours"
    monkeypatch.setattr(
        module, "ways", lambda n, cuda: {name: way for name, way in whole.items() if "continuous" not in name}
    )
    app = typer.Typer()
    app.command()(generate)
    path = tmp_path / "made.json"
    called = CliRunner().invoke(app, ["--quick", "--longest-response", "8", "--out", str(path), "--json"])
    assert called.exit_code == 0, called.output
    record = json.loads(path.read_text())
    assert json.loads(called.stdout) == record
    assert record["schema"] == "verl_shard/bench-generate/1"
    assert (record["dtype"], record["device"], len(record["prompt_tokens"])) == ("float32", "cpu", 16)
    assert (max(record["prompt_tokens"]), max(record["response_tokens"])) == (64, 8)
    assert [row["same"] for row in record["rows"]] == [1.0] * 3
    assert set(record["speedups"]) == set(whole) - {"ours", "transformers' continuous batching"}


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in the zoo"):
        bench_generate(result=None, model="nothing")


def _fields() -> dict[str, Any]:
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    return {name: getattr(small_qwen2(), name) for name in names}


def test_what_was_measured_is_in_the_file_when_the_run_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.SHAPES, "small", {"model_type": "qwen2", **_fields()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "made.json"

    def cut_off(*_: Any) -> Answer:
        raise KeyboardInterrupt

    whole = ways(16)
    offered = {"model.generate, one batch of 16": whole["model.generate, one batch of 16"], "ours": cut_off}
    monkeypatch.setattr(module, "ways", lambda n, cuda: offered)
    with pytest.raises(KeyboardInterrupt):
        bench_generate(result=path, requests=4, longest_response=3, quick=True)
    record = json.loads(path.read_text())
    assert [(row["way"], row["same"]) for row in record["rows"]] == [("model.generate, one batch of 16", 1.0)]
    assert (len(record["prompt_tokens"]), max(record["response_tokens"]), record["speedups"]) == (4, 3, {})
