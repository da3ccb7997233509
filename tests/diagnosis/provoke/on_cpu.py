"""Provokes on a CPU what the catalogue says of PyTorch, transformers, Hydra, verl and Linux, each in a process of its own.

    python tests/diagnosis/provoke/on_cpu.py [NAME ...]

writes tests/diagnosis/logs/NAME.log, with the paths of this machine taken out. `on_ray.py` does the same for Ray.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

LOGS = Path(__file__).parent.parent / "logs"

_TINY = """
    from transformers import AutoModelForCausalLM, Qwen2Config
    config = Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=128)
"""
_VERL = "import sys; from verl.trainer.main_ppo import main; sys.argv[1:] = {overrides!r}; main()"
_VALIDATE = """
    from hydra import compose, initialize_config_module
    from verl.utils.config import validate_config
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides={overrides!r})
    validate_config(config, use_reference_policy=True, use_critic=False)
"""
_WHOLE = [
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
]  # fmt: skip


def _verl(*overrides: str) -> str:
    return _VERL.format(overrides=list(overrides))


def _validate(*overrides: str) -> str:
    return _VALIDATE.format(overrides=[*_WHOLE, *overrides])


CASES = {
    "meta_no_data": "import torch; torch.nn.Linear(4, 4, device='meta').to('cpu')",
    "meta_and_cpu": "import torch; torch.nn.Linear(4, 4, device='meta')(torch.ones(2, 4))",
    "meta_item": "import torch; torch.ones(1, device='meta').item()",
    "token_ids_on_cpu": "import torch; torch.nn.Embedding(1000, 8)(torch.tensor([151_643]))",
    "host_allocation": "import torch; torch.empty(1 << 50, dtype=torch.uint8)",
    "host_allocation_under_ulimit": """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        weights = [bytearray(64 << 20) for _ in range(1000)]
    """,
    "cuda_on_cpu_build": "import torch; torch.zeros(1, device='cuda')",
    "load_cuda_checkpoint_on_cpu": """
        import torch
        torch.serialization.default_restore_location(torch.UntypedStorage(4), "cuda:0")
    """,
    "segmentation_fault": "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)",
    "killed_by_kernel_signal": """
        import os, signal, torch.multiprocessing as mp
        def rank(n):
            if n == 1: os.kill(os.getpid(), signal.SIGKILL)
            import time; time.sleep(30)
        if __name__ == "__main__":
            mp.spawn(rank, nprocs=2)
    """,
    "rendezvous": """
        import datetime, torch.distributed as dist
        dist.TCPStore("127.0.0.1", 29_871, world_size=2, is_master=True, timeout=datetime.timedelta(seconds=2))
    """,
    "address_in_use": """
        import datetime, socket, torch.distributed as dist
        taken = socket.socket(); taken.bind(("127.0.0.1", 29_872)); taken.listen()
        dist.TCPStore("127.0.0.1", 29_872, is_master=True, timeout=datetime.timedelta(seconds=2))
    """,
    "peer_gone": """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def rank(n):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29873")
            dist.init_process_group("gloo", rank=n, world_size=2)
            if n == 1: os._exit(0)
            dist.all_reduce(torch.ones(1)); dist.all_reduce(torch.ones(1))
        if __name__ == "__main__":
            mp.spawn(rank, nprocs=2)
    """,
    "disk_full": "f = open('/dev/full', 'w'); f.write('x'); f.flush()",
    "too_many_files": """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        held = [open("/dev/null") for _ in range(100)]
    """,
    "model_not_found": "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('/models/Qwen2-7B-Instrct')",
    "model_without_weights": _TINY + """
    import tempfile
    folder = tempfile.mkdtemp(); config.save_pretrained(folder); AutoModelForCausalLM.from_pretrained(folder)
    """,
    "architecture_unknown": """
        import json, pathlib, tempfile
        from transformers import AutoConfig
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen9"}))
        AutoConfig.from_pretrained(folder)
    """,
    "score_head": _TINY + """
    import tempfile
    from transformers import AutoModelForSequenceClassification
    folder = tempfile.mkdtemp(); AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    """,
    "weights_of_another_shape": _TINY + """
    model = AutoModelForCausalLM.from_config(config); state = model.state_dict()
    config.vocab_size = 160; AutoModelForCausalLM.from_config(config).load_state_dict(state)
    """,
    "flash_attention_missing": _TINY + """
    AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2")
    """,
    "flash_attention_import": "import flash_attn",
    "critic_is_no_value_model": _TINY + """
    import tempfile, torch
    from verl.utils.model import load_valuehead_model
    folder = tempfile.mkdtemp(); AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.num_labels = 1; load_valuehead_model(folder, torch.float32, config, False)
    """,
    "no_chat_template": """
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).apply_chat_template([{"role": "user", "content": "a"}])
    """,
    "package_missing": "import deepspeed",
    "stopped_by_hand": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "key_not_in_config": _verl("critic.model.fsdp_config.param_offload=true"),
    "key_without_plus": _verl("actor_rollout_ref.model.override_config.attn_implementation=sdpa"),
    "key_missing_value": """
        from hydra import compose, initialize_config_module
        with initialize_config_module("verl.trainer.config", version_base=None):
            compose("ppo_trainer").actor_rollout_ref.rollout.name
    """,
    "override_not_understood": _verl("trainer.logger=[console", "data.train_batch_size=8"),
    "config_not_found": _verl("model_engine=fsdpp"),
    "micro_batch_not_set": _validate("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null"),
    "micro_batch_not_set_actor": _validate("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"),
    "micro_batch_set_twice": _validate("actor_rollout_ref.actor.ppo_micro_batch_size=4"),
    "batch_below_mini_batch": _validate("data.train_batch_size=64"),
    "batch_not_divisible": _validate("data.train_batch_size=257", "actor_rollout_ref.rollout.n=1"),
    "pipeline_parallel_rollout": _validate("actor_rollout_ref.rollout.pipeline_model_parallel_size=2")
    + """
    from verl.utils.config import omega_conf_to_dataclass
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    """,
    "chunks_unequal": """
        import torch
        from verl import DataProto
        DataProto.from_dict({"x": torch.zeros(10, 2)}).chunk(4)
    """,
    "micro_batches_unequal": """
        import torch
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        tu.chunk_tensordict(TensorDict({"x": torch.zeros(10, 2)}, [10]), 4)
    """,
    "token_budget": """
        import torch
        from tensordict import TensorDict
        from verl.utils.seqlen_balancing import rearrange_micro_batches
        batch = TensorDict({"input_ids": torch.ones(4, 4096), "attention_mask": torch.ones(4, 4096)}, [4])
        rearrange_micro_batches(batch, max_token_len=2048)
    """,
    "refused_by_verl_shard": """
        from verl_shard import build_device_map
        build_device_map("/models/none", n_gpus=2)
    """,
    "samples_failed": """
        from verl_shard.verl_plugin.failures import too_many
        raise too_many({"a": {"kind": "reward", "error": "KeyError: 'answer'", "where": "reward.py:7"}}, 0)
    """,
    "micro_batch_no_divisor": """
        import torch
        from tensordict import TensorDict
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.utils import prepare_micro_batches
        batch = TensorDict({"x": torch.zeros(10, 2)}, [10])
        tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=4, sp_size=1)
        prepare_micro_batches(batch)
    """,
    "fewer_items_than_ranks": """
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
        get_seqlen_balanced_partitions([10, 20, 30], k_partitions=8, equal_size=False)
    """,
    "rollout_mode_sync": _validate("actor_rollout_ref.rollout.mode=sync")
    + """
    from verl.utils.config import omega_conf_to_dataclass
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    """,
    "loss_agg_mode": _validate("actor_rollout_ref.actor.loss_agg_mode=mean"),
    "unknown_strategy": """
        from verl.workers.engine.base import EngineRegistry
        import verl.workers.engine
        EngineRegistry.new(model_type="language_model", backend="fsdp9")
    """,
    "primary_config": """
        from hydra import compose, initialize_config_module
        with initialize_config_module("verl.trainer.config", version_base=None):
            compose("ppo_trainr")
    """,
    "override_parsed_wrong": """
        from hydra import compose, initialize_config_module
        with initialize_config_module("verl.trainer.config", version_base=None):
            compose("ppo_trainer", overrides=["trainer.logger=[console"])
    """,
    "numpy_memory": "import numpy; numpy.zeros(1 << 50, dtype=numpy.uint8)",
    "keys_missing_in_checkpoint": "import torch; torch.nn.Linear(4, 4).load_state_dict({})",
    "model_type_missing": """
        import pathlib, tempfile
        from transformers import AutoConfig
        folder = pathlib.Path(tempfile.mkdtemp()); (folder / "config.json").write_text("{}")
        AutoConfig.from_pretrained(folder)
    """,
    "folder_without_config": """
        import tempfile
        from transformers import AutoConfig
        AutoConfig.from_pretrained(tempfile.mkdtemp())
    """,
    "hub_not_reached": "from transformers import AutoConfig; AutoConfig.from_pretrained('Qwen/Qwen2-7B-Instruct')",
    "name_moved": "from transformers import AutoModelForVision2Seq, AdamW",
    "no_more_threads": """
        import resource, threading, time
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        threading.stack_size(256 << 20)
        for _ in range(50): threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
    """,
    "client_timeout": """
        import datetime, torch.distributed as dist
        dist.TCPStore("127.0.0.1", 29_875, world_size=2, is_master=False, timeout=datetime.timedelta(seconds=2))
    """,
    "only_first_gpu": _TINY + """
    from accelerate import init_empty_weights, infer_auto_device_map
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.hf_device_map = infer_auto_device_map(model, max_memory={0: "80GiB", 1: "80GiB"})
    print(f"hf_device_map: {model.hf_device_map}")
    """,
    "fsdp_size_no_divisor": """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        def rank(n):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29874")
            dist.init_process_group("gloo", rank=n, world_size=4)
            from verl.workers.engine.fsdp import utils
            utils.get_device_name = lambda: "cpu"
            mesh = utils.create_device_mesh(4, 3)
            mesh.get_local_rank("fsdp")
        if __name__ == "__main__":
            mp.spawn(rank, nprocs=4)
    """,
    "reward_pool_empty": """
        from hydra import compose, initialize_config_module
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=["reward.reward_model.enable_resource_pool=true"])
        class Trainer: pass
        trainer = Trainer(); trainer.config = config
        PPOTrainer._init_resource_pool_mgr(trainer)
    """,
    "verl_ended": """
        import pathlib, tempfile
        from verl_shard.common.errors import RunError
        from verl_shard.config.run_folder import Launch, RunFolder
        from verl_shard.verl_plugin.launch import explain_end
        folder = pathlib.Path(tempfile.mkdtemp()); (folder / "1.log").write_text("RuntimeError: no such thing\\n")
        raise RunError(explain_end(Launch(folder, 1), RunFolder(folder), 1))
    """,
    "unknown": """
        def reward(answer): return {"right": 1.0}[answer]
        def compute_score(batch): return [reward(one) for one in batch]
        compute_score(["right", "wrong"])
    """,
    "nothing_wrong": """
        import warnings
        for step in range(1, 4):
            print(f"step:{step} - timing_s/gen:3.1 - timing_s/old_log_prob:0.9 - timing_s/ref:1.1 - timing_s/step:9")
        warnings.warn("errors are counted elsewhere: 0 failed")
    """,
    "survived": """
        import traceback
        for step in range(1, 5):
            print(f"step:{step} - actor/pg_loss:-0.01 - timing_s/step:9", flush=True)
            if step == 1:
                try: {}["tool"]
                except KeyError: traceback.print_exc()
    """,
}  # fmt: skip


def scrub(text: str) -> str:
    """Without the paths, addresses and numbers of processes of the machine that it ran on."""
    root = Path(__file__).resolve().parents[3]
    text = text.replace(str(root / ".venv/lib/python3.11/site-packages"), "/site-packages").replace(
        str(root), "/repository"
    )
    text = text.replace(str(Path(sys.base_prefix)), "/python").replace(tempfile.gettempdir() + "/tmp", "/tmp/t")
    text = re.sub(r"/home/\w+|/root(?=/)", "/home/user", text)
    text = re.sub(r"\b(?:10|172|192)\.\d+\.\d+\.\d+\b", "10.0.0.1", text)
    # Ray lists the largest processes of the machine, whosoever they are.
    text = re.sub(r"^(\d+\t[\d.]+\t)(?!ray::).*$", r"\1python", text, flags=re.MULTILINE)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def main(names: list[str]) -> None:
    LOGS.mkdir(exist_ok=True)
    for name in names or list(CASES):
        code = textwrap.dedent(CASES[name])
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "run.py"
            script.write_text(code, encoding="utf-8")
            done = subprocess.run(
                [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
                cwd=folder, env={**os.environ, "HYDRA_FULL_ERROR": "0", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            said = done.stdout.decode(errors="replace").replace(str(script), "run.py").replace(folder, "/tmp/t")
        (LOGS / f"{name}.log").write_text(scrub(said), encoding="utf-8")
        print(
            f"{name}: exit code {done.returncode}, {said.count(chr(10))} lines; {(said.strip().splitlines() or [''])[-1][:150]}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
