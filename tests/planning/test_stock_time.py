"""Seconds of stock verl's log-probabilities where flash-attn is missing: by hand from the operations for each token."""

from __future__ import annotations

from typing import Any

import pytest
from shapes import small_qwen2

from verl_shard.config.cards import CARDS
from verl_shard.config.inventory import Inventory
from verl_shard.config.roles import RoleConfig
from verl_shard.memory.stock.phases import has_flash_attn
from verl_shard.planning.build import build_plan

N, PROMPT, RESPONSE, EPOCHS = 16, 48, 80, 2
PHASES = ("old_log_prob", "ref_log_prob", "update_actor")


def seconds(attention: str, n: int = 1, precision: str = "bf16-mixed", logits: str = "full") -> dict[str, float]:
    own: dict[str, Any] = {
        "micro_batch_size": 4, "attn_implementation": attention, "precision": precision, "logits": logits,
    }  # fmt: skip
    actor = {
        "model": small_qwen2(), "gradient_checkpointing": True, "optimizer": "adamw", "lora_rank": 0,
        "param_offload": False, "optimizer_offload": False, **own,
    }  # fmt: skip
    made = build_plan(
        {"actor": actor, "ref": own, "rollout": {"gpu_memory_utilization": 0.3}},
        gpus=Inventory.declared(n, card=CARDS["h200-141g"]),
        workload={
            "train_batch_size": N, "prompt_length": PROMPT, "response_length": RESPONSE, "algorithm": "grpo", "n": 2,
            "kl": "loss", "ppo_epochs": EPOCHS,
        },
        backend="fsdp2",
    )  # fmt: skip
    return {row.phase: row.seconds for row in made.phases}


@pytest.mark.parametrize(("precision", "backward"), [("bf16-mixed", 5), ("fp32", 3)])
@pytest.mark.parametrize("n", [1, 2])
def test_each_token_takes_the_host_five_operations_and_in_an_update_those_of_the_backward(
    n: int, precision: str, backward: int
) -> None:
    """19.7 us for each of a forward and 28.2 for each of a backward, of the tokens that a rank has."""
    without, with_it = seconds("sdpa", n, precision), seconds("flash_attention_2", n, precision)
    tokens = 2 * N * (PROMPT + RESPONSE) / n
    more = {phase: without[phase] - with_it[phase] for phase in with_it}
    assert more["old_log_prob"] == more["ref_log_prob"] == pytest.approx(tokens * 5 * 19.7e-6)
    assert more["update_actor"] == pytest.approx(EPOCHS * tokens * (5 * 19.7e-6 + backward * 28.2e-6))
    assert all(more[phase] == 0 for phase in more if phase not in PHASES)


def test_fused_kernels_make_no_logits_and_have_no_such_loop() -> None:
    without, with_it = (seconds(attention, logits="fused") for attention in ("sdpa", "flash_attention_2"))
    assert without == with_it


def test_a_role_that_takes_flash_attention_means_that_it_is_installed() -> None:
    """Stock verl's critic takes nothing else."""
    assert has_flash_attn({"actor": RoleConfig(attn_implementation="sdpa"), "critic": RoleConfig()})
    assert not has_flash_attn({"actor": RoleConfig(attn_implementation="sdpa"), "rollout": RoleConfig()})
