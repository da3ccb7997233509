"""Whether it fits: what was given against the planner, asked directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from override_sets import GOOD, about, without
from shapes import small_qwen2

from verl_shard.common.units import GIB
from verl_shard.config.inventory import Inventory
from verl_shard.memory.constants import cublas_workspace
from verl_shard.memory.stock import terms
from verl_shard.planning.build import build_plan
from verl_shard.verl_plugin.check import fits
from verl_shard.verl_plugin.check.run import Report, check, gather
from verl_shard.verl_plugin.check.tree import compose
from verl_shard.verl_plugin.overrides_plan import to_verl_overrides

A, M, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))
SHORT = ["data.max_prompt_length=16", "data.max_response_length=16"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_qwen2(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return str(folder)


def look(model: str, *changes: str, memory: str = "8GiB", host: int | None = None, **more: Any) -> Report:
    named = [text.lstrip("+").split("=")[0] for text in (*changes, *SHORT, f"{M}.path=")]
    given = [*without(GOOD["GRPO plain"], *named), *SHORT, f"{M}.path={model}", *changes]
    inventory = Inventory.declared(4, memory=memory, host_memory=host)
    return check(given, inventory=inventory, ask_verl=False, **more)


def test_a_small_model_fits_and_the_fullest_phase_is_said(model: str) -> None:
    report = look(model)
    # Half of the card, and what the engine and NCCL have outside of torch; the model's weights are 0.2 MB.
    wanted = (4 * GIB + terms.BESIDE_TORCH.n_bytes + 2 * cublas_workspace().n_bytes) / GIB
    assert report.verdict == f"It fits: generate takes {wanted:.2f} GiB of 8.00 GiB on each GPU (estimated)."
    assert [text[:37] for text in report.left_out] == ["whether those machines have flash-att"]


def test_what_does_not_fit_is_a_fault_at_the_key_that_decides(model: str) -> None:
    # The engine asks for 90 % of a card of 8 GiB, and the trainer's context and NCCL take more than the rest.
    report = look(model, f"{RO}.gpu_memory_utilization=0.9")
    finding = about(report, f"{RO}.gpu_memory_utilization")
    assert (finding.level, finding.code) == ("error", "does-not-fit")
    assert finding.why.startswith("generate takes ")
    assert f"{RO}.gpu_memory_utilization=0." in finding.fix
    assert report.verdict.startswith("It does not fit")
    assert report.exit_code == 2


def test_an_engine_that_cannot_start_is_said_in_verls_keys(model: str) -> None:
    report = look(model, f"{RO}.gpu_memory_utilization=0.00001")
    finding = about(report, f"{RO}.gpu_memory_utilization")
    assert finding.code == "does-not-fit"
    assert f"{RO}.tensor_model_parallel_size=1 and {RO}.gpu_memory_utilization=0.5" in finding.fix


def test_host_memory(model: str) -> None:
    offload = [f"{A}.fsdp_config.{name}_offload=True" for name in ("param", "optimizer")]
    assert look(model, *offload, host=2**30).findings == ()
    finding = about(look(model, *offload, host=1000), f"{A}.fsdp_config.param_offload")
    assert (finding.code, finding.level) == ("host-memory", "error")
    assert "has 1000 B" in finding.why
    assert "actor optimizer_offload" in finding.why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([f"{M}.path=/nope/model"], "/nope/model is not a folder here"),
        ([f"{M}.path=nobody/no-such-model"], "the hub is not asked (HF_HUB_OFFLINE)"),
        ([f"{A}.fsdp_config.fsdp_size=2"], "more than one shard group"),
        ([f"{A}.ulysses_sequence_parallel_size=2"], "sequence parallelism is not planned"),
        (["trainer.v1.trainer_mode=separate_async"], "not for separate_async"),
        (["data.train_batch_size=63"], "planned when the faults above are mended"),
    ],
)
def test_what_is_not_planned_is_said_to_be_left_out(
    model: str, changes: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = look(model, *changes)
    assert [text for text in report.left_out if said in text]
    assert report.verdict == ""


def test_without_gpus_it_is_left_out(model: str) -> None:
    report = check([*GOOD["GRPO plain"]], ask_verl=False)
    assert [text for text in report.left_out if "--gpus 8 --gpu-memory 80GiB" in text]


def test_the_overrides_of_a_plan_are_planned_as_that_plan_and_have_no_fault(
    model: str, monkeypatch: pytest.MonkeyPatch, looked: Callable[..., Any]
) -> None:
    """There and back: what to_verl_overrides writes is read as the settings that it was made from."""
    del looked  # for its flash-attn
    workload = {
        "algorithm": "grpo", "train_batch_size": 16, "ppo_mini_batch_size": 8, "prompt_length": 16, "response_length": 16, "n": 2,
    }  # fmt: skip
    roles = {
        "actor": {"model": model, "optimizer_offload": True, "logits": "fused", "optimizer": "adamw-fused"},
        "ref": {"logits": "fused", "micro_batch_size": 4},
        "rollout": {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 2},
    }
    inventory = Inventory.declared(4, memory="8GiB")
    plan = build_plan(roles, gpus=inventory, workload=workload, backend="fsdp2")
    overrides = to_verl_overrides(plan)
    report = check(overrides, inventory=inventory, ask_verl=True)
    assert report.findings == ()
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "verl_shard.planning.build.build_plan", lambda roles, **more: asked.update(roles=roles, **more) or plan
    )
    assert fits.fit(compose(gather(overrides, None, None)), inventory).findings == []
    assert asked["workload"] == plan.workload
    for role, own in asked["roles"].items():
        settings = plan.roles[role].settings
        for name, value in own.items():
            if name == "micro_batch_size":
                value = min(value, 8 * 2 // 4)
                settings = {**settings, name: min(settings[name], 8 * 2 // 4)}
            if name != "model":
                assert (role, name, value) == (role, name, settings.get(name))
