"""The bench of pipelines: what is timed of which way, maps by arithmetic, and what it says where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime.fake_links import FakeLinks
from shapes import small_qwen2
from typer.testing import CliRunner

from verl_shard.bench import pipeline, pipeline_one
from verl_shard.bench.pipeline import (
    KINDS,
    PipelineRow,
    Stepped,
    Way,
    bench_pipeline,
    check_gradients,
    even_map,
    measure,
    offered_maps,
    on_one,
    tables,
    training_pass,
    ways,
    with_estimates,
)
from verl_shard.bench.pipeline_checks import (
    Gradients,
    compare_gradients,
    distances,
    estimated_peaks,
    farthest,
    gradients_words,
    peaks_table,
)
from verl_shard.bench.pipeline_one import in_turn, one_table
from verl_shard.cli.main import app
from verl_shard.common.errors import ConfigError
from verl_shard.common.tables import as_text
from verl_shard.memory.estimate import estimate_memory
from verl_shard.runtime.stream_hooks import hooks_of


class Meter:
    """Counts what is asked of it, in the GPUs' place."""

    def __init__(self) -> None:
        self.begun = 0

    def wait(self) -> None: ...

    def empty(self) -> None: ...

    def begin_peak(self) -> None:
        self.begun += 1

    def peaks(self) -> tuple[int, ...]:
        return (self.begun, 10 * self.begun)


