"""Stock verl with FSDP2 and vLLM: the command that starts it as a plan says, checked before anything is started.

Run: python examples/ppo_fsdp_vllm.py [MODEL] > run.sh && TRAIN_FILES=train.parquet VAL_FILES=val.parquet bash run.sh
MODEL is a folder or hub id; only its config.json is read. No GPU, verl without vLLM is enough to print and check.
"""

import sys

from verl_shard import build_plan, to_verl_overrides
from verl_shard.verl_plugin.check.run import check
from verl_shard.verl_plugin.overrides_plan import verl_command

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"

plan = build_plan(
    {"actor": MODEL},
    gpus=8,
    gpu="h100-80g",
    workload={"algorithm": "grpo", "n": 8, "train_batch_size": 128, "prompt_length": 512, "response_length": 1024},
    backend="fsdp2",
)
overrides = to_verl_overrides(plan)
print(verl_command(overrides, backend=plan.backend))

report = check(overrides, plan=False)
for finding in report.findings:
    print(f"{finding.level}: {finding}", file=sys.stderr)
print(f"{report.n_settings} settings checked; a step takes about {plan.step_seconds:.0f} s.", file=sys.stderr)
sys.exit(0 if plan.fits and report.exit_code < 2 else 2)
