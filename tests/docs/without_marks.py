"""Marks for blocks of pages that have no comments of their own, by page and first line of code. See blocks.py."""

from __future__ import annotations

MARKS_OF: dict[tuple[str, str], dict[str, str]] = {
    ("docs/check.md", "verl-shard check --script run.sh --gpus 8 --gpu-memory 80GiB"): {
        "exit": "2 the script has faults"
    },
    ("docs/check.md", "#!/bin/bash"): {"file": "run.sh"},
    ("docs/check.md", "fault: torchrun"): {
        "shown": "where flash-attn is installed: without it there is a warning more"
    },
    ("docs/check.md", "It fits: generate takes 64.46 GiB of 80.00 GiB on each GPU (estimated)."): {
        "shown": "of the script with its faults mended"
    },
    (
        "docs/check.md",
        "verl-shard plan --actor Qwen/Qwen2-7B-Instruct --algorithm grpo --gpus 8 --gpu a100-80g --backend fsdp2 "
        "--emit overrides",
    ): {"not run": "a plan of this size takes half a minute"},
    ("docs/doctor.md", "versions"): {"shown": "of a machine"},
    ("docs/doctor.md", "from verl_shard.diagnosis.doctor import examine"): {
        "not run": "it starts processes for half a minute"
    },
    ("docs/explain.md", "verl-shard explain run.log # a file"): {"exit": "1 there is a fault"},
    ("docs/explain.md", "A GPU ran out of memory in update_actor"): {"shown": "in a wider window"},
    ("docs/gpus.md", "from verl_shard import get_gpu_usage, pin_to_device"): {"not run": "it needs a GPU"},
    ("docs/gpus.md", 'pin_to_device([2, 3]) # or 2, "2-3", "cuda:2"'): {"not run": "it needs a GPU"},
    (
        "docs/gpus.md",
        "error: GPU 1 = NVIDIA H200: pid 4711 of anna (python train.py, 71.20 GiB). Name another GPU, or wait, or end what "
        "runs there.",
    ): {"shown": "of a machine with GPUs"},
    ("docs/moving_resources.md", "from verl_shard import HybridTrainer"): {"not run": "it needs five GPUs"},
    (
        "docs/moving_resources.md",
        "from verl_shard.verl_plugin.local.served import add_replica, remove_replica, replicas",
    ): {"not run": "it needs a job that runs"},
    ("docs/moving_resources.md", "trainer.save_checkpoint()"): {
        "not run": "it is of a callback",
        "given": "trainer, PPOTrainer, folder, other",
    },
    ("docs/offload.md", "from verl_shard import offload_model"): {
        "not run": "it needs a GPU",
        "given": "reward_model, ids",
    },
    ("docs/pipeline.md", "from verl_shard import load_sharded, run_micro_batches"): {
        "not run": "it needs several GPUs",
        "given": "batches, optimizer",
    },
    ("docs/resource_config.md", "from verl_shard import load_resource_config, PPOTrainer"): {
        "not run": "it needs four GPUs"
    },
    ("docs/resource_config.md", "from verl_shard.common.tables import out"): {
        "not run": "it goes on from the block before"
    },
    ("docs/resource_config.md", "from verl_shard.config.resource_pools import pool_overrides"): {
        "not run": "it goes on from the block before"
    },
    ("docs/resource_config.md", "from verl_shard.config.topology import from_topology, to_topology"): {
        "not run": "its file is not there",
        "given": "yaml, other",
    },
    (
        "docs/resource_config.md",
        "resource_config.yaml line 3: actor.stratgey = 'fsdp': there is no such setting. Did you mean \"strategy\"?",
    ): {"shown": "of another file"},
    ("docs/resource_config.md", "│ GPU 0 │ actor (fsdp)   │"): {"shown": "without its heading"},
    ("docs/reward_models.md", "from verl_shard import PPOTrainer"): {"not run": "it needs a GPU"},
    ("docs/reward_models.md", "from verl_shard.runtime.scoring_model import ScoringModel"): {
        "not run": "it needs a GPU"
    },
}
