"""Provokes on a Ray of its own what the catalogue says of Ray, with its interleaved output. Writes as on_cpu.py does.

python tests/diagnosis/provoke/on_ray.py [NAME ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from on_cpu import LOGS, scrub

_INIT = "import os, time, ray\n{env}\nray.init(num_cpus=4, include_dashboard=False, ignore_reinit_error=True{more})\n"
_WORKER = """
class WorkerDict:
    def actor_rollout_update_actor(self):
        return self.update_actor()
    def update_actor(self):
        {body}
Worker = ray.remote(WorkerDict)
workers = [Worker.remote() for _ in range(2)]
"""

CASES = {
    "ray_worker_killed": (
        "",
        _WORKER.format(body="os.kill(os.getpid(), 9)")
        + "ray.get([w.actor_rollout_update_actor.remote() for w in workers])",
    ),
    "ray_worker_segfault": (
        "",
        _WORKER.format(body="import ctypes; ctypes.string_at(0)")
        + "ray.get([w.actor_rollout_update_actor.remote() for w in workers])",
    ),
    "ray_worker_raises": (
        "",
        _WORKER.format(body="import torch; return torch.nn.Embedding(1000, 8)(torch.tensor([151_643]))")
        + "ray.get([w.actor_rollout_update_actor.remote() for w in workers])",
    ),
    "ray_worker_raises_unknown": (
        "",
        _WORKER.format(body="return {'a': 1}['prompts']")
        + "ray.get([w.actor_rollout_update_actor.remote() for w in workers])",
    ),
    "ray_host_out_of_memory": (
        "os.environ.update(RAY_memory_usage_threshold='{threshold}', RAY_memory_monitor_refresh_ms='100')",
        """
@ray.remote(max_restarts=0)
class TaskRunner:
    def run(self):
        held = []
        for _ in range(400):
            held.append(bytearray(os.urandom(1 << 20) * 16)); time.sleep(0.02)
        time.sleep(5)
ray.get(TaskRunner.remote().run.remote())
""",
    ),
    "ray_too_few_gpus": (
        "",
        """
from verl.single_controller.ray.base import ResourcePoolManager
ResourcePoolManager(resource_pool_spec={"global_pool": [8]}, mapping={}).create_resource_pool()
""",
    ),
    "ray_placement_group_pending": (
        "",
        """
from ray.util.placement_group import placement_group
group = placement_group([{"CPU": 3, "GPU": 1}] * 4, strategy="STRICT_PACK")
try:
    ray.get(group.ready(), timeout=45)
except ray.exceptions.GetTimeoutError:
    print("still waiting", flush=True)
""",
    ),
    "ray_not_reached": ("", None),
}


def main(names: list[str]) -> None:
    import psutil

    for name in names or list(CASES):
        env, body = CASES[name]
        memory = psutil.virtual_memory()
        threshold = round((memory.total - memory.available + (2 << 30)) / memory.total, 3)
        if body is None:
            code = "import ray; ray.init(address='auto')"
        else:
            code = _INIT.format(env=env.format(threshold=threshold), more="") + textwrap.dedent(body)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "run.py"
            script.write_text(code, encoding="utf-8")
            done = subprocess.run(
                [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200, check=False,
                cwd=folder, env={**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
            )  # fmt: skip
            said = done.stdout.decode(errors="replace").replace(str(script), "run.py").replace(folder, "/tmp/t")
        (LOGS / f"{name}.log").write_text(scrub(said), encoding="utf-8")
        print(
            f"{name}: exit code {done.returncode}, {said.count(chr(10))} lines; {(said.strip().splitlines() or [''])[-1][:150]}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
