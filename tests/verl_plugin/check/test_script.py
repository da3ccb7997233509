"""Launch scripts as people have them, and every line of widely read articles that verl never had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from override_sets import about, rows

from verl_shard.common.errors import ConfigError
from verl_shard.verl_plugin.check.run import Report, check

A, M, RO = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))

RUN = r"""#!/bin/bash
# python3 -m verl.trainer.main_ppo nothing.of.this=1
set -euxo pipefail
export VERL_LOGGING_LEVEL=DEBUG   # more to read
MODEL_PATH=${MODEL_PATH_OF_NOBODY:-"Qwen/Qwen2-7B-Instruct"}
NGPUS=4
n=4
max_len=$((1024 + 1024 * 2))
COMMON=(
    algorithm.adv_estimator=grpo          # no critic
    actor_rollout_ref.actor.use_kl_loss=True
    "data.train_files=['$HOME/a b.parquet']"
)
LOG="trainer.logger=['console','wandb']"
ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json='{"env_vars": {"VERL_OFFLOAD_DIR": "/ssd"}}' \
    -- PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    "${COMMON[@]}" \
    data.train_batch_size=64 \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=${n} \
    actor_rollout_ref.rollout.max_num_batched_tokens=${max_len} \
    trainer.n_gpus_per_node=$NGPUS trainer.nnodes=$NNODES_OF_NOBODY \
    +trainer.resource_config=resources.yaml \
    $LOG "$@" 2>&1 | tee train.log
