"""A plan of a GRPO run on four GPUs, as a YAML file that `verl-shard run` takes; nothing is loaded and no GPU is asked.

Run: python examples/plan_yaml.py [MODEL] [PLAN.yaml]        MODEL: a folder or hub id; only its config.json is read
"""

import sys

from verl_shard import Plan, build_plan

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
FILE = sys.argv[2] if len(sys.argv) > 2 else "plan.yaml"

plan = build_plan(
    # What is set here is kept; what is left blank is chosen, so that it fits.
    {"actor": {"model": MODEL, "gradient_checkpointing": True}},
    gpus=4,
    gpu="a100-80g",
    workload={"algorithm": "grpo", "n": 8, "train_batch_size": 64, "prompt_length": 512, "response_length": 1024},
)
print(plan.report())
plan.save(FILE)
print(f"{FILE}: {'it fits' if Plan.load(FILE).fits else 'it does not fit'}")
