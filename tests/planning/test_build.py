"""Plans of small models, whose figures are held against estimates made phase by phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from shapes import small_qwen2

from verl_shard.common.errors import ConfigError
from verl_shard.common.units import GIB
from verl_shard.config.cards import Card
from verl_shard.config.inventory import Inventory
from verl_shard.memory.constants import CUBLAS_LT, CUDA_CONTEXT, cublas_workspace
from verl_shard.memory.estimate import estimate_memory
from verl_shard.planning.build import build_plan
from verl_shard.planning.plan import Plan
from verl_shard.planning.plan_file import read_role

WORK: dict[str, Any] = {"train_batch_size": 4, "prompt_length": 48, "response_length": 464}
LENGTH = WORK["prompt_length"] + WORK["response_length"]
PASS: dict[str, Any] = {"seq_len": LENGTH, "loss": "verl-ppo", "task": "causal-lm", "logits_to_keep": LENGTH - 1}
"""Of an actor in estimate_memory's words. Of a padded row all logits but one: prompts may be as short as a token."""
MIB = 2**20


def card(mib: int) -> Card:
    """A card on which torch may allocate so many MiB."""
    return Card("small", mib * MIB + CUDA_CONTEXT.n_bytes, 1e14, 1e13, 1e12, 5e10, 1e11, (9, 0), "made up")


def plan(mib: int = 4096, n: int = 1, workload: dict[str, Any] | None = None, **roles: Any) -> Plan:
    given = {"actor": small_qwen2(), **roles}
    return build_plan(given, gpus=Inventory.declared(n, card=card(mib)), workload=WORK | (workload or {}))


@pytest.fixture(scope="module")
def roomy() -> Plan:
    return plan(n=2)