def causal(**fields: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(small_qwen2(**fields))


def test_each_way_and_kind_is_timed_with_each_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: now[0])
    log: list[tuple[str, int, bool, bool]] = []

    def step(name: str, cost: float) -> Any:
        def run(model: Any, batches: Sequence[Mapping[str, Any]], train: bool) -> Stepped:
            now[0] += cost * (9 if (name, len(batches), train) not in [entry[:3] for entry in log] else 1)
            log.append((name, len(batches), train, model.model.layers[0].gradient_checkpointing))
            if name == "bad" and len(batches) == 8:
                raise torch.cuda.OutOfMemoryError
            assert sum(len(batch["input_ids"]) for batch in batches) == 8
            return Stepped([torch.tensor(float(len(batches)))] * len(batches), len(batches) // 2)

        return run

    prepared: list[str] = []
    offered = [Way(n, lambda model, n=n: prepared.append(n), step(n, c)) for n, c in (("good", 1.0), ("bad", 2.0))]  # type: ignore[misc]
    told: list[int] = []
    rows = measure(
        causal(), torch.ones(8, 3, dtype=torch.long), offered, Meter(), runs=2, keep=lambda now: told.append(len(now))
    )
    assert prepared == ["good", "bad"]
    assert told == [10, 20]
    assert [row.in_flight for row in rows[1:4]] == [1, 2, 4]
    counts = [(KINDS[0], n) for n in (1, 2, 4, 8)] + [(kind, n) for kind in KINDS[1:] for n in (2, 4, 8)]
    assert [(row.way, row.kind, row.micro_batches) for row in rows] == [
        (w, *c) for w in ("good", "bad") for c in counts
    ]
    assert {row.seconds for row in rows if row.way == "good"} == {1.0}  # the first, of 9 seconds, warms up
    assert {row.seconds for row in rows if row.way == "bad"} == {2.0, None}
    assert rows[3].peaks == (4, 40)
    assert rows[3].loss == 8.0
    assert rows[-1] == PipelineRow("bad", KINDS[2], 8, None, (), None)
    assert {entry[3] for entry in log if not entry[2]} == {False}
    assert {entry[3] for entry in log if entry[2]} == {False, True}
    text = as_text(120, *tables("small", rows))
    cells = [[cell for cell in line.split() if cell != "│"] for line in text.splitlines()]
    assert ["good", "1.000", "1.000", "1.000", "1.000", "0.0", "0.0", "0.0", "0.0"] in cells
    assert ["bad", "2.000", "2.000", "-", "0.0", "0.0", "-"] in cells
    only = PipelineRow("another map", KINDS[1], 8, 0.5, (2 * 10**9,), 1.0)
    with_map = as_text(120, *tables("small", [*rows, only]))
    assert ["another", "map", "-", "-", "0.500", "-", "-", "2.0"] in [
        [cell for cell in line.split() if cell != "│"] for line in with_map.splitlines()
    ]
    even = PipelineRow("even", KINDS[0], 1, 0.25, (3 * 10**9, 5 * 10**9), 1.0)
    alone = as_text(120, *tables("small", [even])[:1])
    assert ["even", "0.250", "5.0"] in [[c for c in line.split() if c != "│"] for line in alone.splitlines()]


def test_all_ways_compute_the_same_and_the_last_is_ours() -> None:
    model = causal()
    offered = ways({"": "cpu"})  # type: ignore[dict-item]
    rows = measure(model, torch.randint(1, 500, (8, 5)), offered, Meter(), runs=1, keep=len)
    assert [way.name for way in offered] == [
        "one GPU", "accelerate's dispatch_model", "ours", "ours, two in flight a GPU",
    ]  # fmt: skip
    assert len(rows) == 40
    losses = [row.loss for row in rows]
    assert losses == pytest.approx([losses[0]] * 40, abs=1e-5)
    assert type(hooks_of(model)[0]).__name__ == "RootHook"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_head_counts_as_many_blocks_as_it_has_times_a_blocks_parameters() -> None:
    # 4 blocks of h = 64: projections 2 * 64 * 64 + 2 * 64 * 32, a feed-forward of 3 * 64 * 160, so about 43k; a head of
    # 64 * 2700 = 173k is 4 blocks: it has a GPU of its own. One of 64 * 512 = 33k is less than one.
    large, small = even_map(causal(vocab_size=2700), 2), even_map(causal(vocab_size=512), 2)
    assert [large[f"model.layers.{i}"] for i in range(4)] == [0, 0, 0, 0]
    assert [small[f"model.layers.{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert (large["model.embed_tokens"], large["lm_head"], small["lm_head"]) == (0, 1, 1)
    assert even_map(causal(tie_word_embeddings=True), 2)["lm_head"] == 0
    assert set(even_map(causal(), 1).values()) == {0}


class Clock:
    """Each way's step takes as long as is said, in the order in which ways are stepped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(pipeline_one.time, "perf_counter", lambda: self.now)

    def step(self, seconds: list[float]) -> Any:
        left = iter(seconds)

        def run() -> float:
            self.now += next(left)
            return 1.5

        return run


def test_ways_are_timed_in_turn_and_compared_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, prepared = Clock(monkeypatch), []
    steps = {
        "plain": (lambda: prepared.append("plain"), clock.step([9.0, 1.0, 2.0, 4.0])),
        "ours": (lambda: prepared.append("ours"), clock.step([99.0, 1.01, 2.04, 4.0])),
    }
    rows = in_turn("dispatch", "forward", 4, steps, Meter(), runs=3)  # type: ignore[arg-type]
    assert prepared == ["plain", "ours"] * 4
    # Of 1.01, 1.02 and 1.00 of the plain way the middle; a GPU that slows down changes nothing.
    assert [(row.way, row.seconds, row.check) for row in rows] == [
        ("plain", pytest.approx(2.0), 1.5),
        ("ours", pytest.approx(2.04), 1.5),
    ]
    assert [row.ratio for row in rows] == [1.0, pytest.approx(1.01)]


@pytest.mark.parametrize("verl", [True, False])
def test_on_one_device_all_ways_compute_the_same(verl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not verl:
        monkeypatch.setattr(pipeline, "why_no_update", lambda: "verl is not installed here")
    model = causal()
    ids = torch.randint(1, 500, (8, 6), generator=torch.Generator().manual_seed(0))
    kept: list[int] = []
    rows, left_out = on_one(model, ids, "cpu", Meter(), runs=1, keep=lambda now: kept.append(len(now)))
    assert kept == ([18, 22] if verl else [18])  # the file of results has the update too
    dispatch, update = [row for row in rows if row.part == "dispatch"], [row for row in rows if row.part == "update"]
    assert [(row.way, row.micro_batches) for row in dispatch[:6]] == [
        (way, n) for n in (4, 8) for way in ("plain model", "ours", "ours, hooks forced")
    ]
    assert len(dispatch) == 18
    assert [row.check for row in dispatch] == pytest.approx([dispatch[0].check] * 18, abs=1e-5)
    assert not any(hooks_of(module) for module in model.modules())
    shown = as_text(160, one_table("small", (8, 6), rows, left_out))
    if not verl:
        assert update == []
        assert "left out: verl is not installed here" in shown.replace("\n", " ")
        return
    assert left_out is None
    assert [(row.way, row.micro_batches) for row in update] == [
        (way, n) for n in (4, 8) for way in ("loop by hand", "verl's worker, our engine")
    ]
    norms = [row.check for row in update]
    assert norms[0] > 0.01
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)


def test_what_is_said_without_a_gpu_and_of_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not in the zoo"):
        bench_pipeline(result=None, model="nothing")
    if torch.cuda.device_count() == 0:
        called = CliRunner().invoke(app, ["bench", "pipeline", "--out", str(tmp_path / "made.json")])
        assert called.exit_code != 0
        assert not (tmp_path / "made.json").exists()


TWO = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1} | {
    f"model.layers.{i}": int(i > 1) for i in range(4)
}


def test_an_estimate_has_what_is_kept_in_flight_and_no_logits_that_were_let_go() -> None:
    config = small_qwen2(vocab_size=2700)
    wanted: dict[str, Any] = {
        "batch_size": 2,
        "seq_len": 8,
        "precision": "bf16",
        "loss": "causal-lm",
        "optimizer": "sgd",
    }
    whole = estimate_memory(config, task="causal-lm", accumulating=True, **wanted)
    (peak,) = estimated_peaks(config, {"": 0}, 1, accumulating=True, **wanted).values()
    assert peak == max(whole.forward_peak, whole.backward_peak) - 2 * 8 * 2700 * 2
    one, two, four = (estimated_peaks(config, TWO, n, accumulating=True, **wanted) for n in (1, 2, 4))
    # The first stage keeps 1, 2 and 4 micro-batches, the last 1, 1 and 3.
    assert two[1] == pytest.approx(one[1], rel=1e-3)
    assert four[0] - one[0] == pytest.approx(3 * (two[0] - one[0]), rel=0.05)
    # The last has as many blocks, and keeps the logits in bf16 and their log_softmax in fp32 too.
    assert four[1] - one[1] == pytest.approx(2 * (two[0] - one[0]) + 2 * 2 * 8 * 2700 * (2 + 4), rel=0.05)


def test_where_all_are_in_flight_none_begins_when_there_are_gradients() -> None:
    assert [training_pass(KINDS[1], 4, n)["accumulating"] for n in (1, 2, 3, 4)] == [True, True, True, False]


def test_rows_are_estimated_with_their_own_map_and_shown() -> None:
    maps = {"": TWO, "equal weights": TWO, f"training, {KINDS[1]}": TWO | {"model.layers.2": 0}}
    peaks = (4 * 10**9, 5 * 10**9)
    given = [
        PipelineRow("one GPU", KINDS[1], 8, 1.0, (peaks[0], 0), 1.0),
        PipelineRow("ours", KINDS[0], 8, 1.0, peaks, 1.0, 4),
        PipelineRow("ours", KINDS[1], 8, 1.0, peaks, 1.0, 4),
        PipelineRow("ours, map of training, one at a time", KINDS[1], 8, 1.0, peaks, 1.0),
        PipelineRow("ours, map of equal weights, one at a time", KINDS[1], 8, 1.0, peaks, 1.0),
        PipelineRow("accelerate's dispatch_model", KINDS[1], 8, 1.0, peaks, 1.0),
        PipelineRow("ours", KINDS[1], 8, None, (), None),
    ]
    config = small_qwen2(max_position_embeddings=1024)
    rows = with_estimates(config, given, maps)
    assert [bool(row.estimates) for row in rows] == [True, False, True, True, True, False, False]
    wanted = training_pass(KINDS[1], 8, 4)
    assert rows[0].estimates == (*estimated_peaks(config, {"": 0}, 1, **wanted).values(), 0)
    assert rows[2].estimates == tuple(estimated_peaks(config, TWO, 4, **wanted).values())
    assert rows[3].estimates[0] > rows[4].estimates[0]
    assert rows[3].estimates[1] < rows[4].estimates[1]
    shown = as_text(
        160, peaks_table([PipelineRow("ours", KINDS[1], 8, 1.0, peaks, 1.0, 4, (4_040_000_000, 4_900_000_000))])
    )
    assert "4.00 5.00" in shown
    assert "4.04 4.90" in shown
    assert "+1.0% -2.0%" in shown


def test_maps_that_are_compared_and_ways_that_take_them() -> None:
    config = small_qwen2(max_position_embeddings=1024, num_hidden_layers=8)
    maps = offered_maps(config, 2)
    assert list(maps) == ["equal weights", f"training, {KINDS[1]}", f"training, {KINDS[2]}"]
    offered = ways(TWO, maps)[4:]
    assert [(way.name, way.kinds, way.micro) for way in offered] == [
        (f"ours, map of {name}, {words}", kinds, (8,))
        for name, kinds in (("equal weights", KINDS[1:]), ("training", KINDS[1:2]), ("training", KINDS[2:]))
        for words in ("one at a time", "one in flight a GPU")
    ]
    assert [way.device_map for way in offered] == [placed for placed in maps.values() for _ in range(2)]


def test_gradients_of_two_devices_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_shard.runtime import pipeline as runtime

    model, links, watching = causal(), FakeLinks(), ExitStack()
    dispatch = runtime.dispatch_model

    def on_fakes(model: Any, device_map: Any, **options: Any) -> Any:
        if device_map == {"": 0}:
            watching.close()
            return dispatch(model, {"": "cpu"})
        made = dispatch(model, device_map, links=links, **options)
        watching.enter_context(links)
        return made

    monkeypatch.setattr(runtime, "dispatch_model", on_fakes)
    ids = torch.randint(1, 500, (8, 6), generator=torch.Generator().manual_seed(0))
    found = check_gradients(model, ids, TWO)
    assert {copy[:2] for copy in links.copies} >= {("gpu0", "gpu1"), ("gpu1", "gpu0")}
    assert (found.micro_batches, found.again) == (4, 0.0)
    assert found.ours < 1e-6
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(hooks_of(module) for module in model.modules())
    assert found.whole < 1e-6
    assert (found.beyond, found.tensors) == (0, len(list(model.parameters())))
    assert "4 micro-batches, all as one, are" in gradients_words(found)


def test_the_tensor_that_is_farthest_is_named() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert farthest(distances(["a", "b"], [one, other], [one, one])) == (0.1, "b")
    assert farthest(distances(["a", "b"], [None, one], [None, one])) == (0.0, "")
    assert farthest(distances(["a", "b"], [None, one], [one, one])) == (float("inf"), "a")
    worst, at = farthest(distances(["a"], [one * float("nan")], [one]))
    assert (worst != worst, at) == (True, "a")
    model = torch.nn.Linear(2, 1, bias=False)

    def run(scale: float) -> Any:
        return lambda: (model(torch.ones(1, 2)) * scale).sum().backward()

    two = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)])

    def both(scale: float) -> Any:
        # Gradients 3 and 4, or 3 and 4 times the scale.
        return lambda: (two[0](torch.full((1, 1), 3.0)) + two[1](torch.full((1, 1), 4.0)) * scale).sum().backward()

    found = compare_gradients(two, both(1.25), both(1.0), 1)
    assert (found.ours, found.whole, found.beyond, found.tensors) == (0.25, pytest.approx(1 / 5), 1, 2)
    assert compare_gradients(model, run(1.5), run(1.0), 3) == Gradients(3, 0.5, "weight", 0.0, "", 0.5, 1, 1)
