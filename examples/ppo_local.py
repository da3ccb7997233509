"""PPO in one process, on GPUs or on the CPU, with a reward of one's own.

Run: python examples/ppo_local.py [MODEL]        MODEL: a folder or hub id of a small chat model
"""

import sys

from verl_shard import PPOTrainer

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
PROMPTS = [f"Write one short sentence about the number {n}." for n in range(32)]


def brief(response: str) -> float:
    """Short answers are good, empty ones are not."""
    words = len(response.split())
    return 1 / words if words else 0.0


trainer = PPOTrainer(
    MODEL,
    reward_model=brief,
    train_data=PROMPTS,
    generation_config={"max_new_tokens": 16, "batch_size": 4},
    ppo_config={"kl_coef": 0.05, "max_epochs": 1, "steps": 3, "batch_size": 4, "lr": 1e-5},
    output_dir=sys.argv[2] if len(sys.argv) > 2 else None,
)
for record in trainer.train():
    data = record["data"]
    print(f"step {record['step']}: reward {data['critic/score/mean']:.3f}, KL {data['actor/reward_kl_penalty']:.4f}")
trainer.save(trainer.output_dir / "trained")
print("The run is in", trainer.output_dir)
