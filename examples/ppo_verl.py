"""GRPO on verl's own trainer on Ray, on GPUs or on the CPU: as ppo_local.py, with another runner.

Run: python examples/ppo_verl.py [MODEL]        MODEL: a folder or hub id of a small chat model; on two CPU cores a minute
"""

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
    train_data=[f"Write one short sentence about the number {n}." for n in range(32)],
    generation_config={"max_new_tokens": 16},
    ppo_config={"adv_estimator": "grpo", "n": 4, "batch_size": 4, "steps": 3, "lr": 1e-5},
    output_dir=sys.argv[2] if len(sys.argv) > 2 else None,
    runner="verl",
)
for record in trainer.train():
    print(f"step {record['step']}: reward {record['data']['critic/score/mean']:.3f}")
print("The run is in", trainer.output_dir)
