"""resource_config.yaml: what it says, all that is wrong with it with lines, and who owns which GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_shard.common.errors import ConfigError
from verl_shard.common.tables import as_text
from verl_shard.config.inventory import Inventory
from verl_shard.config.resource_config import (
    as_resource_config,
    check_inventory,
    inventory_of,
    load_resource_config,
    ownership,
)
from verl_shard.config.resource_rules import gpus_of
from verl_shard.config.roles import Nodes, ResourceConfig, RoleConfig, VllmArgs

# As it stands in the article.
ARTICLE = """\
# resource_config.yaml
actor:   {device_type: cuda, device_ids: [0, 1], strategy: fsdp}
reward:  {device_type: cuda, device_ids: [2], strategy: none}
rollout: {device_type: cuda, device_ids: [3], strategy: vllm,
          vllm_args: {tensor_parallel_size: 1, gpu_memory_utilization: 0.85, enforce_eager: false}}
comm_backend: nccl
timeout_seconds: 180
"""


def load(tmp_path: Path, text: str) -> ResourceConfig:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    return load_resource_config(file)


def faults(call: Any, *given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call(*given)
    return [str(finding) for finding in caught.value.findings]


def test_the_articles_file_says_what_it_says(tmp_path: Path) -> None:
    assert load(tmp_path, ARTICLE) == ResourceConfig(
        actor=RoleConfig(device_type="cuda", devices=(0, 1), strategy="fsdp"),
        reward=RoleConfig(device_type="cuda", devices=(2,), strategy="none"),
        rollout=RoleConfig(
            device_type="cuda", devices=(3,), strategy="vllm", tensor_parallel_size=1, gpu_memory_utilization=0.85,
            vllm_args=VllmArgs(enforce_eager=False),
        ),
        backend="fsdp",
        comm_backend="nccl",
        timeout_seconds=180,
    )  # fmt: skip


def test_a_reward_model_on_the_cpu_names_no_gpu(tmp_path: Path) -> None:
    made = load(
        tmp_path, "actor: 2\nreward: {device_type: cpu, device_ids: [], strategy: none}".replace("actor: 2", "actor:")
    )
    assert made.reward == RoleConfig(device_type="cpu", strategy="none")
    assert made.backend == "device_map"


def test_every_blank_is_the_planners(tmp_path: Path) -> None:
    made = load(tmp_path, "ref:\nreward: some/model\nrollout: {attention: sdpa}\nnodes: 2\n")
    assert made == ResourceConfig(
        actor=RoleConfig(),
        ref=RoleConfig(),
        reward=RoleConfig(model="some/model"),
        rollout=RoleConfig(attn_implementation="sdpa"),
        nodes=Nodes(count=2),
    )


def test_everything_that_is_wrong_is_said_at_once_with_its_line(tmp_path: Path) -> None:
    text = """\
actor:
  device_ids: [0, 0, 1]
  stratgey: fsdp
critic: {device_ids: 2, strategy: fsdp2, offload: stream}
reward:
  device_ids: [2, 3]
  strategy: none
  precision: fp8
  precision: fp16
ref: {device_ids: "4-5", strategy: !!python/name:os.system "x"}
rollout:
  device_ids: 3
  strategy: vllm
  vllm_args:
    tensor_parallel_size: 2
    gpu_memory_utilisation: 0.8
comm_backend: nncl
timeout_seconds: "180"
colocation: [[actor, rewrd]]
nodes: {count: 1, gpus: 4, card: a100}
criticc: {}
"""
    found = faults(load, tmp_path, text)
    for said in (
        "r.yaml line 2: actor.device_ids = [0, 0, 1]: 0 is named more than once",
        "r.yaml line 3: actor.stratgey = 'fsdp': there is no such setting. Did you mean \"strategy\"?",
        "r.yaml line 4: critic.offload = stream: the critic is trained",
        "r.yaml line 7: reward.strategy = none: it is for one GPU, and there are 2",
        "r.yaml line 8: reward.precision = 'fp8': not a valid value. Input should be 'bf16-mixed', 'bf16' or 'fp32'",
        "r.yaml line 9: reward.precision: it stands in line 8 already",
        "r.yaml line 10: ref.strategy = !!python/name:os.system: a tag that makes an object of it",
        "r.yaml line 10: ref.device_ids = [4, 5]: there are 4 GPUs, 0 to 3",
        "r.yaml line 15: rollout.vllm_args.tensor_parallel_size = 2: 3 GPUs % 2 of an engine = 1, not 0. Choose a divisor: 1, 3",
        'r.yaml line 16: rollout.vllm_args.gpu_memory_utilisation = 0.8: there is no such setting. Did you mean "gpu_memory_',
        "r.yaml line 17: comm_backend = 'nncl': not a valid value. Input should be 'nccl', 'gloo'",
        "r.yaml line 18: timeout_seconds = '180': not a valid value. Input should be a valid integer",
        "r.yaml line 19: colocation.0.1 = 'rewrd': not a valid value",
        "r.yaml line 20: nodes.card = a100: there are several of that name",
        'r.yaml line 21: criticc: there is no such setting. Did you mean "critic"?',
    ):
        assert sum(line.startswith(said) for line in found) == 1, said
    assert len(found) == 15


def test_components_that_contradict_each_other(tmp_path: Path) -> None:
    text = """\
