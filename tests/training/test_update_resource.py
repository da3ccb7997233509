"""Roles that move between the steps of a run: it trains on as if they had been there from the start. On made-up devices."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runtime.fake_links import FakeLinks

from tests.training.conftest import count_w4
from verl_shard import ConfigError, PPOTrainer, RunError
from verl_shard.common.errors import DoesNotFitError
from verl_shard.common.files import read_json_lines
from verl_shard.common.notices import ShardNotice
from verl_shard.config.run_folder import WHOLE, RunFolder
from verl_shard.runtime.pipeline import pipeline_of
from verl_shard.runtime.scoring_model import ScoringModel
from verl_shard.training import moving
from verl_shard.training.placement import Places, RolePlace
from verl_shard.verl_plugin.local.group import Processes

Make = Callable[..., PPOTrainer]
COMPARED = ("critic/score/mean", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty")


def on_made_up_gpus(trainer: PPOTrainer, links: FakeLinks, n: int = 4) -> None:
    """Has a started run on the CPU be moved among GPUs that are not there."""
    places = replace(trainer._inputs.places, cpu=False, share=tuple(range(n)))
    trainer._inputs = replace(trainer._inputs, places=places)
    for engine in trainer._started().workers._engines.values():

        def move(where: Any, *, real: Any = engine.move, **_: Any) -> None:
            real(where, links=links)

        engine.move = move  # type: ignore[method-assign]


def engine_of(trainer: PPOTrainer, role: str) -> Any:
    return trainer._started().workers._engines[role]


def devices_of(trainer: PPOTrainer, role: str, links: FakeLinks) -> set[str]:
    """Where weights, buffers, gradients and the optimizer's states are."""
    engine = engine_of(trainer, role)
    modules = [copy.module for copy in engine.copies.each] if engine.copies else [engine.module]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    if engine.optimizer is not None:
        tensors += [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
    return {links.of(tensor) for tensor in tensors}


def moved_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["kind"] == "moved"]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], names: Any = COMPARED) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for one, other in zip(found, expected, strict=True):
        for name in names:
            assert one["data"][name] == pytest.approx(other["data"][name], rel=1e-4, abs=1e-6), (one["step"], name)


def test_every_role_moves_and_nothing_else_changes(trainer: Make, tmp_path: Path) -> None:
    settings = {"steps": 4, "kl_coef": 0.1, "critic_lr": 1e-2}
    still = trainer(ppo=settings, output_dir=tmp_path / "still").train()
    links, seen, plans = FakeLinks(), [], []

    def move(made: PPOTrainer, step: int, _: Any) -> None:
        if step == 1:
            on_made_up_gpus(made, links)
            made.update_resource("actor", [0, 1])
            made.update_resource("critic", "1-2", strategy="device_map")
            made.update_resource("ref", [3])
        if step == 3:
            made.update_resource("ref", [0])
        seen.append({role: devices_of(made, role, links) for role in ("actor", "critic", "ref")})
        if step == 2:
            made.update_resource("actor", [2])
            made.update_resource("actor", ["cuda:3", 0])
            made.update_resource("actor", [3, 0])  # it is there already
            made.update_resource("ref", [3, 1], strategy="data_parallel")
            made.update_resource("ref", "3,1", "data_parallel")  # they are
            assert engine_of(made, "ref").copies.devices == (3, 1)
            assert devices_of(made, "ref", links) == {"gpu3", "gpu1"}
            plans.append(yaml.safe_load((tmp_path / "moved" / "plan.yaml").read_text())["roles"]["ref"])
            kept = json.loads((tmp_path / "moved" / "run.json").read_text())["moved"]["ref"]
            assert kept == [{"asked": {"devices": ["cpu"]}, "now": {"copies_on": [3, 1]}}]

    def reward(response: str) -> float:
        with pytest.raises(ConfigError, match="a step is under way"):
            made.update_resource("actor", [0])
        return count_w4(response)

    made = trainer(ppo=settings, callbacks=[move], output_dir=tmp_path / "moved", reward_model=reward)
    with pytest.raises(ConfigError, match="the run is on the CPU"):
        made.update_resource("actor", [0])
    made.update_resource("actor", "cpu")  # where it is
    found = made.train()
    first = {"actor": {"gpu0", "gpu1"}, "critic": {"gpu1", "gpu2"}, "ref": {"gpu3"}}
    second = {**first, "actor": {"gpu3", "gpu0"}}
    assert seen == [first, first, {**second, "ref": {"gpu0"}}, {**second, "ref": {"gpu0"}}]
    assert plans[0]["copies_on"] == [3, 1]
    assert plans[0]["loads"][3] == plans[0]["loads"][1] > 0
    assert "device_map" not in plans[0]
    assert_same(found, still)
    # One GPU has no pipeline, several have; the rollout and the pieces go by the module as it is.
    assert pipeline_of(made.model) is not None
    assert engine_of(made, "actor")._batches().pipe is pipeline_of(made.model)
    plan = yaml.safe_load((tmp_path / "moved" / "plan.yaml").read_text())["roles"]
    assert {role: set(entry["device_map"].values()) for role, entry in plan.items()} == {
        "actor": {3, 0}, "critic": {1, 2}, "ref": {0},
    }  # fmt: skip
    assert [(e["component"], e["strategy"], e["step"], e["after"]) for e in moved_events(tmp_path / "moved")] == [
        ("actor", "device_map", 1, {"devices": [0, 1]}),
        ("critic", "device_map", 1, {"devices": [1, 2]}),
        ("ref", "none", 1, {"devices": [3]}),
        ("actor", "none", 2, {"devices": [2]}),
        ("actor", "device_map", 2, {"devices": [3, 0]}),
        ("ref", "data_parallel", 2, {"copies_on": [3, 1]}),
        ("ref", "none", 3, {"devices": [0]}),
    ]


