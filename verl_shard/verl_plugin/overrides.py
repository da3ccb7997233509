"""A PPO or GRPO run on the device_map engine, as overrides for verl's own main program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_shard.common.errors import ConfigError, Finding

ALGORITHMS = ("ppo", "grpo")

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./:-]*")
"""Text that needs no quotes in Hydra's grammar, and is no number there."""


@dataclass(frozen=True)
class RunSettings:
    """What decides a run on verl's trainer. Lengths are in tokens, batch sizes in prompts unless they say otherwise.

    algorithm: "ppo" is GAE with a critic and the KL to the reference in the reward; "grpo" has n responses a prompt,
        no critic, and that KL in the loss.
    micro_batch_size: samples in one forward and backward; fewer need less memory and more time.
    reward: a Python file and function, "path.py:name" or "pkg://module:name"; None takes verl's by data_source.
    plan: the plan.yaml with the device maps.
    """

    algorithm: str
    model: Path | str
    train_files: tuple[Path, ...]
    val_files: tuple[Path, ...]
    reward: str | None
    plan: Path
    checkpoints: Path
    steps: int
    seed: int
    train_batch_size: int
    n: int
    mini_batch_size: int
    micro_batch_size: int
    max_prompt_length: int
    max_response_length: int
    actor_lr: float
    critic_lr: float
    kl_coef: float
    test_freq: int
    save_freq: int
    cpu: bool
    resume_from: str | None = None
    gradient_checkpointing: bool = False
    attn_implementation: str = "sdpa"
    project: str = "verl_shard"
    experiment: str = "quickstart"

    def __post_init__(self) -> None:
        faults = []
        if self.algorithm not in ALGORITHMS:
            faults.append(
                Finding("error", "unknown-algorithm", "algorithm", self.algorithm, "no such algorithm",
                        f"Use one of {', '.join(ALGORITHMS)}")
            )  # fmt: skip
        if self.train_batch_size % self.mini_batch_size:
            faults.append(
                Finding("error", "batch-arithmetic", "mini_batch_size", str(self.mini_batch_size),
                        f"train_batch_size {self.train_batch_size} % mini_batch_size {self.mini_batch_size} = "
                        f"{self.train_batch_size % self.mini_batch_size}, not 0", "Choose a divisor")
            )  # fmt: skip
        if self.mini_batch_size * self.n % self.micro_batch_size:
            faults.append(
                Finding("error", "batch-arithmetic", "micro_batch_size", str(self.micro_batch_size),
                        f"mini_batch_size {self.mini_batch_size} x n {self.n} = {self.mini_batch_size * self.n} samples, % "
                        f"micro_batch_size {self.micro_batch_size} = {self.mini_batch_size * self.n % self.micro_batch_size}, "
                        "not 0", "Choose a divisor")
            )  # fmt: skip
        if faults:
            raise ConfigError(faults)


def to_overrides(settings: RunSettings, extra: Sequence[str] = ()) -> list[str]:
    """Hydra overrides for `python -m verl.trainer.main_ppo`; `extra` comes last, so it wins."""
    s = settings
    actor, rollout, ref = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
    overrides = {
        "model_engine": "device_map",
        "trainer.device": "cpu" if s.cpu else "cuda",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": ["file", "console"],
        "trainer.project_name": s.project,
        "trainer.experiment_name": s.experiment,
        "trainer.total_training_steps": s.steps,
        "trainer.total_epochs": 1_000_000,
        "trainer.val_before_train": s.resume_from is None,
        "trainer.test_freq": s.test_freq,
        "trainer.save_freq": s.save_freq,
        "trainer.default_local_dir": s.checkpoints,
        "trainer.checkpoint_callback_class": "verl_shard.verl_plugin.checkpoints.CheckpointKeeper",
        "trainer.resume_mode": "disable" if s.resume_from is None else "resume_path",
        "trainer.resume_from_path": s.resume_from,
        "data.train_files": list(s.train_files),
        "data.val_files": list(s.val_files),
        "data.train_batch_size": s.train_batch_size,
        "data.max_prompt_length": s.max_prompt_length,
        "data.max_response_length": s.max_response_length,
        "data.seed": s.seed,
        "data.dataloader_num_workers": 0,
        "data.validation_shuffle": False,
        "actor_rollout_ref.model.path": s.model,
        "+actor_rollout_ref.model.override_config.attn_implementation": s.attn_implementation,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": s.gradient_checkpointing,
        f"{actor}.device_map.plan": s.plan,
        f"{actor}.device_map.seed": s.seed,
        f"{actor}.ppo_mini_batch_size": s.mini_batch_size,
        f"{actor}.ppo_micro_batch_size_per_gpu": s.micro_batch_size,
        f"{actor}.optim.lr": s.actor_lr,
        f"{actor}.use_torch_compile": False,
        f"{rollout}.name": "hf",
        f"{rollout}.n": s.n,
        f"{rollout}.seed": s.seed,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": s.micro_batch_size,
        f"{rollout}.agent.num_workers": 1,
        f"{ref}.log_prob_micro_batch_size_per_gpu": s.micro_batch_size,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # verl asks for 3 CPUs a process whether they are there or not, and waits for ever when Ray has too few.
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    if s.cpu:
        # verl's pools count resources named GPU; on a CPU this is one by name only.
        overrides["+ray_kwargs.ray_init.num_gpus"] = 1
    if s.reward is not None:
        path, _, name = s.reward.rpartition(":")
        overrides["reward.custom_reward_function.path"] = path
        overrides["reward.custom_reward_function.name"] = name
    if s.algorithm == "grpo":
        overrides |= {
            "algorithm.adv_estimator": "grpo",
            f"{actor}.use_kl_loss": True,
            f"{actor}.kl_loss_coef": s.kl_coef,
        }
    else:
        overrides |= {
            "algorithm.adv_estimator": "gae",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": s.kl_coef,
            "critic.model.path": s.model,
            "+critic.model.override_config.attn_implementation": s.attn_implementation,
            "critic.model.use_remove_padding": False,
            "critic.model.enable_gradient_checkpointing": s.gradient_checkpointing,
            "critic.device_map.plan": s.plan,
            "critic.device_map.seed": s.seed,
            "critic.ppo_micro_batch_size_per_gpu": s.micro_batch_size,
            "critic.ppo_mini_batch_size": s.mini_batch_size,
            "critic.optim.lr": s.critic_lr,
        }
    return [f"{key}={hydra_value(value)}" for key, value in overrides.items()] + list(extra)


def hydra_value(value: object) -> str:
    """A value in Hydra's override grammar; text is quoted when it has characters with a meaning there."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    text = str(value)
    plain = _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false", "inf", "nan")
    if isinstance(value, int | float) or plain:
        return text
    # Between quotes a backslash is itself, but for those before a quote.
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"
