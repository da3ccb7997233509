"""One change at a time in a good set: what is found, at which key, and the line to write instead."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from override_sets import GOOD

from verl_shard.config.cards import find_card
from verl_shard.config.inventory import Inventory
from verl_shard.verl_plugin.check.run import check
from verl_shard.verl_plugin.check.world import Machines

A, M, RO, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))
RM = "reward.reward_model"
CRITIC = "PPO with critic, critic.fsdp offload"
OWN_POOL = "reward model in its own pool"
E, W = "error", "warning"

# The good GRPO set: 64 prompts x 4 on 4 GPUs, mini-batches of 32 (32 samples a GPU), micro-batches of 8.
CASES: list[tuple[list[str], dict[str, Any], list[tuple[str, str, str]]]] = [
    ([], {}, []),
    # Batches
    (["data.train_batch_size=63"], {}, [(E, f"{A}.ppo_mini_batch_size", f"{A}.ppo_mini_batch_size=21")]),
    ([f"{A}.ppo_mini_batch_size=48", "data.train_batch_size=96"], {}, []),
    ([f"{A}.ppo_micro_batch_size_per_gpu=12"], {}, [
        (E, f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size_per_gpu=8")]),
    ([f"{A}.ppo_micro_batch_size_per_gpu=0"], {}, [
        (E, f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size_per_gpu=1")]),
    ([f"{REF}.log_prob_micro_batch_size_per_gpu=7"], {}, [
        (E, f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_micro_batch_size_per_gpu=4")]),
    ([f"{REF}.log_prob_micro_batch_size_per_gpu=7", f"{A}.use_kl_loss=False"], {}, []),
    ([f"{RO}.n=0"], {}, [(E, f"{RO}.n", f"{RO}.n=1")]),
    ([f"{RO}.n=1"], {}, [
        (W, f"{RO}.n", f"{RO}.n=4. Use 2 or more, such as 4 or 8, or an algorithm without groups, such as reinforce_plus_plus")]),
    (["data.train_batch_size=many"], {}, [(E, "data.train_batch_size", "data.train_batch_size=8")]),
    ([f"{RO}.max_model_len=600"], {}, [(E, f"{RO}.max_model_len", f"{RO}.max_model_len=1024")]),
    ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=600"], {"drop": [f"{A}.ppo_micro_batch_size_per_gpu"]}, [
        (E, f"{A}.ppo_max_token_len_per_gpu", f"{A}.ppo_max_token_len_per_gpu=1024")]),
    ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=600", f"{A}.ulysses_sequence_parallel_size=2"], {}, []),
    (["+critic.ppo_infer_max_token_len_per_gpu=1000"], {"of": CRITIC}, [
        (E, "critic.ppo_infer_max_token_len_per_gpu", "+critic.ppo_infer_max_token_len_per_gpu=1024")]),
    (["+critic.ppo_infer_max_token_len_per_gpu=8192"], {"of": CRITIC}, []),
    (["critic.ppo_mini_batch_size=24", "+critic.ppo_infer_max_token_len_per_gpu=8192"], {"of": CRITIC}, [
        (E, "critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size=32, or leave it out: it follows the actor's")]),
    ([], {"of": CRITIC}, [
        (W, "critic.ppo_micro_batch_size_per_gpu", "Keep it, and add +critic.ppo_infer_max_token_len_per_gpu=8192")]),
    # World
    ([f"{A}.fsdp_config.fsdp_size=2"], {}, []),
    ([f"{A}.fsdp_config.fsdp_size=8"], {}, []),
    ([f"{A}.fsdp_config.fsdp_size=1", f"{A}.strategy=fsdp2"], {}, []),
    (["critic.fsdp.fsdp_size=3", "+critic.ppo_infer_max_token_len_per_gpu=8192"], {"of": CRITIC}, [
        (E, "critic.fsdp.fsdp_size", "critic.fsdp.fsdp_size=-1")]),
    ([f"{A}.ulysses_sequence_parallel_size=3"], {}, [
        (E, f"{A}.ulysses_sequence_parallel_size", f"{A}.ulysses_sequence_parallel_size=2")]),
    ([f"{RO}.data_parallel_size=4"], {}, [
        (E, f"{RO}.tensor_model_parallel_size", f"{RO}.tensor_model_parallel_size=1")]),
    ([f"{RO}.name=vlm"], {}, [(E, f"{RO}.name", f"{RO}.name=vllm")]),
    (["trainer.v1.trainer_mode=async"], {}, [(E, "trainer.v1.trainer_mode", "trainer.v1.trainer_mode=sync")]),
    ([], {"machines": Machines((4,))}, []),
    ([], {"machines": Machines((2,))}, [(E, "trainer.n_gpus_per_node", "trainer.n_gpus_per_node=2")]),
    (["trainer.nnodes=2"], {"machines": Machines((6, 2))}, [
        (E, "trainer.n_gpus_per_node", "trainer.n_gpus_per_node=2")]),
    ([], {"machines": Machines((2, 2))}, [(E, "trainer.n_gpus_per_node", "trainer.n_gpus_per_node=2")]),
    ([f"{RM}.rollout.free_cache_engine=False"], {"of": OWN_POOL, "machines": Machines((4,))}, [
        (E, "trainer.n_gpus_per_node", "trainer.n_gpus_per_node=2")]),
    ([f"{RM}.rollout.free_cache_engine=False"], {"of": OWN_POOL, "machines": Machines((4, 2))}, []),
    (["ray_kwargs.ray_init.num_cpus=12"], {}, []),
    (["ray_kwargs.ray_init.num_cpus=11"], {}, [
        (E, "ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_cpus=20")]),
    ([], {"machines": Machines((4,), cpus=8)}, [
        (E, "ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_cpus=20 (Ray counts what it is told)")]),
    # What nothing reads
    ([f"{A}.fsdp_config.offload_policy=True", f"{A}.fsdp_config.param_offload=True", f"{A}.strategy=fsdp2"], {}, [
        (W, f"{A}.fsdp_config.param_offload", f"{A}.fsdp_config.param_offload=False")]),
    ([f"{A}.use_torch_compile=False"], {}, [(W, f"{A}.use_torch_compile", f"{A}.fsdp_config.use_torch_compile")]),
    ([f"{M}.tiled_mlp.enabled=True"], {}, [(W, f"{M}.tiled_mlp.enabled", f"{M}.tiled_mlp.enabled=False")]),
    (["reward_model.reward_manager=dapo"], {}, [(E, "reward_model.reward_manager", "reward.reward_manager.name=dapo")]),
    (["custom_reward_function.path=r.py"], {}, [
        (E, "custom_reward_function.path", "reward.custom_reward_function.path=r.py")]),
    (["reward_model.enable=False"], {}, [(W, "reward_model.enable", "reward.reward_model.enable=False")]),
    ([f"{RO}.gpu_memory_utilization=80"], {}, [
        (E, f"{RO}.gpu_memory_utilization", f"{RO}.gpu_memory_utilization=0.8")]),
    ([f"{RO}.gpu_memory_utilization=0.95"], {}, [(W, f"{RO}.gpu_memory_utilization", f"{RO}.gpu_memory_utilization=0.6")]),
    ([f"{RO}.free_cache_engine=False"], {}, [(W, f"{RO}.free_cache_engine", f"{RO}.free_cache_engine=True")]),
    ([f"{M}.lora_rank=8", f"{RO}.name=sglang"], {}, [(W, f"{RO}.load_format", f"{RO}.load_format=safetensors")]),
    ([f"{M}.lora_rank=8", f"{RO}.name=sglang", f"{RO}.load_format=safetensors"], {}, []),
    # Reward model
    ([f"{RM}.enable=False"], {"of": OWN_POOL}, [
        (W, f"{RM}.enable_resource_pool", f"{RM}.enable_resource_pool=False, or {RM}.enable=True"),
        (W, f"{RM}.model_path", f"{RM}.enable=True")]),
    ([f"{RM}.rollout.free_cache_engine=False"], {"of": OWN_POOL}, []),
    ([f"{RM}.rollout.free_cache_engine=False", f"{RM}.rollout.tensor_model_parallel_size=4"], {"of": OWN_POOL}, [
        (E, f"{RM}.rollout.tensor_model_parallel_size", f"{RM}.rollout.tensor_model_parallel_size=2")]),
    ([f"{RM}.enable_resource_pool=False"], {"of": OWN_POOL}, []),
    # Keys
    ([f"{A}.ppo_mini_batchsize=4"], {}, [
        (E, f"{A}.ppo_mini_batchsize", f"Did you mean {A}.ppo_mini_batch_size?")]),
    (["data.gpu_memory_utilization=0.5"], {}, [
        (E, "data.gpu_memory_utilization",
         f"Did you mean {RO}.gpu_memory_utilization or {RM}.rollout.gpu_memory_utilization or "
         "distillation.teacher_models.teacher_model.inference.gpu_memory_utilization?")]),
    ([f"{A}.use_remove_padding_=True"], {}, [
        (E, f"{A}.use_remove_padding_", f"Did you mean {A}.use_remove_padding?")]),
    ([f"{M}.override_config.rope_theta=1"], {}, [
        (E, f"{M}.override_config.rope_theta", f"+{M}.override_config.rope_theta=1")]),
    ([f"+{M}.override_config.rope_theta=1"], {}, []),
    (["+data.seed=1"], {}, []),
    (["+data.shuffle=False"], {}, [(E, "data.shuffle", "data.shuffle=False")]),
    (["++data.shuffle=False"], {}, []),
    (["~data.shuffle"], {}, []),
    (["trainer.typo=1"], {}, [(E, "trainer.typo", "Leave it out")]),
    (["~data.shufle"], {}, [(E, "data.shufle", "Did you mean data.shuffle?")]),
    ([f"{A}.fsdp_config.sharding_strategy=FULL_SHARD"], {}, [
        (E, f"{A}.fsdp_config.sharding_strategy",
         "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 and reshard_after_forward=True are FULL_SHARD; "
         "reshard_after_forward=False is SHARD_GRAD_OP")]),
    (["model_engine=megatorn"], {}, [
        (E, "model_engine", "Use model_engine=dp, megatron, veomni or torchtitan, or with verl_shard device_map")]),
    (["model_engine=3"], {}, [
        (E, "model_engine", "Use model_engine=dp, megatron, veomni or torchtitan, or with verl_shard device_map")]),
    (["data.train_files=[a.parquet"], {}, [
        (E, "data.train_files", "Write data.train_files=VALUE without blanks around =, and the value between quotes: "
                                "data.train_files='\"...\"'")]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "more", "wanted"), CASES, ids=[" ".join(case[0]) or "as it is" for case in CASES])
def test_a_change(
    changes: list[str], more: dict[str, Any], wanted: list[tuple[str, str, str]], looked: Callable[..., Any]
) -> None:
    assert looked(*changes, **more) == wanted


def test_the_arithmetic_is_said(looked: Callable[..., Any]) -> None:
    given = [
        "data.train_batch_size=64",
        f"{A}.ppo_mini_batch_size=32",
        f"{RO}.n=3",
        f"{A}.ppo_micro_batch_size_per_gpu=5",
    ]
    more = [
        f"{RO}.name=vllm", f"{RO}.log_prob_micro_batch_size_per_gpu=4", "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=4",
    ]  # fmt: skip
    (finding,) = [f for f in check([*given, *more], plan=False, ask_verl=False).findings if f.level == "error"]
    assert finding.why == (
        "a mini-batch is 32 prompts x 3 = 96 samples / 4 = 24 on a GPU, % 5 = 4, not 0; the worker asserts it"
    )


def test_cards_that_have_no_flash_attention_and_no_bfloat16(looked: Callable[..., Any]) -> None:
    old, new = (Inventory.declared(4, card=find_card(name)) for name in ("v100-32g", "a100-80g"))
    assert looked(inventory=new) == []
    attention = (E, f"{M}.override_config.attn_implementation", f"+{M}.override_config.attn_implementation=sdpa")
    dtype = (E, f"{RO}.dtype", f"{RO}.dtype=float16")
    assert looked(inventory=old) == [attention, dtype]
    assert looked(f"+{M}.override_config.attn_implementation=sdpa", f"{RO}.dtype=float16", inventory=old) == []
    critic = [where for _, where, _ in looked(of=CRITIC, inventory=old)]
    assert "critic.enable" in critic
    assert looked(inventory=Inventory.declared(4, memory="32GiB")) == [], "a card of which only the memory is known"


def test_what_is_installed_here_says_nothing_of_machines_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn may be there or not: where GPUs are named it is neither a finding nor left out in silence."""
    original, key = importlib.util.find_spec, f"{M}.override_config.attn_implementation"

    def found(here: bool, *changes: str, **where: Any) -> tuple[list[str], list[str]]:
        def find_spec(name: str, *more: Any) -> Any:
            return (object() if here else None) if name == "flash_attn" else original(name, *more)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        report = check([*GOOD["GRPO plain"], *changes], plan=False, ask_verl=False, **where)
        return [f.why for f in report.findings], list(report.left_out)

    named: list[dict[str, Any]] = [
        {"machines": Machines((4,))}, {"inventory": Inventory.declared(4, memory="80GiB")},
        {"inventory": Inventory.declared(4, card=find_card("a100-80g"))},
    ]  # fmt: skip
    said = (
        "whether those machines have flash-attn, without which flash_attention_2 stops the worker with an ImportError "
        f"(+{key}=sdpa does without)"
    )
    for where in named:
        assert found(True, **where) == found(False, **where) == ([], [said])
        assert found(False, f"+{key}=sdpa", **where) == ([], [])
    assert found(True) == ([], [])
    (here,), left_out = found(False)
    assert "flash-attn is not installed here" in here
    assert left_out == []
    (refused, *_), left_out = found(False, inventory=Inventory.declared(4, card=find_card("v100-32g")))
    assert "flash-attn needs 8.0" in refused
    assert left_out == []