def test_all_phases_of_a_ppo_step_in_their_order(roomy: Plan) -> None:
    phases = [row.phase for row in roomy.phases]
    assert phases == ["generate", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor"]
    assert roomy.fits
    assert not roomy.remedies
    assert roomy.step_seconds == pytest.approx(sum(row.seconds for row in roomy.phases))
    assert all(row.seconds > 0 for row in roomy.phases)


@pytest.mark.parametrize("shortest", [1, 40, 48])
def test_of_padded_rows_no_logits_are_planned_before_the_shortest_prompt(shortest: int) -> None:
    made = plan(workload={"shortest_prompt_length": shortest}, ref={"offload": "none"})
    (row,) = [row for row in made.phases if row.phase == "ref_log_prob"]
    wanted = {**PASS, "logits_to_keep": LENGTH - shortest, "phase": "forward", "precision": "bf16"}
    alone = estimate_memory(small_qwen2(), batch_size=4, **wanted)
    # A thread of backward passes has a workspace of its own.
    assert row.peaks[0] - row.parts["other roles"] - cublas_workspace().n_bytes == alone.peak


def test_what_an_update_leaves_free_is_written_for_the_engine(roomy: Plan, tmp_path: Path) -> None:
    roomy.save(tmp_path / "plan.yaml")
    for role in ("actor", "critic"):
        (row,) = [row for row in roomy.phases if row.phase == f"update_{role}"]
        free = read_role(tmp_path / "plan.yaml", role)["free"]
        assert set(free) == {0, 1}
        # On the fullest all that torch's allocator takes; on the other as large a share of what it gives out.
        assert free[row.fullest] == roomy.limits[row.fullest] - row.reserved
        other = 1 - row.fullest
        taken = row.peaks[other] * row.reserved / row.peaks[row.fullest]
        assert free[other] == pytest.approx(roomy.limits[other] - taken, abs=1)
        assert 0 < free[other] <= roomy.limits[other] - row.peaks[other]
    assert "free" not in read_role(tmp_path / "plan.yaml", "ref")
    again = Plan.load(tmp_path / "plan.yaml")
    assert again == roomy
    tight = replace(roomy, limits=dict.fromkeys(roomy.limits, 1))
    assert tight.free_beside("actor") == {0: 0, 1: 0}


def test_micro_batches_in_flight_are_counted_by_gpu() -> None:
    """On the first of two GPUs every one in flight, on the last one fewer; each is the estimate of the plan's own map."""
    actor = {"model": small_qwen2(), "in_flight": 2, "micro_batch_size": 1}
    made = plan(n=2, workload={"algorithm": "grpo", "kl": "none"}, actor=actor)
    (row,) = [row for row in made.phases if row.phase == "update_actor"]
    given = {"batch_size": 1, **PASS}
    device_map = made.roles["actor"].device_map
    both, one = (
        estimate_memory(small_qwen2(), accumulating=True, in_flight=n, device_map=device_map, **given).gpus  # type: ignore[arg-type]
        for n in (2, 1)
    )
    workspaces = 2 * cublas_workspace().n_bytes + CUBLAS_LT.n_bytes
    for gpu, estimate in both.items():
        assert row.peaks[gpu] - workspaces == pytest.approx(estimate.peak - estimate.workspace, rel=0.02)
    assert both[0].peak - both[0].workspace > 1.2 * (one[0].peak - one[0].workspace)
    # Of the one that is behind, the hidden states (64 wide), and the cosines and sines of 16 numbers, in fp32.
    assert both[1].peak - one[1].peak == 4 * PASS["seq_len"] * (64 + 2 * 16)  # type: ignore[operator]


def test_a_phase_on_one_gpu_is_the_estimate_beside_what_other_roles_keep() -> None:
    """One role alone: the plan's phase is estimate_memory's figure; with a reference its weights come on top."""
    alone = plan(workload={"algorithm": "grpo", "kl": "none"})
    (row,) = [row for row in alone.phases if row.phase == "update_actor"]
    estimate = estimate_memory(small_qwen2(), phase="train", batch_size=4, **PASS)
    # cuBLASLt's workspace is counted from the start: it came with the first step.
    assert row.peaks[0] == pytest.approx(estimate.peak, abs=CUBLAS_LT.n_bytes)
    with_ref = plan(workload={"algorithm": "grpo"})
    (row,) = [row for row in with_ref.phases if row.phase == "update_actor"]
    weights = estimate_memory(small_qwen2(), phase="forward", batch_size=1, seq_len=8, task="causal-lm").weights
    assert row.peaks[0] == pytest.approx(estimate.peak + weights, abs=CUBLAS_LT.n_bytes)
    assert row.parts["other roles"] == weights


def test_the_parts_of_a_phase_are_its_peak(roomy: Plan) -> None:
    streamed = plan(ref={"offload": "stream"})
    for row in (*roomy.phases, *streamed.phases):
        assert sum(row.parts.values()) == row.peaks[row.fullest]
        assert all(size > 0 for size in row.parts.values())


def test_of_a_streamed_reference_embedding_and_head_stay_on_the_gpu_and_blocks_are_on_the_host() -> None:
    """By the shapes of a Qwen2, 2 bytes an element; the allocator gives out multiples of 512."""
    hidden, vocab, wide = 64, 512, 160
    matrices = 2 * (2 * hidden * hidden + 2 * hidden * (hidden // 2) + 3 * hidden * wide)
    norms, biases = 2 * 2 * hidden, 2 * (hidden + 2 * hidden // 2)
    around = 2 * 2 * vocab * hidden + 512 + 2 * 512  # embedding and head; the last norm; the tables of rotary positions
    model = small_qwen2(tie_word_embeddings=False)
    work = {"algorithm": "grpo", "kl": "loss"}
    resident, streamed = (plan(actor=model, ref={"offload": offload}, workload=work) for offload in ("none", "stream"))
    for row, same in zip(streamed.phases, resident.phases, strict=True):
        if row.phase != "ref_log_prob":
            assert row.parts["other roles"] == around
            assert same.peaks[0] - row.peaks[0] == 4 * (matrices + 2 * 512 + 3 * 512)
    assert streamed.host_parts == {"ref weights": 4 * (matrices + norms + biases)}


def test_states_stay_while_an_actor_scores() -> None:
    alone = plan(workload={"algorithm": "grpo", "kl": "none"})
    (row,) = [row for row in alone.phases if row.phase == "old_log_prob"]
    given = {"batch_size": 4, "one_device": True, **PASS}
    forward = estimate_memory(small_qwen2(), phase="forward", precision="bf16-mixed", trainable=True, **given)
    states = estimate_memory(small_qwen2(), phase="train", **given).optimizer
    # Autograd's thread has kept its workspace since the first update.
    assert row.peaks[0] == forward.peak + states + cublas_workspace().n_bytes


def test_more_gpus_hold_less_each(roomy: Plan) -> None:
    one = plan(n=1)
    for phase in ("update_actor", "update_critic"):
        of_one, of_two = (next(row for row in p.phases if row.phase == phase) for p in (one, roomy))
        assert max(of_two.peaks.values()) < of_one.peaks[0] < sum(of_two.peaks.values()) * 1.2


def test_written_and_read_it_is_the_same_plan(roomy: Plan, tmp_path: Path) -> None:
    roomy.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == roomy
    tight = plan(160)
    tight.save(tmp_path / "tight.yaml")
    assert Plan.load(tmp_path / "tight.yaml") == tight
    assert Plan.load(tmp_path / "tight.yaml").report() == tight.report()


def test_the_engine_reads_its_maps_from_the_file(roomy: Plan, tmp_path: Path) -> None:
    roomy.save(tmp_path / "plan.yaml")
    actor = read_role(tmp_path / "plan.yaml", "actor")
    assert actor["device_map"] == dict(roomy.roles["actor"].device_map or {})
    assert actor["precision"] == "bf16-mixed"
    assert set(actor["device_map"].values()) == {0, 1}


def test_blanks_are_filled_so_that_it_fits_and_the_fullest_gpu_is_within_its_limit() -> None:
    needed = max(plan().phases, key=lambda row: row.peaks[0]).peaks[0]
    tight = plan(int(0.75 * needed / MIB))
    assert tight.fits
    assert tight.remedies
    assert all(row.taken for row in tight.remedies)
    assert all(size <= tight.limits[gpu] for row in tight.phases for gpu, size in row.peaks.items())
    for row in tight.remedies:
        role, setting = row.setting.split(", ")[0].split("=")[0].split(".")
        assert setting in tight.roles[role].chosen
    assert "It fits" in tight.report()
    assert "Chosen so that it fits" in tight.report()


def test_what_was_set_is_kept_and_the_remedies_are_told() -> None:
    needed = max(plan().phases, key=lambda row: row.peaks[0]).peaks[0]
    fixed = {
        "optimizer": "adamw", "gradient_checkpointing": False, "micro_batch_size": 4, "logits": "full", "lora_rank": 0,
    }  # fmt: skip
    critic = {name: value for name, value in fixed.items() if name != "logits"}
    made = plan(
        int(0.7 * needed / MIB),
        actor={"model": small_qwen2(), **fixed},
        critic=critic,
        ref={"micro_batch_size": 4, "offload": "none", "logits": "full"},
        rollout={"micro_batch_size": 4},
    )
    assert not made.fits
    assert made.roles["actor"].settings["micro_batch_size"] == 4
    assert made.remedies
    assert not any(row.taken for row in made.remedies)
    text = made.report()
    assert "It does not fit" in text
    assert "Cheapest way to make it fit" in text
    # What it says is true: with these settings it does fit.
    roles: dict[str, dict[str, Any]] = {
        "actor": {"model": small_qwen2(), **fixed},
        "critic": dict(critic),
    }
    roles["ref"] = {"micro_batch_size": 4, "offload": "none", "logits": "full"}
    roles["rollout"] = {"micro_batch_size": 4}
    for row in made.remedies:
        for setting in row.setting.split(", "):
            name, value = setting.split("=")
            role, field = name.split(".")
            roles[role][field] = yaml.safe_load(value)
    assert build_plan(roles, gpus=Inventory.declared(1, card=card(int(0.7 * needed / MIB))), workload=WORK).fits


def test_parameters_are_not_told_as_bytes_are(roomy: Plan) -> None:
    many = replace(roomy, roles={"actor": replace(roomy.roles["actor"], n_params=7_615_616_512)})
    rows = [line for line in many.report(140).splitlines() if "7.62" in line]
    assert [line.split("│")[3].strip() for line in rows] == ["7.62 billion"]


def test_too_small_a_card_says_how_many_would_do() -> None:
    made = plan(70)
    assert not made.fits
    assert "it fits on" in made.fits_with or "neither on" in made.fits_with


def test_a_reward_model_on_the_cpu_costs_no_gpu_and_host_memory() -> None:
    made = plan(reward={"model": small_qwen2(), "device_type": "cpu"})
    (row,) = [row for row in made.phases if row.role == "reward"]
    # While it scores, GPUs hold what trains and what scores there, and no batch.
    assert row.parts == {"other roles": row.peaks[0]}
    assert row.peaks[0] < min(other.peaks[0] for other in made.phases if other is not row)
    assert made.host_parts["reward weights"] > 0
    assert made.roles["reward"].devices == ()


def test_roles_on_gpus_of_their_own() -> None:
    made = plan(n=2, critic={"devices": [1]}, actor={"model": small_qwen2(), "devices": [0]})
    (row,) = [row for row in made.phases if row.phase == "update_critic"]
    assert row.fullest == 1
    assert set((made.roles["actor"].device_map or {}).values()) == {0}
    assert set((made.roles["critic"].device_map or {}).values()) == {1}


def test_offload_advice_says_which_phase_and_how_much() -> None:
    made = plan()
    (advice,) = [row for row in made.advice if row.role == "ref"]
    assert not advice.on
    assert advice.saved > 0
    assert "it fits without" in advice.why


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gpus": 4}, "4 GPUs, but not which"),
        ({"gpus": 0, "gpu": "h200"}, "whole number of 1 or more"),
        ({"gpus": 2, "gpu": "h2000"}, "no such card is known"),
        ({}, "never looks for GPUs itself"),
        ({"gpus": 1, "gpu": "h200", "workload": {"batch": 3}}, "there is no such setting"),
        ({"gpus": 1, "gpu": "h200", "workload": {3: 3}}, "Keys should be strings"),
        (
            {"gpus": 1, "gpu": "h200", "workload": {"train_batch_size": 10, "ppo_mini_batch_size": 3}},
            "10 % 3 = 1, not 0",
        ),
    ],
)
def test_what_cannot_be_meant(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build_plan({"actor": small_qwen2()}, **given)


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("path/to/model", """'path/to/model': a model alone, and a plan asks for the role that it has. """
            'Write {"actor": "path/to/model"}.'),
        (Path("a/b"), """'a/b': a model alone, and a plan asks for the role that it has. Write {"actor": "a/b"}."""),
        ("resources.yaml", "'resources.yaml': the name of a file, which is read first. "
            "Write load_resource_config('resources.yaml')."),
        *((given, f"{kind}: not a mapping of roles to their models. Write {{\"actor\": MODEL}}, MODEL a folder, a hub id, a "
            "PretrainedConfig or a module, or give a ResourceConfig.")
            for given, kind in ((None, "NoneType"), (["actor"], "list"), (small_qwen2(), "Qwen2Config"))),
    ],
)  # fmt: skip
def test_roles_that_are_no_mapping_are_one_fault_beside_all_others(roles: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_plan(roles, gpus=4, gpu=5, workload="grpo", rates="rates.json")  # type: ignore[arg-type]
    first, *others = (str(finding) for finding in caught.value.findings)
    assert first == f"roles = {said}"
    assert others == [
        """workload = 'grpo': not a mapping of Workload's fields. Write {"algorithm": "grpo", "train_batch_size": 64, ...}, """
        "or give a Workload.",
        'gpu = 5: not the name of a card. Write gpu="a100-80g", or gpu_memory="80GiB" for a card that is not known.',
        "rates = 'rates.json': not a Rates. Write rates=Rates.load(FILE), FILE from verl-shard bench rates --out.",
    ]


@pytest.mark.parametrize(("role", "ids"), [("actor", [3]), ("critic", 3)])
def test_gpus_that_are_not_there(role: str, ids: object) -> None:
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        plan(n=2, **{role: {"model": small_qwen2(), "devices": ids}})


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("schema: something")
    with pytest.raises(ConfigError, match="schema"):
        Plan.load(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "missing.yaml")


def test_limits_leave_out_the_drivers_context(roomy: Plan) -> None:
    assert roomy.limits == {0: 4 * GIB, 1: 4 * GIB}


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_stock_verl_is_a_backend_too(backend: Any, tmp_path: Path) -> None:
    made = build_plan({"actor": small_qwen2()}, gpus=4, gpu="a100-80g", workload=WORK, backend=backend)
    phases = [row.phase for row in made.phases]
    assert phases == [
        "generate", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor", "weight_sync",
    ]  # fmt: skip
    assert made.fits
    assert made.roles["rollout"].settings["gpu_memory_utilization"] == 0.5
    (generate,) = [row for row in made.phases if row.phase == "generate"]
    assert generate.parts["rollout engine"] == pytest.approx(0.5 * made.inventory.gpus[0].card.memory, abs=1)
    assert "rollout engine" in generate.unmeasured
    assert "not measured" in made.report()
    advice = {(row.role, row.what): row for row in made.advice}
    assert not advice["actor", "param_offload"].on
    assert any(check.what == "ref.param_offload" for check in made.checks)
    made.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == made


def test_side_by_side_no_set_of_gpus_waits_for_another() -> None:
    given = {"actor": small_qwen2()}
    gpus = Inventory.declared(4, card=card(4096))
    apart = build_plan(given, gpus=gpus, workload=WORK, side_by_side=True)
    together = build_plan(given, gpus=gpus, workload=WORK)
    assert apart.fits
    assert apart.step_seconds < together.step_seconds
    assert set(apart.roles["actor"].devices).isdisjoint(apart.roles["critic"].devices)
    assert apart.placements
    assert together.placements == ()


def test_packed_inputs_have_a_row_of_all_tokens_and_no_copy_of_the_logits() -> None:
    """Fused attention of a kernel that takes sequences apart: no mask, and no logits without padding beside the logits."""
    given = {"actor": {"model": small_qwen2(), "attn_implementation": "flash_attention_2"}}
    plain, packed = (
        plan(workload={"algorithm": "grpo", "kl": "none", "remove_padding": on}, **given) for on in (False, True)
    )
    for row, other in zip(plain.phases, packed.phases, strict=True):
        if row.phase != "generate":
            assert other.peaks[0] < row.peaks[0]
        else:
            assert other.peaks == row.peaks


def test_side_by_side_is_not_for_stock_verl() -> None:
    with pytest.raises(ConfigError, match="side_by_side"):
        build_plan({"actor": small_qwen2()}, gpus=2, gpu="h200", backend="fsdp", side_by_side=True)


def test_one_process_has_the_gpus_of_one_node() -> None:
    gpus = Inventory.declared(4, card=card(4096), n_nodes=2)
    with pytest.raises(ConfigError, match="4 GPUs on 2 nodes") as raised:
        build_plan({"actor": small_qwen2()}, gpus=gpus, workload=WORK)
    assert [finding.where for finding in raised.value.findings] == ["actor.devices", "critic.devices", "ref.devices"]
    with pytest.raises(ConfigError, match="2 GPUs on 2 nodes"):
        build_plan({"actor": {"model": small_qwen2(), "devices": [1, 2]}}, gpus=gpus, workload=WORK, side_by_side=True)
    apart = build_plan({"actor": small_qwen2()}, gpus=gpus, workload=WORK, side_by_side=True)
    for role in apart.roles.values():
        assert len({gpus.gpus[gpu].node for gpu in role.devices}) == 1


def test_a_card_on_which_stock_verl_needs_every_offload() -> None:
    """Just over what is left when all is on the host: the last remedies are taken, and the advice is about them."""
    lean = {"micro_batch_size": 1, "lora_rank": 0, "logits": "fused"}
    on_host = {"offload_policy": True}
    critic = {name: value for name, value in (lean | on_host).items() if name != "logits"}
    model = small_qwen2(hidden_size=512, intermediate_size=1280)
    roomy = Inventory.declared(2, card=card(2**16))
    given = {"gpus": roomy, "workload": WORK, "backend": "fsdp2"}
    least = build_plan({"actor": {"model": model, **lean, **on_host}, "critic": critic}, **given)
    without = build_plan(
        {"actor": {"model": model, **lean}, "critic": {"micro_batch_size": 1, "lora_rank": 0}}, **given
    )
    # What does not depend on the card: all but the rollout engine, which generates alone with the least that it needs.
    needed, resident = (
        max(size for row in made.phases if row.phase != "generate" for size in row.peaks.values())
        for made in (least, without)
    )
    assert needed < resident
    tight = Inventory.declared(2, card=replace(card(0), memory=needed + 32 * MIB))
    made = build_plan({"actor": model}, gpus=tight, workload=WORK, backend="fsdp2")
    assert made.fits
    names = {row.name for row in made.remedies}
    assert "offload_policy" in names
    on = {(row.role, row.what) for row in made.advice if row.on}
    for role in ("actor", "critic"):
        settings = made.roles[role].settings
        assert {what for who, what in on if who == role} <= {name for name, value in settings.items() if value is True}