actor: {device_ids: 2, strategy: fsdp}
critic: {device_ids: [0, 1], strategy: fsdp2}
reward:
  device_ids: [1, 2]
rollout: {device_ids: 3}
colocation: [[actor, critic, rollout], [reward, ref, reward]]
nodes: {gpus: 2, memory: 80GiB, card: a100-80g}
"""
    assert faults(load, tmp_path, text) == [
        "r.yaml line 2: critic.strategy = fsdp2: the run is on fsdp, which holds actor, critic and ref alike. Use fsdp for all "
        "of them, or for none.",
        "r.yaml line 4: reward.device_ids = [1, 2]: critic has GPU 1, and colocation says that they share none. Give each GPU to "
        "one group.",
        "r.yaml line 4: reward.device_ids = [1, 2]: there are 2 GPUs, 0 to 1. Name GPUs that there are.",
        "r.yaml line 5: rollout.device_ids = 3: it shares GPUs with actor, which has 2. Give both the same, or one none.",
        "r.yaml line 5: rollout.device_ids = 3: there are 2 GPUs. Name GPUs that there are.",
        "r.yaml line 6: colocation = reward: it is named more than once. Name each component once.",
        "r.yaml line 6: colocation = ref: there is no such component in this file. Leave it out, or add it.",
        "r.yaml line 7: nodes.memory = 80GiB: the card says how much it has. Give one of the two.",
    ]


@pytest.mark.parametrize(
    ("component", "why"),
    [
        ("actor: {strategy: data_parallel, device_ids: 2}", "a role that is trained has a copy in each process"),
        ("critic: {strategy: vllm}", "trains nothing"),
        ("rollout: {strategy: fsdp}", "a rollout does not have it. Use one of hf, vllm, sglang"),
        ("reward: {strategy: data_parallel, device_ids: [4]}", "there is one GPU, and so one copy"),
        ("reward: {strategy: vllm, device_type: cpu}", "it works on GPUs, and device_type is cpu"),
        ("rollout: {strategy: sglang, vllm_args: {enforce_eager: true}}", "they are of strategy vllm"),
        ("reward: {strategy: none, gpu_memory_utilization: 0.5}", "it is of vllm and sglang"),
        ("rollout: {tensor_parallel_size: 2, vllm_args: {tensor_parallel_size: 4}}", "vllm_args says 4"),
        ("ref: {device_ids: [0], devices: [1]}", "devices is given too"),
        ("ref: {device_ids: []}", "no GPU is named"),
        ("ref: {device_type: cpu, device_ids: [0]}", "device_type is cpu"),
        ("ref: 3", "not a component"),
        ("ref: {device_ids: 0}", "0 of them is none: write [0] for GPU 0"),
        ("ref: {model: 3}", "neither the name of a model nor a model"),
        ("ref: {model: [a, b]}", "neither the name of a model nor a model"),
        ("actor: {gradient_checkpointing: 1}", "Input should be a valid boolean"),
        ("actor: {lora_rank: true}", "Input should be a valid integer"),
        ("rollout: {strategy: vllm, gpu_memory_utilization: true}", "Input should be a valid number"),
        ("nodes: {gpus: 2, card: h2000}", "or give nodes.memory"),
        ("ref: {micro_batch_size: yes}", "Input should be a valid integer"),
        ("nodes: {card: h200-141g}", "which GPUs, but not how many"),
        ("nodes: {gpus: 4, memory: many}", "nodes.memory = many"),
        ("backend: fsdp3", "'device_map', 'fsdp' or 'fsdp2'"),
        ("backend: fsdp2\nactor: {strategy: device_map}", "the run is on fsdp2"),
        ("- 1", "it has no components in it"),
        ("", "it has no components in it"),
    ],
)
def test_what_cannot_work(component: str, why: str, tmp_path: Path) -> None:
    (found,) = faults(load, tmp_path, component)
    assert why in found


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("actor: {strategy: fsdp2}", "fsdp2"),
        ("critic: {strategy: fsdp}", "fsdp"),
        ("rollout: {strategy: vllm}", "fsdp"),
        ("actor: {strategy: device_map}\nrollout: {strategy: vllm}", "device_map"),
        ("actor: {device_ids: 2}", "device_map"),
    ],
)
def test_strategies_say_the_backend(text: str, backend: str, tmp_path: Path) -> None:
    assert load(tmp_path, text).backend == backend


def test_a_dict_and_a_config_are_checked_alike() -> None:
    made = as_resource_config({"actor": {"device_ids": "0-1"}, "reward": {"device_ids": [2]}})
    assert as_resource_config(made) is made
    assert made.actor.devices == (0, 1)
    assert faults(as_resource_config, {"actor": {"device_ids": [0, 0]}, "x": 1}) == [
        "actor.device_ids = [0, 0]: 0 is named more than once. Name each GPU once.",
        "x = 1: there is no such setting. Use some of actor, backend, colocation, comm_backend, critic, nodes, ref, reward, "
        "rollout, timeout_seconds.",
    ]
    wrong = ResourceConfig(actor=RoleConfig(devices=(0, 1), strategy="none"))
    assert faults(as_resource_config, wrong)[0].startswith("actor.strategy = none: it is for one GPU, and there are 2")


@pytest.mark.parametrize(
    ("given", "owned"),
    [
        ({"actor": {"devices": 2}, "reward": {"devices": 1}}, {"actor": (0, 1), "reward": (0,)}),
        (
            {"actor": {"devices": 2}, "reward": {"devices": 1}, "rollout": {"devices": [0]}, "colocation": "separate"},
            {"actor": (1, 2), "reward": (3,), "rollout": (0,)},
        ),
        (
            {
                "actor": {"devices": 2},
                "ref": {},
                "reward": {"devices": [1]},
                "colocation": [["ref", "actor"], ["reward"]],
            },
            {"actor": (0, 2), "ref": (0, 2), "reward": (1,)},
        ),
        ({"actor": {}, "reward": {"device_type": "cpu"}}, {"reward": ()}),
    ],
)
def test_counts_become_ids(given: dict[str, Any], owned: dict[str, Any]) -> None:
    assert gpus_of(as_resource_config(given)) == owned


def test_a_config_is_checked_against_the_gpus_there_are(tmp_path: Path) -> None:
    made = load(tmp_path, ARTICLE + "nodes: 2")
    check_inventory(made, Inventory.declared(4, card="a100-80g", n_nodes=2))
    assert faults(check_inventory, made, Inventory.declared(3, card="a100-80g")) == [
        "rollout.devices = [3]: there are 3 GPUs, 0 to 2. Name GPUs that there are.",
        "nodes = 2: there is 1. Give the number there is.",
    ]


def test_nodes_that_say_which_gpus_are_an_inventory(tmp_path: Path) -> None:
    made = load(tmp_path, "actor: {}\nnodes: {count: 2, gpus: 4, card: a100-80g, host_memory: 512GiB}")
    there = inventory_of(made)
    assert there == Inventory.declared(8, card="a100-80g", n_nodes=2, host_memory=512 << 30)
    assert inventory_of(load(tmp_path, "nodes: {count: 2, gpus: 4}")) is None


def test_the_table_says_who_owns_which_gpu(tmp_path: Path) -> None:
    made = load(tmp_path, ARTICLE + "ref: {device_ids: [0, 1]}\ncritic:\n")
    shown = [line[1:-1].split("│") for line in as_text(100, ownership(made)).splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in shown] == [
        ["GPU 0", "actor (fsdp), ref", ""],
        ["GPU 1", "actor (fsdp), ref", ""],
        ["GPU 2", "reward", ""],
        ["GPU 3", "rollout (vllm)", ""],
        ["the planner's", "critic", ""],
    ]
    there = Inventory.declared(6, card="a100-80g", n_nodes=2)
    shown = [line[1:-1].split("│") for line in as_text(100, ownership(made, there)).splitlines() if line[0] == "│"]
    assert [[cell.strip() for cell in row] for row in shown][2:6] == [
        ["GPU 2", "reward", "a100-80g node 0"],
        ["GPU 3", "rollout (vllm)", "a100-80g node 1"],
        ["GPU 4", "nobody", "a100-80g node 1"],
        ["GPU 5", "nobody", "a100-80g node 1"],
    ]
    with pytest.raises(ConfigError, match="there are 3 GPUs"):
        ownership(made, Inventory.declared(3, card="a100-80g"))