def test_the_device_map_engine_has_faults_of_its_own(looked: Callable[..., Any]) -> None:
    found = looked("model_engine=device_map", drop=[f"{A}.strategy"])
    assert [(level, where) for level, where, _ in found] == [
        (E, f"{RO}.name"), (E, "trainer.n_gpus_per_node"),
    ]  # fmt: skip
    given = [
        "model_engine=device_map",
        f"{RO}.name=hf",
        f"{RO}.tensor_model_parallel_size=1",
        "trainer.n_gpus_per_node=1",
    ]
    assert looked(*given) == []


@pytest.mark.parametrize(
    ("engine", "name"), [([], "vllm"), (["model_engine=device_map", "trainer.n_gpus_per_node=1"], "hf")]
)
def test_a_rollout_without_a_name_is_one_fault_whatever_the_engine(
    looked: Callable[..., Any], engine: list[str], name: str
) -> None:
    """It is "???" in verl's configuration, which OmegaConf raises for."""
    reward = ["reward.reward_model.enable=true", "reward.reward_model.model_path=somewhere"]
    found = looked(*engine, *reward, drop=["actor_rollout_ref.rollout.name"])
    key = "actor_rollout_ref.rollout.name"
    assert ("error", key, f"{key}={name}") in found
    assert ("error", "reward.reward_model.rollout.name", "reward.reward_model.rollout.name=vllm") in found
