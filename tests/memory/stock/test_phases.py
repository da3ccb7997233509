"""The table of phases: worked figures for a published model, what surprises about stock verl, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shapes import small_qwen2

from verl_shard.common.errors import ConfigError
from verl_shard.config.roles import RoleConfig
from verl_shard.config.workload import Workload
from verl_shard.memory.constants import cublas_workspace
from verl_shard.memory.stock.micro_batch import Traces
from verl_shard.memory.stock.phases import PhaseRow, stock_phases
from verl_shard.memory.stock.roles import StockRole
from verl_shard.memory.stock.units import units_of
from verl_shard.models.read import read_model

GB = 10**9
OWN: dict[str, Any] = {"precision": "bf16-mixed", "micro_batch_size": 2}
TRACES = Traces()
WORKLOAD = Workload(prompt_length=16, response_length=48, train_batch_size=16, remove_padding=True)
_MODELS: dict[str, Any] = {}


def _models(tied: bool = False) -> dict[Any, Any]:
    key = str(tied)
    if key not in _MODELS:
        config = small_qwen2(tie_word_embeddings=tied)
        _MODELS[key] = {
            "actor": read_model(config, task="causal-lm"), "critic": read_model(config, task="value"),
        }  # fmt: skip
    return _MODELS[key]  # type: ignore[no-any-return]


def _rows(backend: Any = "fsdp", n_ranks: int = 4, *, tied: bool = False, **changed: Any) -> dict[str, PhaseRow]:
    roles: dict[Any, Any] = {
        "actor": RoleConfig(**OWN), "critic": RoleConfig(**OWN), "ref": RoleConfig(**OWN),
        "rollout": RoleConfig(gpu_memory_utilization=0.5, tensor_parallel_size=2 if n_ranks > 1 else 1),
        **{key: value for key, value in changed.items() if isinstance(value, RoleConfig)},
    }  # fmt: skip
    settings = {key: value for key, value in changed.items() if not isinstance(value, RoleConfig)}
    given = {"workload": WORKLOAD, "ranks_per_node": 2, "card_memory": 80 * GB, "traces": TRACES, **settings}
    workload = given.pop("workload")
    made = stock_phases(
        {**_models(tied), **given.pop("models", {})}, roles, workload, backend=backend, n_ranks=n_ranks, **given
    )
    return {row.phase: row for row in made}


def test_generation_of_a_7b_without_offload(published: Callable[[str], Any]) -> None:
    """40 of the engine, 22.8 of the actor's shard and states, 4 beside torch."""
    model = read_model(published("qwen2-7b"), task="causal-lm")
    roles: dict[Any, Any] = {
        "actor": RoleConfig(precision="bf16-mixed", micro_batch_size=8),
        "rollout": RoleConfig(gpu_memory_utilization=0.5, tensor_parallel_size=1),
    }
    workload = Workload(prompt_length=1024, response_length=1024, train_batch_size=256, kl="none", remove_padding=True)
    rows = {
        row.phase: row
        for row in stock_phases(
            {"actor": model}, roles, workload, backend="fsdp2", n_ranks=4, ranks_per_node=4, card_memory=80 * GB
        )
    }
    assert rows["generate"].n_bytes / GB == pytest.approx(67, abs=0.5)
    update = rows["update_actor"]
    inside = update.n_bytes - update.part("beside torch")
    # 41.8 by formula, which has no layer recomputed (about 5), no gradient of the head (1.1), no buffer of a reduction.
    assert 41.8 < inside / GB < 50
    assert update.part("weights") / GB == pytest.approx(7.6, abs=0.05)
    assert update.part("optimizer") / GB == pytest.approx(15.2, abs=0.05)
    assert not update.measured


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_offloads_never_lower_the_actors_own_update(backend: Any) -> None:
    stays = _rows(backend)
    moved = _rows(backend, actor=RoleConfig(**OWN, param_offload=True, optimizer_offload=True))
    assert moved["update_actor"].n_bytes == stays["update_actor"].n_bytes
    actor = stays["update_actor"].part("weights") + stays["update_actor"].part("optimizer")
    assert stays["update_critic"].n_bytes - moved["update_critic"].n_bytes == actor
    assert stays["generate"].n_bytes - moved["generate"].n_bytes == actor
    assert moved["update_actor"].host_bytes - stays["update_actor"].host_bytes == 2 * actor  # two ranks on a node


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_the_ref_is_on_the_host_whatever_is_set(backend: Any) -> None:
    rows = _rows(backend)
    n = _models()["actor"][0].n_params
    host = {part.name: part.n_bytes for part in rows["generate"].host}
    assert host["ref weights"] == pytest.approx(2 * 4 * n / 4, rel=1e-3)
    assert ("ref gradients, never used" in host) == (backend == "fsdp")
    assert rows["ref_log_prob"].part("weights") == 0
    assert rows["ref_log_prob"].part("gathered") > 0


def test_bf16_halves_what_is_kept() -> None:
    mixed, half = _rows("fsdp2"), _rows("fsdp2", actor=RoleConfig(precision="bf16", micro_batch_size=2))
    for name in ("weights", "optimizer"):
        assert mixed["update_actor"].part(name) == 2 * half["update_actor"].part(name)


def test_offload_policy_leaves_nothing_of_the_update_on_the_gpu() -> None:
    rows = _rows("fsdp2", actor=RoleConfig(**OWN, offload_policy=True))
    assert rows["update_actor"].part("weights") == rows["update_actor"].part("optimizer") == 0
    n = _models()["actor"][0].n_params
    host = {part.name: part.n_bytes for part in rows["update_actor"].host}
    assert host["actor offload_policy"] == pytest.approx(2 * 16 * n / 4, rel=1e-3)


