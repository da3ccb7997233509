"""Engines of stock verl get the GPUs and the share that their weights need: figures worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.config.inventory import Inventory
from verl_shard.config.workload import Workload
from verl_shard.planning.build import build_plan
from verl_shard.planning.engine_share import EngineShares
from verl_shard.planning.models import Models
from verl_shard.planning.settings import Settings, fill, read_roles

WORK = Workload(train_batch_size=64)


def filled(card: str, n: int, roles: dict[str, Any], n_nodes: int = 1) -> tuple[EngineShares, Settings]:
    shares = EngineShares(Models(), WORK, Inventory.declared(n, card=card, n_nodes=n_nodes))
    return shares, fill(read_roles(roles, "fsdp2"), WORK)


@pytest.mark.parametrize(
    ("model", "card", "n", "parallel", "share"),
    [
        ("qwen2-7b", "h100-80g", 8, 1, 0.5),  # 15.2 GB of 42.5
        ("qwen2-7b", "rtx-4090", 8, 4, 0.5),  # of 12.63: 15.2 does not go in, 7.615 is more than 0.6 of it, 3.8 is not
        ("qwen2-7b", "rtx-4090", 1, 1, 0.7),  # 15.2 + 0.1 of 18.1, though that leaves little for the cache
        ("qwen2-72b", "h100-80g", 8, 8, 0.5),  # 145.4 / 8 = 18.2 is within 0.6 of 42.5, 36.4 is not
        ("qwen2-72b", "h200", 8, 4, 0.5),  # 36.4 is within 0.6 of 75.4
    ],
)
def test_the_fewest_gpus_an_engine_and_then_a_larger_share(
    published: Callable[[str], Any], model: str, card: str, n: int, parallel: int, share: float
) -> None:
    shares, start = filled(card, n, {"actor": published(model)})
    made = shares.completed(start)
    assert made.roles["rollout"].tensor_parallel_size == parallel
    assert made.roles["rollout"].gpu_memory_utilization == share
    assert shares.can_start(made)


def test_one_sequences_cache_by_hand(published: Callable[[str], Any]) -> None:
    """Qwen2-7B: 28 layers x 2 x 4 key-value heads x 128 x 2 bytes x 1536 tokens; on 8 ranks heads are repeated."""
    shares, start = filled("h100-80g", 8, {"actor": published("qwen2-7b")})
    whole = 28 * 2 * 4 * 128 * 2 * 1536
    assert shares.need(start, "rollout", 1)[1] == whole
    assert shares.need(start, "rollout", 2)[1] == whole // 2
    assert shares.need(start, "rollout", 8)[1] == whole // 4
    deepseek, start = filled("h200", 8, {"actor": published("deepseek-v3")})
    assert deepseek.need(start, "rollout", 8)[1] == 61 * (512 + 64) * 2 * 1536  # latents, on every rank


def test_sizes_divide_a_node_and_the_heads(published: Callable[[str], Any]) -> None:
    shares, start = filled("rtx-4090", 6, {"actor": published("qwen2-7b")})  # 28 heads: 2 divides both, 3 and 6 do not
    assert shares.completed(start).roles["rollout"].tensor_parallel_size == 2


def test_a_reward_model_that_is_served_has_a_share_too(published: Callable[[str], Any]) -> None:
    roles = {"actor": published("qwen2-0.5b"), "reward": {"model": published("qwen2-72b")}}
    shares, start = filled("h100-80g", 8, roles)
    made = shares.completed(start)
    assert (made.roles["reward"].tensor_parallel_size, made.roles["rollout"].tensor_parallel_size) == (8, 1)


def test_what_cannot_start_is_said_with_the_arithmetic(published: Callable[[str], Any]) -> None:
    roles = {
        "actor": published("qwen2-72b"),
        "rollout": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.5},
    }
    with pytest.raises(ConfigError, match=r"72\.7 billion parameters in bf16 over 1 GPUs are 135\.\d+ GiB") as raised:
        build_plan(roles, gpus=8, gpu="h100-80g", backend="fsdp2")
    (fault,) = raised.value.findings
    assert fault.code == "engine-too-small"
    assert "tensor_parallel_size=4 and gpu_memory_utilization=0.5" in fault.fix
    with pytest.raises(ConfigError, match="cards with more memory"):
        build_plan({"actor": published("deepseek-v3")}, gpus=8, gpu="h100-80g", backend="fsdp2")


def test_a_lower_share_is_no_remedy_where_the_engine_would_not_start(published: Callable[[str], Any]) -> None:
    shares, start = filled("h100-80g", 8, {"actor": published("qwen2-72b")})
    made = shares.completed(start)
    assert shares.can_start(made.changed("rollout", gpu_memory_utilization=0.3))  # 18.2 + 0.1 of 25.5
    assert not shares.can_start(made.changed("rollout", gpu_memory_utilization=0.2))


def test_a_72b_on_1024_gpus(published: Callable[[str], Any]) -> None:
    inventory = Inventory.declared(1024, card="h100-80g", n_nodes=128)
    made = build_plan({"actor": published("qwen2-72b")}, gpus=inventory, backend="fsdp2", workload=WORK)
    assert made.fits
    assert made.roles["rollout"].settings["tensor_parallel_size"] == 8
    assert {len(row.peaks) for row in made.phases} == {1024}
    assert "GPU 0-1023" in made.report()
