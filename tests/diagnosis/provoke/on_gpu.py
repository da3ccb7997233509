"""Provokes on one real GPU what the catalogue says of GPUs, each in a process of its own. Needs CUDA and transformers.

    python tests/diagnosis/provoke/on_gpu.py OUT_FOLDER

Its output was recorded on an H200 with PyTorch 2.11.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

CASES = {
    "gpu_oom_update": """
        import torch
        class Worker:
            def update_actor(self):
                free, total = torch.cuda.mem_get_info()
                kept = torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
                return torch.empty(int(free * 0.6), dtype=torch.uint8, device="cuda")
        Worker().update_actor()
    """,
    "gpu_oom_scoring": """
        import torch
        def compute_log_prob(tokens):
            logits = torch.randn(tokens, 152_000, device="cuda", dtype=torch.float32)
            return torch.log_softmax(logits, -1), torch.logsumexp(logits, -1)
        compute_log_prob(140_000)
    """,
    "gpu_oom_fragmented": """
        import torch
        total = torch.cuda.mem_get_info()[0]
        piece = 64 << 20
        held = [torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(int(total * 0.97) // piece)]
        del held[::2]
        torch.empty(total // 4, dtype=torch.uint8, device="cuda")
    """,
    "gpu_oom_other_process": """
        import subprocess, sys, time, torch
        other = subprocess.Popen([sys.executable, "-c", "import torch, time; x = torch.empty(100 << 30, dtype=torch.uint8, "
                                  "device='cuda'); print('held', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
        other.stdout.readline()
        try:
            torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
        finally:
            other.kill()
    """,
    "invalid_ordinal": "import torch; torch.cuda.set_device(7)",
    "invalid_ordinal_hidden": """
        import os
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        import torch
        torch.zeros(1, device="cuda:3")
    """,
    "token_ids_on_gpu": """
        import torch
        table = torch.nn.Embedding(1000, 8, device="cuda")
        print(table(torch.full((4, 300), 151_643, device="cuda")).sum().item())
    """,
    "labels_on_gpu": """
        import torch
        logits = torch.randn(8, 10, device="cuda")
        print(torch.gather(logits, 1, torch.full((8, 1), 99, device="cuda")).sum().item())
    """,
    "two_devices": """
        import torch
        layer = torch.nn.Linear(8, 8, device="cuda")
        layer(torch.randn(2, 8))
    """,
    "two_devices_embedding": """
        import torch
        torch.nn.Embedding(10, 8, device="cuda")(torch.tensor([1, 2]))
    """,
    "forked": """
        import os, torch
        torch.zeros(1, device="cuda")
        import multiprocessing as mp
        def child(): torch.zeros(1, device="cuda")
        process = mp.get_context("fork").Process(target=child)
        process.start(); process.join()
    """,
    "no_gpu_visible": """
        import os
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import torch
        torch.zeros(1, device="cuda")
    """,
    "duplicate_gpu": """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def rank(n):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
            torch.cuda.set_device(0)
            dist.init_process_group("nccl", rank=n, world_size=2)
            x = torch.ones(1, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        if __name__ == "__main__":
            mp.spawn(rank, nprocs=2)
    """,
    "one_gpu_map": """
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config
        config = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=128)
        AutoModelForCausalLM.from_config(config).save_pretrained("/tmp/small")
        model = AutoModelForCausalLM.from_pretrained("/tmp/small", device_map="auto")
        print(f"hf_device_map: {model.hf_device_map}")
    """,
    "flash_attn_missing": """
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config
        config = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=128)
        AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
    """,
    "nccl_oom": """
        import os, torch, torch.distributed as dist
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29556", NCCL_DEBUG="WARN", NCCL_BUFFSIZE=str(1 << 30))
        torch.cuda.set_device(0)
        x = torch.ones(1, device="cuda")
        held = []
        for piece in (1 << 30, 64 << 20, 2 << 20):
            while True:
                try:
                    held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        dist.init_process_group("nccl", rank=0, world_size=1)
        dist.all_reduce(x); torch.cuda.synchronize()
    """,
}


def main(out: Path) -> None:
    for name, code in CASES.items():
        script = out / f"{name}.py"
        script.write_text(textwrap.dedent(code), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=120,
                check=False,
            )
            said, code_ = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            said, code_ = error.stdout or b"", -1
        script.unlink()
        lines = said.decode(errors="replace").splitlines()
        # A kernel's assertion is said by each of thousands of threads.
        kept = lines if len(lines) < 120 else lines[:30] + lines[-60:]
        print(f"===== {name} {code_}", *kept, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
