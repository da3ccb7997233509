"""The bench of stock verl: verl's own engine over FSDP in this process, on the host, beside what was predicted."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from bench.host_meter import HostMeter
from shapes import small_qwen2
from typer.testing import CliRunner

from verl_shard.bench import stock
from verl_shard.bench.machine import Died
from verl_shard.bench.stock import Measured, bench_stock, compare_stock, predict, run_cell
from verl_shard.bench.stock_cells import CELLS, FLASH, LARGE, Cell, config_of
from verl_shard.cli import bench
from verl_shard.common.errors import ConfigError, RunError
from verl_shard.memory.constants import CUBLAS_LT, cublas_workspace
from verl_shard.memory.stand_ins import as_on_gpu
from verl_shard.memory.stock import terms
from verl_shard.verl_plugin.stock_engine import one_process

BUCKET = 2**20


def _nothing(*_: Any) -> None: ...


def _logsumexp(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """With its temporary in sight; torch's own makes it out of the meter's."""
    logits = logits.float()
    return (logits - logits.amax(dim, keepdim=True)).exp_().sum(dim).log_()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "cell",
    [
        Cell(model="", strategy="fsdp2", roles=("actor", "critic")),
        Cell(
            model="", strategy="fsdp", model_dtype="bf16", packed=True, gradient_checkpointing=False, roles=("actor",)
        ),
        Cell(model="", strategy="device_map"),
        Cell(model="", strategy="device_map", packed=True, logits="responses"),
        Cell(model="", strategy="device_map", logits="responses"),
    ],
    ids=lambda cell: cell.words,
)
def test_the_phases_of_verls_engine_are_predicted(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there are no workspaces of cuBLAS, and AdamW does not work on lists."""
    monkeypatch.setattr(terms, "BUCKET", replace(terms.BUCKET, n_bytes=BUCKET))
    monkeypatch.setattr("verl_shard.memory.stock.roles._TEMPORARIES", {"adamw": 0})
    monkeypatch.setattr(torch, "logsumexp", _logsumexp)
    # Our engine's optimizer cannot be told to leave out its lists: the backward must be the peak there.
    ours = cell.strategy == "device_map"
    lengths = (180, 12) if ours else (20, 40)
    cell = replace(cell, sequences=4, micro_batch_size=2, attn_implementation="eager")
    cell = replace(cell, prompt_length=lengths[0], response_length=lengths[1])
    width = 128 if ours else 256
    config = small_qwen2(
        hidden_size=width, intermediate_size=5 * width // 2, vocab_size=8 * width, tie_word_embeddings=True
    )
    config.architectures = ["Qwen2ForCausalLM"]
    meter = HostMeter()

    def measured(run: Callable[[], object]) -> int:
        gc.collect()
        meter.peak = meter.now
        with as_on_gpu(_nothing, _nothing), meter.on():
            run()
        return meter.peak

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_process("cpu"):
            rows = run_cell(cell, measured, config)
    finally:
        torch.set_num_threads(threads)
    scores = ["old_log_prob", "values", "update_critic"] if "critic" in cell.roles else ["old_log_prob"]
    if ours:
        scores = ["generate", "old_log_prob", "ref_log_prob", "values", "update_critic"]
        assert [row.phase for row in rows] == [*scores, "update_actor"]
    else:
        assert [row.phase for row in rows] == [*scores, "update_actor", "weight_sync"]
    workspaces = 2 * cublas_workspace().n_bytes + (CUBLAS_LT.n_bytes if ours else 0)
    for row in rows:
        off = (row.predicted - workspaces) / row.measured - 1
        assert -0.01 <= off <= 0.01, (row.phase, off)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.model}: {cell.words}")
def test_every_configuration_fits_a_large_card(cell: Cell) -> None:
    short = replace(cell, prompt_length=16, response_length=48)
    rows = predict(short, config_of(cell.model))
    assert 2**30 < max(size for size, _ in rows.values()) < 100 * 2**30
    assert all(sum(parts.values()) == size for size, parts in rows.values())
    assert {"old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor", "weight_sync"} <= set(rows)


def test_the_large_one_is_for_a_card_of_140_gb() -> None:
    (cell,) = LARGE
    assert max(size for size, _ in predict(cell, config_of(cell.model)).values()) < 125 * 10**9


def test_half_of_the_sequences_are_shorter() -> None:
    lengths = CELLS[0].lengths
    assert len({sum(pair) for pair in lengths}) == 2
    assert max(sum(pair) for pair in lengths) == CELLS[0].prompt_length + CELLS[0].response_length


