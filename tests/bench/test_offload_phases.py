"""The bench of offloaded phases: what it measures is what verl's worker and the reward loop do, here on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from shapes import small_qwen2
from typer.testing import CliRunner

from verl_shard.bench import offload_phases
from verl_shard.bench.offload import GpuMeter
from verl_shard.bench.offload_phases import (
    Folders,
    PhaseRow,
    bench_offload_phases,
    make_folders,
    phase_rows,
    phases_table,
    reference,
    reward,
)
from verl_shard.cli.main import app
from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.stock_engine import one_process


class Meter:
    """A GPU that holds what `held` objects say; what is in a cycle goes when garbage is collected."""

    def __init__(self) -> None:
        self.there: weakref.WeakSet[Weights] = weakref.WeakSet()

    def wait(self) -> None: ...

    def begin_peak(self) -> None: ...

    def held(self) -> int:
        return sum(weights.size for weights in self.there)

    def peak(self) -> int:
        return self.held() + 5

    def empty(self) -> None:
        gc.collect()


class Weights:
    """Bytes in a cycle, as a model with hooks is."""

    def __init__(self, size: int, meter: Meter) -> None:
        self.size, self.cycle = size, self
        meter.there.add(self)


def test_what_was_not_collected_yet_is_not_counted() -> None:
    meter = Meter()
    other = Weights(1000, meter)  # somebody else's, which stays
    gc.disable()
    try:
        Weights(70, meter)  # of a phase before

        def start(offload: str) -> Callable[[], object]:
            weights = Weights({"none": 30, "stream": 2}[offload], meter)
            return lambda: weights.size

        rows = phase_rows(("reward", start), 8, 8, 16, copy_s=0.0, calls=1, meter=meter)
    finally:
        gc.enable()
    assert [(row.peak, row.idle, row.freed) for row in rows] == [(35, 30, 0), (7, 2, 28)]
    assert other.size == 1000


def test_what_a_phase_before_left_in_a_cycle_goes_before_memory_is_looked_at() -> None:
    meter = Meter()
    gc.disable()
    try:
        Weights(70, meter)
        assert meter.held() == 70
        GpuMeter().empty()
        assert meter.held() == 0
    finally:
        gc.enable()


def test_the_table_shows_what_is_freed() -> None:
    rows = [
        PhaseRow("reward", "none", 32, 8, 512, 0.5, 17 * 10**9, 15 * 10**9, 0, 1.0),
        PhaseRow("reward", "stream", 32, 8, 512, 1.01, 4 * 10**9, 1_950_000_000, 13_050_000_000, 1.0),
    ]
    columns = phases_table("qwen2-7b", rows, 50e9, 13 * 10**9).columns
    cells = {str(column.header): [str(cell) for cell in column.cells] for column in columns}
    assert cells["freed GB"] == ["0.00", "13.05"]
    assert cells["of the limit"] == ["0.500", "1.010"]


def test_the_command_runs_the_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(offload_phases, "bench_offload_phases", lambda **given: asked.append(given))
    result = tmp_path / "x.json"
    arguments = [
        "bench",
        "offload",
        "--phases",
        "--calls",
        "3",
        "--model",
        "llama-3.2-1b",
        "--json",
        "--out",
        str(result),
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert asked == [{"result": result, "model": "llama-3.2-1b", "calls": 3, "as_json": True}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    config = small_qwen2(hidden_size=32, intermediate_size=64)
    config.architectures = ["Qwen2ForCausalLM"]
    return make_folders(config, tmp_path_factory.mktemp("folders"))


def test_both_models_are_the_same_weights(made: Folders) -> None:
    policy = transformers.AutoModelForCausalLM.from_pretrained(made.policy)
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(made.judge)
    for name, value in judge.model.state_dict().items():
        assert torch.equal(value, policy.model.state_dict()[name]), name
    assert judge.score.weight.shape == (1, 32)
    assert made.block_bytes == 2 * sum(p.numel() for p in policy.model.layers.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_phase_runs_as_many_micro_batches_as_it_says(made: Folders) -> None:
    with one_process("cpu"):
        rows = phase_rows(reference(made, 6, 2, 16), 6, 2, 16, copy_s=100.0, calls=1, meter=Meter())
    rows += phase_rows(reward(made, 6, 2, 16), 6, 2, 16, copy_s=0.0, calls=1, meter=Meter())
    assert [(row.phase, row.offload) for row in rows] == [
        ("ref_log_prob", "none"), ("ref_log_prob", "stream"), ("reward", "none"), ("reward", "stream"),
    ]  # fmt: skip
    assert {row.limit_s for row in rows[:2]} == {300.0}  # three micro-batches, each a copy of 100 s
    assert {row.limit_s for row in rows[2:]} == {rows[2].seconds}


def test_the_ratio_is_to_the_limit() -> None:
    row = PhaseRow("reward", "stream", 32, 8, 512, seconds=1.05, peak=0, idle=0, freed=0, limit_s=1.0)
    assert row.ratio == pytest.approx(1.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(ConfigError, match="it measures on a GPU"):
        bench_offload_phases(result=None)
    with pytest.raises(ConfigError, match="--model = llama-9: not in the zoo"):
        bench_offload_phases(result=None, model="llama-9")