"""


def look(tmp_path: Path, text: str, *arguments: str, name: str = "run.sh") -> Report:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return check(arguments, script=file, plan=False, ask_verl=False)


def test_a_script_with_everything_in_it(tmp_path: Path) -> None:
    report = look(tmp_path, RUN, "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1", f"{A}.strategy=fsdp3")
    errors = [where for level, where in rows(report) if level == "error"]
    assert errors == ["VERL_OFFLOAD_DIR", "trainer.resource_config", f"{A}.strategy"]
    assert "run.sh:16" in about(report, "VERL_OFFLOAD_DIR").why
    assert "run.sh:29" in about(report, "trainer.resource_config").why
    assert report.n_settings == 18  # 3 in the array, 13 in the command, 2 for "$@"
    assert [text for text in report.left_out if "NNODES_OF_NOBODY" in text] == [
        "$NNODES_OF_NOBODY is not set in run.sh (line 28): what it decides is not looked at"
    ]


def test_what_is_not_known_is_no_fault_and_what_is_known_is_found(tmp_path: Path) -> None:
    # With the number of nodes known 64 x 4 / 4 = 64 samples on a GPU are no multiple of 6.
    unknown, known = look(tmp_path, RUN), look(tmp_path, RUN, "trainer.nnodes=1")
    key = f"{RO}.log_prob_micro_batch_size_per_gpu"
    assert key not in {finding.where for finding in unknown.findings}
    finding = about(known, key)
    assert "64 prompts x 4 = 256 samples / 4 = 64 on a GPU, % 6 = 4, not 0" in finding.why
    assert finding.why.endswith("run.sh:24")
    assert finding.fix == f"{key}=4"


def test_overrides_come_last_where_the_script_takes_none(tmp_path: Path) -> None:
    report = look(tmp_path, RUN.replace('"$@"', ""), "trainer.nnodes=1", "data.shuffel=True")
    assert about(report, "data.shuffel").why.endswith("on the command line")
    assert f"{RO}.log_prob_micro_batch_size_per_gpu" in {finding.where for finding in report.findings}


NEVER = [
    # (lines of a script, where, a piece of what to write instead)
    ("export VERL_OFFLOAD_DIR=/path/to/fast/ssd", "VERL_OFFLOAD_DIR", "param_offload=True"),
    ("export VERL_OFFLOAD_DEVICE=cpu; X=1", "VERL_OFFLOAD_DEVICE", "param_offload=True"),
    ("VERL_OFFLOAD_DIR=/ssd python3 -m verl.trainer.main_ppo", "VERL_OFFLOAD_DIR", "Leave it out"),
    ("env VERL_OFFLOAD_DIR=/ssd python3 -m verl.trainer.main_ppo", "VERL_OFFLOAD_DIR", "Leave it out"),
    ("export NCCL_ASYNC_ERROR_HANDLING=1", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("export VLLM_USE_MODELSCOPE=True", "VLLM_USE_MODELSCOPE", "VERL_USE_MODELSCOPE"),
    ("python3 -m verl.trainer.main_ppo --log-level debug", "--log-level", "VERL_LOGGING_LEVEL=DEBUG"),
    ("python3 -m verl.trainer.main_ppo --no-pin-memory", "--no-pin-memory", "Leave it out"),
    ("python train_ppo.py --no-pin-memory", "--no-pin-memory", "Leave it out"),
    ("torchrun --nproc_per_node=4 train_ppo.py", "torchrun", "python3 -m verl.trainer.main_ppo"),
    ("accelerate launch --multi_gpu --num_processes 4 train_ppo.py", "accelerate", "python3 -m verl.trainer.main_ppo"),
    ("torchrun --nproc_per_node=4 -m verl.trainer.main_ppo", "torchrun", "python3 -m verl.trainer.main_ppo"),
    ("from verl import PPOTrainer", "PPOTrainer", "from verl_shard import PPOTrainer"),
    ("from verl.trainer.ppo_trainer import PPOTrainer", "PPOTrainer", "from verl_shard import PPOTrainer"),
    ("from verl.trainer import HybridTrainer", "HybridTrainer", "trainer.v1.trainer_mode"),
    ("from verl.trainer.hybrid_trainer import HybridTrainer", "HybridTrainer", "trainer.v1.trainer_mode"),
    ("from verl.utils.resource import get_gpu_usage, pin_to_device", "verl.utils.resource", "verl-shard plan"),
    ("from verl import ResourceAllocator, DeviceMeshConfig", "verl.utils.resource", "verl-shard plan"),
    ("from verl.utils.logging import log_gpu_memory_usage", "verl.utils.logging", "verl.utils.profiler"),
    ('trainer.update_resource(component="reward", device_ids=[2, 4])', "update_resource", "enable_switch"),
    ("model = ActorModel.load(path)", "ActorModel", f"{M}.path"),
    ('model_config={"actor": {"device": "cuda:0"}},', "model_config", "fsdp_config.model_dtype"),
    ('generation_config={"max_new_tokens": 128, "batch_size": 4},', "generation_config", "data.max_response_length"),
    ('ppo_config={"kl_coef": 0.08, "max_epochs": 1},', "ppo_config", "algorithm.kl_ctrl.kl_coef"),
    ("use_gradient_checkpointing=True,", "use_gradient_checkpointing", f"{M}.enable_gradient_checkpointing"),
    ('gradient_checkpointing_kwargs={"use_reentrant": False},', "gradient_checkpointing_kwargs", "Leave it out"),
    ('cpu_offload(reward_model, execution_device="cuda:2")', "cpu_offload(reward_model)", "free_cache_engine"),
    ("device_map = {layer: i % num_gpus for i, layer in enumerate(all_layers)}", "device_map", "build_device_map"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "where", "instead"), NEVER, ids=[line[:50] for line, _, _ in NEVER])
def test_what_articles_say_is_answered_in_scripts(line: str, where: str, instead: str, tmp_path: Path) -> None:
    name = "train.py" if "import" in line or "(" in line or line.endswith(",") or " = {" in line else "run.sh"
    report = look(tmp_path, f"# first\n{line}\n", name=name)
    finding = about(report, where)
    assert instead in finding.fix
    assert f"{name}:2" in finding.why
    assert report.exit_code in (1, 2)


KEYS = [
    ("ppo_config.kl_coef=0.05", "algorithm.kl_ctrl.kl_coef"),
    ("generation_config.max_new_tokens=128", "data.max_response_length"),
    ("model_config.actor.dtype=bf16", "model_dtype=bf16"),
    ("actor.device_ids=[0,1]", "trainer.n_gpus_per_node"),
    ("reward.device_type=cpu", "reward.num_workers"),
    ("rollout.vllm_args.gpu_memory_utilization=0.85", f"{RO}.gpu_memory_utilization"),
    ("comm_backend=nccl", "checkpoint_engine.backend"),
    ("timeout_seconds=180", "Leave it out"),
    (f"{A}.fsdp_config.sharding_strategy=FULL_SHARD", "fsdp_size=-1"),
    (f"+{M}.device_map=auto", "model_engine=device_map"),
    (f"{M}.use_gradient_checkpointing=True", "enable_gradient_checkpointing=True"),
    (f"+{A}.offload_dir=/ssd", "param_offload=True"),
    (f"+{A}.pin_memory=False", "Leave it out"),
]


@pytest.mark.parametrize(("text", "instead"), KEYS)
def test_what_articles_say_is_answered_in_overrides(text: str, instead: str) -> None:
    report = check([text], plan=False, ask_verl=False)
    found = about(report, text.split("=")[0].lstrip("+"))
    assert instead in found.fix
    assert found.level == "error"


def test_an_articles_resource_file_is_answered_key_by_key(tmp_path: Path) -> None:
    file = tmp_path / "resource_config.yaml"
    file.write_text(
        "actor: {device_type: cuda, device_ids: [0, 1], strategy: fsdp}\n"
        "rollout: {vllm_args: {gpu_memory_utilization: 0.85}}\ncomm_backend: nccl\ntimeout_seconds: 180\n"
        "actor_rollout_ref.actor.fsdp_config.param_offload: false\n"
    )
    report = check(config=file, plan=False, ask_verl=False)
    wanted = {
        "actor.device_type", "actor.device_ids", "actor.strategy", "rollout.vllm_args.gpu_memory_utilization", "comm_backend",
        "timeout_seconds",
    }  # fmt: skip
    faults = {finding.where for finding in report.findings if finding.level == "error"}
    assert wanted <= faults
    assert f"{A}.fsdp_config.param_offload" not in faults
    assert about(report, "actor.strategy").fix == f"{A}.strategy=fsdp"
    assert all("in resource_config.yaml" in about(report, where).why for where in wanted)


def test_our_own_names_are_fine(tmp_path: Path) -> None:
    text = 'from verl_shard import PPOTrainer\nPPOTrainer("m", model_config={"actor": {"device": "cuda:0"}})\n'
    assert rows(look(tmp_path, text, name="train.py")) == []


def test_a_comment_a_heredoc_and_other_commands_say_nothing(tmp_path: Path) -> None:
    text = (
        "# export VERL_OFFLOAD_DIR=/x\ncat > a <<EOF\npython3 -m verl.trainer.main_ppo data.nothing=1\nEOF\n"
        "torchrun -m verl.trainer.sft_trainer a=b\nexport VERL_USE_MODELSCOPE=True\n"
        "python3 -m verl.trainer.main_ppo data.seed=1 > log 2>&1 &\nwait; echo data.nothing=2\n"
    )
    report = look(tmp_path, text)
    assert report.n_settings == 1
    assert not [f for f in report.findings if "nothing" in f.where or "VERL" in f.where or "torchrun" in f.where]


def test_a_script_without_verl_and_files_that_are_none(tmp_path: Path) -> None:
    report = look(tmp_path, "echo hello\n")
    assert rows(report) == [("warning", "--script")]
    assert report.exit_code == 1
    for given in ({"script": tmp_path / "no.sh"}, {"config": tmp_path / "no.yaml"}):
        with pytest.raises(ConfigError, match="cannot be read"):
            check(**given)  # type: ignore[arg-type]
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="no keys in it"):
        check(config=tmp_path / "list.yaml")


def test_verls_other_configurations_are_read(tmp_path: Path) -> None:
    text = "python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\\n"
    report = look(tmp_path, text + f"{A}.megatron.tensor_model_parallel_size=2 {A}.fsdp_config.fsdp_size=2\n")
    faults = {finding.where for finding in report.findings if finding.code == "unknown-key"}
    assert faults == {f"{A}.fsdp_config.fsdp_size"}


def test_a_report_in_json(tmp_path: Path) -> None:
    made = json.loads(json.dumps(look(tmp_path, RUN).to_dict()))
    assert made["schema"] == "verl_shard/check/1"
    assert made["exit_code"] == 2
    assert set(made["findings"][0]) == {"level", "code", "where", "given", "why", "fix"}