def test_a_moved_actor_with_adapters(trainer: Make, tmp_path: Path) -> None:
    settings = {"steps": 2, "lora_rank": 2, "lora_alpha": 4}
    still = trainer(ppo=settings, output_dir=tmp_path / "still").train()
    links = FakeLinks()

    def move(made: PPOTrainer, step: int, _: Any) -> None:
        if step == 1:
            on_made_up_gpus(made, links)
            with pytest.raises(ConfigError, match="the reference is the actor without its adapters"):
                made.update_resource("ref", [0])
            made.update_resource("actor", [0, 1])

    made = trainer(ppo=settings, callbacks=[move], output_dir=tmp_path / "moved")
    assert_same(made.train(), still)
    assert devices_of(made, "actor", links) == {"gpu0", "gpu1"}


def test_a_resume_begins_where_roles_have_moved_to(
    trainer: Make, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, run, model = FakeLinks(), tmp_path / "run", make_model()

    def move(made: PPOTrainer, step: int, _: Any) -> None:
        on_made_up_gpus(made, links)
        made.update_resource("critic", [1, 2])

    trainer(actor_model=model, ppo={"steps": 1, "save_freq": 1}, callbacks=[move]).train()
    kept = json.loads((run / "run.json").read_text())["moved"]
    assert kept == {"critic": [{"asked": {"devices": ["cpu"]}, "now": {"devices": [1, 2]}}]}

    def places(asked: Any, size: int = 1, share: int = 4) -> Places:
        made = placement_of(asked, share)
        return moving.moved_before(RunFolder(run), made, Processes(0, size, 0))

    def placement_of(devices: Any, share: int) -> Places:
        roles = {"critic": RolePlace(devices, None, None, "fp32", "sdpa")}
        return Places(False, tuple(range(share)), roles, roles)

    assert places(("cpu",)).roles["critic"].devices == (1, 2)
    assert places((3,)).roles["critic"].devices == (3,), "model_config says something else now"
    assert places(("cpu",), size=2).roles["critic"].devices == ("cpu",)
    with pytest.warns(ShardNotice, match="2 is of another, or of none.*Using what model_config says"):
        assert places(("cpu",), share=2).roles["critic"].devices == ("cpu",)
    # The machine of a resume without GPUs is this one.
    with pytest.warns(ShardNotice, match="the run is on the CPU"):
        again = trainer(actor_model=model, ppo={"steps": 2, "save_freq": 1}, resume=True)
    assert [record["step"] for record in again.metrics] == [1]


def test_a_reward_model_moves(
    trainer: Make, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    judge = make_model("judge", task="SequenceClassification", num_labels=1, seed=2)
    made_with: list[dict[str, Any]] = []

    class OnTheHost(ScoringModel):
        """Takes any GPU for the CPU."""

        def __init__(self, path: Any, **options: Any) -> None:
            made_with.append(options)
            if "copies_on" in options:
                options = options | {"copies_on": ["cpu"] * len(options["copies_on"]), "device_map": "cpu"}
            elif 9 in (options["device_map"] or {}).values():
                raise DoesNotFitError("GPU 9 is full")
            super().__init__(path, **options)

    monkeypatch.setattr("verl_shard.training.reward_model.ScoringModel", OnTheHost)
    given: dict[str, Any] = {
        "reward_model": [judge, (count_w4, 0.5)], "ppo": {"steps": 2, "adv_estimator": "rloo", "n": 2},
        "model_config": {"reward": {"dtype": "float32"}},
    }  # fmt: skip
    still = trainer(**given, output_dir=tmp_path / "still").train()
    del made_with[:]
    made = trainer(**given)
    first = made.step()
    assert made._rewards is not None
    old = weakref.ref(made._rewards._ready["judge"].__self__)
    made._inputs = replace(made._inputs, places=replace(made._inputs.places, cpu=False, share=(0, 1, 9)))
    made.update_resource("reward", [0, 1], strategy="data_parallel")
    assert old() is None, "released before the new one was loaded"
    assert len(made._rewards._ready["judge"].__self__.scorer._copies) == 2
    assert [options.get("copies_on") for options in made_with] == [None, [0, 1]]
    with pytest.raises(DoesNotFitError, match="GPU 9 is full"):
        made.update_resource("reward", [9])
    second = made.step()  # with the copies, as they were
    assert made_with[-1]["copies_on"] == [0, 1]
    made.update_resource("reward", "cpu")
    assert made_with[-1]["device_map"] == {"": "cpu"}
    found = [{"step": step, "data": data} for step, data in enumerate((first, second), 1)]
    assert_same(found, still, ("critic/score/mean", "actor/grad_norm"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("judge", [0]), r"component = judge: no such component. Use one of actor, critic, ref, reward, rollout"),
        (("critic", [0]), "component = critic: this run has no critic model"),
        (("rollout", [0]), r"rollout.strategy = hf: the hf rollout generates on the actor's weights. Move the actor"),
        (
            ("rollout", [0], "vllm"),
            r"rollout.strategy = vllm: the hf rollout generates on the actor's weights. Move the actor",
        ),
        (("actor", 1), r"Write \[1\] for GPU 1"),
        (("actor", [1, 1]), r"device_ids = \[1, 1\]: one is named twice"),
        (("actor", [-1]), r"device_ids = \[-1\]: ids count from 0"),
        (("actor", [], "zero"), r"(?s)device_ids = \[\]: they name no GPU.*strategy = zero: an actor does not have it"),
        (("actor", "x"), "they name no GPU"),
        (("actor", [0, 1], "none"), "it is for one GPU, and there are 2"),
        (("actor", [0, 1], "data_parallel"), "a role that is trained has a copy in each process"),
        (("ref", [1], "data_parallel"), "there is one GPU, and so one copy. Use none"),
        (("ref", "cpu", "data_parallel"), "it works on GPUs, and device_type is cpu"),
        (("ref", [0, 7], "data_parallel"), "this process has GPU 0, 1, 2, 3; 7 is of another"),
        (("ref", {"model": 0, "lm_head": 1}, "data_parallel"), "device_ids is a device_map"),
        (("reward", [0], "data_parallel"), "there is one GPU, and so one copy"),
        (("reward", [0], "fsdp"), "reward does not have it"),
        (("actor", [0, 7]), "this process has GPU 0, 1, 2, 3; 7 is of another"),
        (("actor", "cpu"), "the run is on GPUs, and the actor is on verl's engine"),
        (("reward", {"model": 0, "score": 1}, "data_parallel"), "device_ids is a device_map"),
    ],
)
def test_what_cannot_be_moved_is_said(arguments: tuple[Any, ...], said: str) -> None:
    roles = {role: RolePlace((0,), None, None, "fp32", "sdpa") for role in ("actor", "ref", "reward")}
    places = Places(False, (0, 1, 2, 3), roles, roles)
    component, devices, *strategy = arguments
    with pytest.raises(ConfigError, match=said):
        moving.read_change(component, devices, *(strategy or [None]), runner="local", places=places, lora=False)


def test_strategies_of_verl_become_ours() -> None:
    roles = {role: RolePlace((0,), None, None, "fp32", "sdpa") for role in ("actor", "reward")}
    places = Places(False, (0, 1, 2, 3), roles, roles)
    read = partial(moving.read_change, runner="local", places=places, lora=False)
    with pytest.warns(ShardNotice, match=r"actor.strategy = fsdp: .* shards no tensor. Using device_map instead"):
        change = read("actor", "2-3", "fsdp")
    assert (change.strategy, change.section) == ("device_map", {"devices": [2, 3]})
    with pytest.warns(ShardNotice, match="the local runner serves no models. Using device_map instead"):
        assert read("reward", [1], "vllm").places.roles["reward"].devices == (1,)
    given = {"model.embed_tokens": 1, "lm_head": "cuda:2"}
    assert read("actor", given, None).places.roles["actor"].device_map == given
    offloaded = replace(places, roles={**roles, "ref": replace(roles["actor"], offload="stream")})
    with pytest.raises(ConfigError, match=r"its weights wait on the host \(offload=stream\)"):
        moving.read_change("ref", [1], None, runner="local", places=offloaded, lora=False)


def test_processes_move_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {"actor": RolePlace((0,), None, None, "fp32", "sdpa")}

    def change(*devices: int) -> moving.Change:
        places = Places(False, (0, 1, 2, 3), roles, roles)
        return moving.read_change("actor", list(devices), None, runner="local", places=places, lora=False)

    others = [change(3), change(2, 3)]

    class Two(Processes):
        def gather(self, work: Any) -> Any:
            return [*work(), others.pop(0)]

    two = Two(0, 2, 0)
    monkeypatch.setattr(moving, "_meet", lambda _: None)
    assert moving.agreed(two, lambda: change(1)).section == {"devices": [1]}
    with pytest.raises(
        ConfigError, match=r"process 0: actor to GPU 1; process 1: actor to GPU 2, GPU 3: .*Call it alike"
    ):
        moving.agreed(two, lambda: change(1))


def test_one_process_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr(moving, "_PATIENCE_S", 0.0)
    with pytest.raises(RunError, match="called in 1 of 2 processes"):
        moving._meet(Processes(0, 2, 0))
    store.add(f"verl_shard/move/{moving._meetings + 1}", 1)
    moving._meet(Processes(0, 2, 0))


def test_on_ray_a_launch_ends_after_its_next_checkpoint(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's main program is made up: it logs steps, writes a checkpoint every other one, and is left at the second."""
    launches: list[tuple[list[int], str | None, Any]] = []
    plan = tmp_path / "run" / "plan.yaml"

    def verl(overrides: list[str], folder: Any, *, launch: Any, on_record: Any, on_look: Any, **_: Any) -> None:
        steps: list[int] = []
        resumed = next((text for text in overrides if text.startswith("trainer.resume_from_path=")), None)
        launches.append((steps, resumed, yaml.safe_load(plan.read_text())["roles"]["actor"]["device_map"]))
        for step in range(launch.after_step + 1, 7):
            checkpoint = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
            if step % 2 == 0:
                checkpoint.mkdir(parents=True)
                (checkpoint / WHOLE).touch()
            on_look()  # the step's metrics come after its checkpoint
            record = {"step": step, "data": {"critic/score/mean": float(len(launches))}}
            with launch.metrics_file.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            steps.append(step)
            on_record(record)
            on_look()

    monkeypatch.setattr("verl_shard.verl_plugin.launch.run_verl", verl)
    monkeypatch.setattr("verl_shard.verl_plugin.fork_server.can_fork", lambda: False)
    monkeypatch.setattr("verl_shard.config.run_folder.check_manifest", lambda _: None)

    def move(made: PPOTrainer, step: int, _: Any) -> None:
        if step == 1:
            made._inputs = replace(made._inputs, places=replace(made._inputs.places, cpu=False, share=(0, 1)))
            monkeypatch.setattr(made._leases, "take", lambda gpus: None)
            made.update_resource("actor", [0, 1])
            with pytest.raises(ConfigError, match="PPOTrainer's models on Ray are on the device_map engine"):
                made.update_resource("actor", [1], "fsdp")

    made = trainer(runner="verl", ppo={"steps": 6, "save_freq": 2}, callbacks=[move])
    records = made.train()
    assert [steps for steps, _, _ in launches] == [[1, 2], [3, 4, 5, 6]]
    assert launches[0][1:] == ("trainer.resume_from_path=null", {"": "cpu"})
    assert launches[1][1] is not None
    assert launches[1][1].endswith("global_step_2")
    assert set(launches[1][2].values()) == {0, 1}
    assert [(record["step"], record["data"]["critic/score/mean"]) for record in records] == [
        (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    assert list(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == records
    assert [event["step"] for event in moved_events(tmp_path / "run")] == [1]


def test_on_ray_without_checkpoints_it_cannot_move() -> None:
    roles = {"actor": RolePlace((0,), None, None, "fp32", "sdpa")}
    places = Places(False, (0, 1), roles, roles)
    change = moving.read_change("actor", [1], None, runner="verl", places=places, lora=False)
    with pytest.raises(
        ConfigError, match=r"Set ppo_config\['save_freq'\], or write model_config=\{'actor': \{'devices': \[1\]\}\}"
    ):
        moving.check_checkpoints(change, -1, under_way=True)
    moving.check_checkpoints(change, -1, under_way=False)


@pytest.mark.parametrize(
    ("whole", "since", "seen", "last", "can"),
    [((), 1, 3, 9, False), ((), 0, 0, 9, False), ((2,), 2, 2, 9, True),
     ((2,), 3, 3, 9, False), ((2,), 2, 1, 9, False), ((2, 4), 3, 5, 9, True),
     ((9,), 3, 9, 9, False)],
)  # fmt: skip
def test_when_a_launch_can_be_left(
    whole: tuple[int, ...], since: int, seen: int, last: int, can: bool, tmp_path: Path
) -> None:
    for step in whole:
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}" / WHOLE).touch()
    (tmp_path / "global_step_8").mkdir()  # is being written
    assert moving.can_leave(tmp_path, since=since, seen=seen, last=last) is can