def test_one_gpu_clones_the_model_with_fsdp_and_not_with_fsdp2() -> None:
    n = _models()["actor"][0].n_params
    assert _rows("fsdp", 1)["weight_sync"].part("export") == 4 * n
    assert _rows("fsdp2", 1)["weight_sync"].part("export") == 0
    aliased = 512 * 64  # vocabulary x hidden
    tied = _models(tied=True)["actor"][0].n_params
    assert _rows("fsdp", 1, tied=True)["weight_sync"].part("export") == 4 * (tied + aliased)


def test_a_root_stays_gathered_after_scoring_with_fsdp_on_several_gpus() -> None:
    spec = _models()["actor"][0]
    units = units_of(spec, "fsdp")
    root = 2 * units.units[units.root].n_params
    rows = _rows("fsdp")
    assert rows["generate"].part("roots left gathered") == root  # of the ref, for good
    assert rows["values"].part("roots left gathered") == 2 * root  # and of the actor, until its update
    assert all(row.part("roots left gathered") == 0 for row in _rows("fsdp2").values())
    assert all(row.part("roots left gathered") == 0 for row in _rows("fsdp", 1).values())


def test_the_critic_has_verls_own_budget_of_tokens() -> None:
    spec, module = _models()["critic"]
    seen = Traces()
    _rows("fsdp2", critic=RoleConfig(precision="bf16-mixed"), traces=seen)
    (critic,) = [wanted for _, wanted in seen.recordings if wanted.output == "values" and wanted.training]
    assert critic.sequences == WORKLOAD.train_batch_size // 4  # 32768 tokens are more than a rank has
    assert spec.task == "value"
    assert module is not None


def test_a_smaller_micro_batch_takes_less() -> None:
    half = RoleConfig(precision="bf16-mixed", micro_batch_size=1)
    assert _rows("fsdp2", actor=half)["update_actor"].n_bytes < _rows("fsdp2")["update_actor"].n_bytes


def test_the_settings_of_the_logits_reach_the_micro_batches() -> None:
    seen = Traces()
    _rows("fsdp2", actor=RoleConfig(**OWN, logits="chunked"), temperature=0.7, flash_attn=False, traces=seen)
    made = {(m.output, m.training, m.entropy): m for _, m in seen.recordings}
    scored, trained = made["log_probs", False, "chunked"], made["log_probs", True, "none"]
    assert ("log_probs", False, "none") in made  # the ref's
    assert (scored.temperature, scored.flash, trained.flash, scored.fused) == (0.7, False, False, False)
    seen.recordings.clear()
    _rows("fsdp2", actor=RoleConfig(**OWN, logits="fused"), entropy_loss=True, traces=seen)
    assert {m.entropy for _, m in seen.recordings if m.fused} == {
        "full"
    }  # in old_log_prob always, and here in the loss


def test_adapters_train_a_part_and_are_the_reference_too() -> None:
    rows = _rows("fsdp2", actor=RoleConfig(**OWN, lora_rank=4))
    whole = _rows("fsdp2")
    assert rows["update_actor"].part("optimizer") < whole["update_actor"].part("optimizer") / 5
    assert rows["update_actor"].part("weights") > whole["update_actor"].part("weights")
    assert rows["ref_log_prob"].part("weights") == rows["update_actor"].part("weights")
    assert "ref weights" not in {part.name for part in rows["generate"].host}
    asleep = {part.name: part.n_bytes for part in rows["generate"].host}["rollout engine asleep (level 1)"]
    assert asleep == 2 * 2 * _models()["actor"][0].n_params // 2  # bf16, two ranks, each half of the model


def test_phases_are_those_of_the_roles_there_are() -> None:
    assert list(_rows()) == [
        "init", "generate", "sleep", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor",
        "weight_sync",
    ]  # fmt: skip
    model = _models()["actor"]
    alone = stock_phases(
        {"actor": model}, {"actor": RoleConfig(**OWN)}, WORKLOAD, backend="fsdp2", n_ranks=1, ranks_per_node=1,
        card_memory=GB, traces=TRACES,
    )  # fmt: skip
    assert [row.phase for row in alone] == ["init", "old_log_prob", "update_actor"]
    assert all(row.measured for row in alone if row.phase != "init")
    update = alone[-1]
    assert update.allocated == update.n_bytes - update.part("beside torch")
    assert update.part("cuBLAS workspaces") == 2 * cublas_workspace().n_bytes


def test_all_that_verl_would_ignore_or_refuse_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        _rows(
            "fsdp",
            3,
            actor=RoleConfig(precision="bf16", offload_policy=True, param_offload=True),
            rollout=RoleConfig(gpu_memory_utilization=0.5, tensor_parallel_size=2),
        )
    assert [finding.code for finding in raised.value.findings] == ["blank", "no-effect", "no-effect", "not-divided"]


def test_a_recording_is_made_once() -> None:
    seen = Traces()
    _rows("fsdp", traces=seen)
    n = len(seen.recordings)
    _rows("fsdp2", 2, actor=RoleConfig(**OWN, param_offload=True), traces=seen)
    assert len(seen.recordings) == n


def test_a_role_knows_what_it_leaves() -> None:
    spec, module = _models()["actor"]
    own = RoleConfig(**OWN, optimizer="sgd", optimizer_offload=True)
    role = StockRole("actor", spec, module, own, units_of(spec, "fsdp2"), "fsdp2", 4)
    assert (role.states, role.idle) == (0, role.weights)
