"""How long it takes from launching a trainer to its first training step, on Ray and in one process, and what a step takes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_shard.bench.record import tell
from verl_shard.common.files import read_json_lines
from verl_shard.common.tables import table

SCHEMA = "verl_shard/bench-start/1"
_LOCAL = """
import sys, time
from verl_shard import PPOTrainer

model, data, folder, began = sys.argv[1:]
trainer = PPOTrainer(
    model, reward_model="pkg://verl_shard.quickstart.reward:compute_score", train_data=data, val_data=data, progress=False,
    output_dir=folder, generation_config={"max_new_tokens": 32}, ppo_config={"steps": 1},
)
trainer.model
print(time.time() - float(began))
"""
_IMPORTS = """
import sys, time
from transformers import AutoModelForCausalLM
import verl.trainer.ppo.ray_trainer, verl.workers.engine_workers

print(time.time() - float(sys.argv[1]))
"""


@dataclass(frozen=True)
class StartTimes:
    """Seconds. to_first_step: from launching verl to the beginning of its first training step, the validation before it
    included; step: the median over the steps after the first two; whole: the command from beginning to end; local: from
    starting Python to the beginning of the first step of PPOTrainer's local runner, on the same model and data; imports:
    from starting Python until torch, transformers and verl are imported, and nothing else is done."""

    to_first_step: float
    step: float
    steps: int
    whole: float
    local: float
    imports: float


def local_start(run: Path, folder: Path, repeats: int = 3) -> tuple[float, float]:
    """Seconds from starting Python until the local runner could begin its first step, and until what it needs is imported.

    Medians of some starts of each, in turn: a machine may be half as fast a minute later.
    """

    def seconds(program: str, *inputs: str) -> float:
        command = [sys.executable, "-c", program, *inputs, str(time.time())]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(output.splitlines()[-1])

    local, imports = [], []
    for number in range(repeats):
        inputs = (str(run / "model"), str(run / "data" / "val.parquet"), str(folder / f"local-{number}"))
        local.append(seconds(_LOCAL, *inputs))
        imports.append(seconds(_IMPORTS))
    return statistics.median(local), statistics.median(imports)


def read_times(run: Path, whole: float, local: float, imports: float) -> StartTimes:
    """The times of a run that has ended, from its events and metrics.

    verl logs a step when it ends, with the seconds that it took; so the step began that much before.
    """
    launched = next(event["time"] for event in read_json_lines(run / "events.jsonl") if event["kind"] == "launch")
    ends = [event["time"] for event in read_json_lines(run / "events.jsonl") if event["kind"] == "first-step"]
    steps = [r["data"]["timing_s/step"] for r in read_json_lines(run / "metrics.jsonl") if "timing_s/step" in r["data"]]
    return StartTimes(ends[0] - steps[0] - launched, statistics.median(steps[2:]), len(steps), whole, local, imports)


def bench_start(given: Mapping[str, Any], result: Path | None) -> StartTimes:
    """Runs the quick start in a folder of its own, prints a table, and writes JSON when `result` is given."""
    from verl_shard.quickstart.run import quickstart

    with tempfile.TemporaryDirectory(prefix="verl_shard_bench_") as folder:
        began = time.monotonic()
        run = quickstart({"out": Path(folder) / "run", **given})
        whole = time.monotonic() - began
        times = read_times(run, whole, *local_start(run, Path(folder)))
    rows = [
        ("launch of verl to its first training step", f"{times.to_first_step:.1f} s"),
        ("start of PPOTrainer's local runner to its first step", f"{times.local:.1f} s"),
        ("importing torch, transformers and verl alone", f"{times.imports:.1f} s"),
        (f"a step (median of {times.steps - 2})", f"{times.step:.2f} s"),
        ("the whole command", f"{times.whole:.0f} s"),
    ]
    content = {"given": dict(given), "times": asdict(times)}
    tell(SCHEMA, content, [table("verl-shard bench start", ("", "time"), rows)], result=result)
    return times
