"""A reward model that stays in host memory: its blocks visit the GPU one by one while it scores.

Run: python examples/reward_streamed.py MODEL REWARD_MODEL        a chat model, and a sequence classifier with one output
"""

import sys

import torch

from verl_shard import PPOTrainer

MODEL, REWARD_MODEL = sys.argv[1:3]
GPU = torch.cuda.is_available()

trainer = PPOTrainer(
    MODEL,
    reward_model=REWARD_MODEL,
    # On the CPU there is nothing to stream to.
    model_config={"reward": {"device": "cuda:0", "offload": "stream"}} if GPU else {},
    train_data=[f"Write one short sentence about the number {n}." for n in range(32)],
    generation_config={"max_new_tokens": 16},
    ppo_config={"adv_estimator": "grpo", "n": 4, "batch_size": 4, "steps": 3, "lr": 1e-5},
    output_dir=sys.argv[3] if len(sys.argv) > 3 else None,
)
for record in trainer.train():
    print(f"step {record['step']}: reward {record['data']['critic/score/mean']:.3f}")
