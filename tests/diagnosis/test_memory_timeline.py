"""memory.jsonl as a table and a picture, beside the plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from verl_shard.common.errors import ConfigError
from verl_shard.config.inventory import Inventory
from verl_shard.diagnosis.memory_timeline import PhaseMemory, by_phase, draw, expected_peaks, last_steps, read_moments
from verl_shard.planning.build import build_plan

GIB = 2**30


def record(
    run: Path, step: int, role: str, phase: str, ended: float, seconds: float, peaks: dict[int, int], pid: int = 7
) -> None:
    gpus = {g: {"allocated": p - 5, "peak": p, "peak_reserved": p + 5, "used": p + 9} for g, p in peaks.items()}
    line = {
        "time": ended, "pid": pid, "step": step, "role": role, "phase": phase, "seconds": seconds, "host_peak": GIB, "gpus": gpus,
    }  # fmt: skip
    with (run / "memory.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    for step in (1, 2):
        at = 100.0 * step
        record(tmp_path, step, "rollout", "generate", at + 10, 8, {0: 300 + step, 1: 200})
        record(tmp_path, step, "actor", "forward", at + 12, 1, {0: 400, 1: 250 - step})
        record(tmp_path, step, "actor", "train", at + 20, 5, {0: 900 - step, 1: 700})
    return tmp_path


def test_moments_are_in_order_and_by_verls_names(run: Path) -> None:
    moments = read_moments(run)
    assert [(m.step, m.phase, m.began, m.ended) for m in moments[:3]] == [
        (1, "generate", 0, 8),
        (1, "old_log_prob", 9, 10),
        (1, "update_actor", 13, 18),
    ]
    assert moments[0].peak == {0: 301, 1: 200}
    assert moments[0].used == {0: 310, 1: 209}
    assert {m.step for m in last_steps(moments, 1)} == {2}


def test_a_row_for_each_phase_and_gpu_beside_the_plan(run: Path) -> None:
    rows = by_phase(read_moments(run), {"update_actor": {0: 1000}})
    assert rows[0] == PhaseMemory("generate", 0, 2, 302, 307, None)
    assert rows[3] == PhaseMemory("old_log_prob", 1, 2, 249, 254, None)
    assert rows[4] == PhaseMemory("update_actor", 0, 2, 899, 904, 1000)
    assert rows[4].off == pytest.approx(-0.101)
    assert rows[5].off is None


def test_what_a_plan_expects_is_read_from_the_run(run: Path) -> None:
    (run / "plan.yaml").write_text("schema: verl_shard/plan/1\nroles: {actor: {device_map: {'': 0}}}\n")
    assert expected_peaks(run) == {}
    config: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    from transformers import AutoConfig

    model = AutoConfig.for_model("qwen2", **config)
    model.save_pretrained(run / "model")
    work = {"train_batch_size": 8, "prompt_length": 16, "response_length": 16}
    plan = build_plan(
        {"actor": {"model": str(run / "model")}}, gpus=Inventory.declared(1, memory="8GiB"), workload=work
    )
    plan.save(run / "plan.yaml")
    found = expected_peaks(run)
    assert found["update_actor"][0] == next(row for row in plan.phases if row.phase == "update_actor").peaks[0]


def test_the_picture_has_a_panel_for_each_gpu_and_the_host(run: Path, tmp_path: Path) -> None:
    heights = []
    for name, expected in (("with", {"update_actor": {0: 1000}}), ("without", {})):
        draw(read_moments(run), expected, tmp_path / f"{name}.png", "a run")
        with Image.open(tmp_path / f"{name}.png") as image:
            heights.append(image.size[1])
            colours = image.convert("RGB").getcolors(10**7)
        assert (any(colour == (0xD9, 0x73, 0x0D) for _, colour in colours)) == (name == "with")
    assert heights[0] == pytest.approx((1.2 + 2.4 * 3) * 130, abs=1)


def test_folders_without_a_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run's folder"):
        read_moments(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="nothing has been recorded"):
        read_moments(tmp_path)