def test_what_was_measured_is_written_as_it_comes_with_date_and_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, facts, kept = tmp_path / "stock.json", {"gpus": ["A GPU"]}, []
    cells = CELLS[:3]

    def ran(run: Any) -> Died[Any]:
        (cell,) = run.args
        if file.exists():
            kept.append(len(json.loads(file.read_text())["rows"]))
        if cell == cells[1]:
            return Died(None, "RuntimeError: no room")
        return Died(([Measured(cell, "values", 103, 100, {"weights": 103})], facts))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stock, "in_a_process", ran)
    monkeypatch.setattr(stock, "OURS", ())
    monkeypatch.setattr(stock, "CELLS", cells)
    assert [row.cell for row in bench_stock(result=file)] == [cells[0], cells[2]]
    assert kept == [1, 1]  # what there was before the second and the third
    made = json.loads(file.read_text())
    assert list(made) == ["schema", "date", "command", "machine", "rows", "failed"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert made["machine"] == facts
    assert [(row["phase"], row["error"]) for row in made["rows"]] == [("values", pytest.approx(0.03))] * 2
    assert made["failed"] == {f"{cells[1].model}: {cells[1].words}": "RuntimeError: no room"}
    shown = capsys.readouterr()
    assert "+3.00%" in shown.out
    assert "RuntimeError: no room" in shown.err
    monkeypatch.setattr(stock, "CELLS", cells[1:2])
    with pytest.raises(RunError, match="no room"):
        bench_stock(result=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(ConfigError, match="measures on a GPU"):
        bench_stock(result=None)


_RESULTS = Path(__file__).parents[2] / "docs" / "results"
_RECORDED = json.loads((_RESULTS / "h200_stock.json").read_text())
_WITH_FLASH = json.loads((_RESULTS / "h200_stock_flash.json").read_text())


@pytest.mark.parametrize(("strategy", "offload"), [("device_map", False), ("fsdp", True), ("fsdp2", True)])
def test_phases_measured_on_an_h200(strategy: str, offload: bool) -> None:
    """verl's engines and ours over qwen2-0.5b and qwen3-0.6b; 5 % is asked, and reached by far but where fsdp gives bf16
    weights not back, which was found on these rows. Of ours nothing was fitted to these."""
    rows = [row for row in _RECORDED["rows"] if row["cell"]["model"] != "llama-1b"]
    rows = [row for row in rows if (row["cell"]["strategy"], row["cell"]["offload"]) == (strategy, offload)]
    assert rows
    made: dict[Cell, Any] = {}
    for row in rows:
        cell = Cell(**{**row["cell"], "roles": tuple(row["cell"]["roles"])})
        if cell not in made:
            made[cell] = predict(cell, config_of(cell.model))
        bound = {"fsdp": 0.03, "device_map": 0.005}.get(strategy, 0.01)
        predicted = made[cell][row["phase"]][0]
        assert predicted == pytest.approx(row["measured"], rel=bound), (cell.words, row["phase"])


def _cell(row: dict[str, Any]) -> Cell:
    return Cell(**{**row["cell"], "roles": tuple(row["cell"]["roles"])})


@pytest.mark.parametrize(
    "cell", dict.fromkeys(map(_cell, _WITH_FLASH["rows"])), ids=lambda cell: f"{cell.model}: {cell.words}"
)
def test_phases_measured_on_an_h200_with_flash_attn(cell: Cell) -> None:
    """Its attention, and its cross-entropy, which writes gradients over the logits. With padding, attention copies out what is
    none, and the logits that are none are copied too; before that was counted an update without checkpointing was 8 % short."""
    measured = {row["phase"]: row["measured"] for row in _WITH_FLASH["rows"] if _cell(row) == cell}
    predicted = predict(cell, config_of(cell.model))
    bound = 0.007 if cell.strategy == "device_map" else 0.001
    assert len(measured) == 6
    assert {phase: predicted[phase][0] for phase in measured} == pytest.approx(measured, rel=bound)


def test_all_configurations_with_flash_attention_were_measured() -> None:
    assert {replace(cell, flash_attn=True) for cell in FLASH} <= set(map(_cell, _WITH_FLASH["rows"]))


def test_configurations_with_flash_attn_run_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Cell] = []

    def run(call: Any) -> Any:
        ran.append(call.args[0])
        return Died(None, "no room")

    monkeypatch.setattr(stock, "in_a_process", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for installed in (True, False):
        ran.clear()
        monkeypatch.setattr(stock, "flash_attn_is_installed", lambda there=installed: there)
        with pytest.raises(RunError):
            bench_stock(result=None)
        assert {cell.flash_attn for cell in ran} == {installed}
        assert sum(cell.attn_implementation == "flash_attention_2" for cell in ran) == installed * len(FLASH)
        left_out = f"flash-attn is not installed: {len(FLASH)} configurations with it are left out"
        assert (left_out in " ".join(capsys.readouterr().err.split())) != installed


def test_what_was_measured_is_predicted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "measured.json", tmp_path / "again.json"
    row = {"cell": vars(CELLS[0]), "phase": "values", "measured": 100, "predicted": 7, "parts": {}, "error": -0.93}
    known = {"date": "2026-01-02", "command": "verl-shard bench stock", "machine": {"gpus": ["A GPU"]}}
    file.write_text(json.dumps({**known, "rows": [row], "failed": {"another": "no room"}}))
    monkeypatch.setattr(stock, "predict", lambda cell, config: {"values": (103, {"weights": 103})})
    (measured,) = compare_stock(file, result=out)
    assert measured == Measured(CELLS[0], "values", 103, 100, {"weights": 103})
    made = json.loads(out.read_text())
    assert {name: made[name] for name in known} == known
    assert (made["rows"][0]["predicted"], made["rows"][0]["measured"], made["failed"]) == (
        103,
        100,
        {"another": "no room"},
    )
    assert "+3.00%" in capsys.readouterr().out
    for text in (
        "{",
        "{}",
        json.dumps({"rows": [{"cell": {"model": "x"}}]}),
        json.dumps({"rows": [{**row, "phase": "x"}]}),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as what bench stock writes"):
            compare_stock(file, result=None)
    command = CliRunner()
    for more in (["--large"], ["--only", "1"]):
        with pytest.raises(ConfigError, match=f"{more[0]}.*none is run"):
            command.invoke(bench_app(), ["stock", "--compare", str(file), *more], catch_exceptions=False)


def bench_app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("stock")(bench.stock)
    return app
