"""verl's unmodified trainer over the device_map engine, for real."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Run
from verl_shard.common.errors import RunError
from verl_shard.common.files import read_json_lines
from verl_shard.config.run_folder import RunFolder, whole_checkpoints
from verl_shard.verl_plugin.launch import LAUNCH_MARK, marked_processes

pytestmark = pytest.mark.launch

Records = list[dict[str, Any]]
COMPARED = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "response_length/mean",
)


def steps_of(records: Records) -> dict[int, dict[str, float]]:
    return {record["step"]: record["data"] for record in records if "timing_s/step" in record["data"]}


@pytest.fixture(scope="module")
def ppo(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Records]:
    """Four steps of PPO with a critic and a reference, never interrupted."""
    return run(tmp_path_factory.mktemp("ppo") / "run")


def test_ppo_trains_actor_and_critic(ppo: tuple[RunFolder, Records]) -> None:
    folder, records = ppo
    steps = steps_of(records)
    assert sorted(steps) == [1, 2, 3, 4]
    for data in steps.values():
        # 4 prompts x 2 responses; the engine that trains is the one that generated.
        assert data["training/rollout_probs_diff_max"] < 1e-4
        assert data["actor/grad_norm"] > 0
        assert data["critic/grad_norm"] > 0
        assert math.isfinite(data["actor/reward_kl_penalty"])
    # The reference is the policy that training started from.
    assert abs(steps[1]["actor/reward_kl_penalty"]) < 1e-5
    assert steps[4]["actor/reward_kl_penalty"] != steps[1]["actor/reward_kl_penalty"]
    validated = [r["step"] for r in records if any(name.startswith("val-") for name in r["data"])]
    assert validated == [0, 4]
    assert list(whole_checkpoints(folder.path / "checkpoints")) == [2, 4]


def test_memory_is_recorded_for_each_role_and_phase(ppo: tuple[RunFolder, Records]) -> None:
    lines = list(read_json_lines(ppo[0].path / "memory.jsonl"))
    seen = {(line["role"], line["phase"]) for line in lines}
    assert seen == {
        ("rollout", "generate"), ("actor", "forward"), ("actor", "train"),
        ("ref", "forward"), ("critic", "forward"), ("critic", "train"),
    }  # fmt: skip
    assert {line["step"] for line in lines if line["phase"] == "train"} == {1, 2, 3, 4}


def test_grpo_with_adapters_packed_and_checkpointed(run: Run, tmp_path: Path) -> None:
    set_by_hand = (
        "actor_rollout_ref.model.use_remove_padding=true", "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
    )  # fmt: skip
    folder, records = run(tmp_path / "run", *set_by_hand, algorithm="grpo", steps=2, n=4, gradient_checkpointing=True)
    steps = steps_of(records)
    assert sorted(steps) == [1, 2]
    assert not any(name.startswith("critic/vf") for name in steps[1]), "GRPO has no critic"
    assert abs(steps[1]["actor/kl_loss"]) < 1e-5
    for data in steps.values():
        assert data["training/rollout_probs_diff_max"] < 1e-4
    checkpoint = whole_checkpoints(folder.path / "checkpoints")[2]
    meta = json.loads((checkpoint / "actor" / "lora_train_meta.json").read_text())
    assert meta["r"] == 4
    # With adapters the reference is the actor without them: no model of its own.
    assert "ref" not in {line["role"] for line in read_json_lines(folder.path / "memory.jsonl")}


class KilledError(Exception):
    pass


def test_a_killed_run_goes_on_as_if_it_had_not_been(
    run: Run, ppo: tuple[RunFolder, Records], tmp_path: Path, env: dict[str, str]
) -> None:
    def stop_after_third(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            # At once: a run that is asked to end may get through one more step before it does.
            for pid in marked_processes(env[LAUNCH_MARK]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path / "run", on_record=stop_after_third)
    assert marked_processes(env[LAUNCH_MARK]) == [], "something of the killed launch is still there"
    assert list(whole_checkpoints(tmp_path / "run" / "checkpoints")) == [2]

    folder, records = run(tmp_path / "run")
    assert [launch.after_step for launch in folder.launches()] == [0, 2]
    whole, resumed = steps_of(ppo[1]), steps_of(records)
    assert sorted(resumed) == [1, 2, 3, 4]
    for step in (3, 4):
        for name in COMPARED:
            # The policy loss is a mean of whitened advantages, that is zero but for the rounding of numbers around 1.
            assert resumed[step][name] == pytest.approx(whole[step][name], rel=1e-4, abs=1e-5), (step, name)


def test_a_failing_reward_stops_the_run_with_its_own_message(run: Run, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    raise ValueError('the scale is broken')\n"
    )
    with pytest.raises(RunError, match=r"ValueError: the scale is broken \(.*reward\.py:2\)"):
        run(tmp_path / "run", reward=f"{reward}:compute_score")
    events = [e for e in read_json_lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "failure"]
    assert events
    assert {event["failure"] for event in events} == {"reward"}
    assert steps_of(RunFolder(tmp_path / "run").metrics()) == {}


def test_a_failing_rollout_stops_the_run_with_its_own_message(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="leave no room for a response"):
        run(tmp_path / "run", "actor_rollout_ref.rollout.max_model_len=8")
    events = [e for e in read_json_lines(tmp_path / "run" / "events.jsonl") if e["kind"] == "failure"]
    assert {event["failure"] for event in events} == {"rollout"}
