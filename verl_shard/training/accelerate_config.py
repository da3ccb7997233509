"""accelerate's configuration file for data parallelism over processes with several GPUs each."""

from __future__ import annotations

from typing import Any

import yaml

from verl_shard.common.errors import ConfigError, Finding

MIXED = ("bf16", "no")

_HEADER = """\
# {gpus} GPUs, {each} to a process. Start: accelerate launch --config_file THIS_FILE train_ppo.py
# The same with torchrun: torchrun --nproc_per_node={processes} train_ppo.py
"""


def accelerate_config(gpus: int, gpus_per_process: int, mixed_precision: str = "bf16") -> str:
    """The YAML text, for one machine.

    Each process sees all GPUs and takes its own run of them: PPOTrainer and devices="process" do.
    Raises ConfigError for GPUs that cannot be shared out evenly.
    """
    faults = [
        Finding("error", "not-a-count", flag, str(value), f"{value} is less than 1", "Give 1 or more")
        for flag, value in (("--gpus", gpus), ("--gpus-per-process", gpus_per_process))
        if value < 1
    ]
    if mixed_precision not in MIXED:
        why = (
            "fp16 needs a loss scaling that this engine does not have" if mixed_precision == "fp16" else "not a choice"
        )
        fix = f"Use {' or '.join(MIXED)}"
        faults.append(Finding("error", "mixed-precision", "--mixed-precision", mixed_precision, why, fix))
    if not faults and gpus % gpus_per_process:
        even = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
        why = f"{gpus} GPUs % {gpus_per_process} = {gpus % gpus_per_process}, not 0"
        shown = str(gpus_per_process)
        faults.append(Finding("error", "gpus-per-process", "--gpus-per-process", shown, why, f"Use one of {even}"))
    if faults:
        raise ConfigError(faults)
    processes = gpus // gpus_per_process
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if processes > 1 else "NO",
        "downcast_bf16": "no",
        "gpu_ids": ",".join(map(str, range(gpus))),
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    header = _HEADER.format(gpus=gpus, each=gpus_per_process, processes=processes)
    return header + yaml.safe_dump(content, sort_keys=False)
