"""PPO in several processes: each has its own GPUs, shards the models over them, and gradients are averaged.

On 8 GPUs, two to a process:
    verl-shard accelerate-config --gpus 8 --gpus-per-process 2 > accelerate.yaml
    accelerate launch --config_file accelerate.yaml examples/ppo_accelerate.py [MODEL]
On the CPU, in two processes:
    torchrun --nproc_per_node=2 examples/ppo_accelerate.py MODEL
"""

import os
import sys

from verl_shard import PPOTrainer

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"


def brief(response: str) -> float:
    """Short answers are good, empty ones are not."""
    words = len(response.split())
    return 1 / words if words else 0.0


trainer = PPOTrainer(
    MODEL,
    reward_model=brief,
    train_data=[f"Write one short sentence about the number {n}." for n in range(64)],
    generation_config={"max_new_tokens": 16},
    # Prompts and mini-batches are those of all processes, a micro-batch is of one. GRPO needs no critic.
    ppo_config={"adv_estimator": "grpo", "n": 4, "batch_size": 8, "micro_batch_size": 4, "steps": 3, "lr": 1e-5},
    output_dir=sys.argv[2] if len(sys.argv) > 2 else None,
)
for record in trainer.train():
    if os.environ.get("RANK", "0") == "0":
        print(f"step {record['step']}: reward {record['data']['critic/score/mean']:.3f}")
