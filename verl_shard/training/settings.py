"""From PPOTrainer's dicts to verl's configuration: the same overrides for both runners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_shard.common.errors import ConfigError, Finding
from verl_shard.config.data_files import DataFiles
from verl_shard.training.article_keys import GROUPED, read_section
from verl_shard.verl_plugin.overrides import RunSettings, to_overrides

DEFAULTS: dict[str, Any] = {
    "kl_coef": 0.05, "max_epochs": 1, "adv_estimator": "gae", "steps": 100, "batch_size": 8, "lr": 1e-6, "critic_lr": 1e-5,
    "gamma": 1.0, "lam": 1.0, "clip_ratio": 0.2, "entropy_coeff": 0.0, "policy_loss": "vanilla", "lora_rank": 0,
    "lora_alpha": 16, "test_freq": -1, "save_freq": -1, "seed": 0,
}  # fmt: skip
_RESPONSE, _MICRO_BATCH = 128, 4


@dataclass(frozen=True)
class Settings:
    """The values of generation_config and ppo_config, every blank filled. Use `read`."""

    generation: Mapping[str, Any]
    ppo: Mapping[str, Any]
    gradient_checkpointing: bool

    @classmethod
    def read(
        cls,
        generation_config: Any,
        ppo_config: Any,
        *,
        use_gradient_checkpointing: bool,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None,
        processes: int,
    ) -> Settings:
        """Raises ConfigError with every fault. processes: how many share a mini-batch."""
        if hasattr(generation_config, "to_diff_dict"):
            # A transformers GenerationConfig: what differs from its defaults.
            generation_config = {
                k: v for k, v in generation_config.to_diff_dict().items() if k != "transformers_version"
            }
        faults: list[Finding] = []
        sections: list[dict[str, Any]] = []
        for name, given in (
            ("generation_config", generation_config), ("ppo_config", ppo_config),
            ("gradient_checkpointing_kwargs", gradient_checkpointing_kwargs),
        ):  # fmt: skip
            try:
                sections.append(read_section(name, given))
            except ConfigError as error:
                faults += error.findings
                sections.append({})
        generation, ppo, _ = sections
        if gradient_checkpointing_kwargs and not use_gradient_checkpointing:
            where, why = "gradient_checkpointing_kwargs", "use_gradient_checkpointing is not set"
            faults.append(_fault("no-effect", where, gradient_checkpointing_kwargs, why, "Set it, or leave this out"))
        faults += _contradictions(generation, ppo)
        filled = _filled(generation, ppo, processes)
        faults += _arithmetic(filled, processes)
        if faults:
            raise ConfigError(faults)
        return cls({"max_new_tokens": _RESPONSE, **generation}, filled, use_gradient_checkpointing)

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator needs one."""
        return bool(self.ppo["adv_estimator"] == "gae")

    @property
    def has_ref(self) -> bool:
        """Whether there is a KL to a reference."""
        return bool(self.ppo["kl_coef"] > 0)

    def identity(self) -> dict[str, Any]:
        """What a run keeps when it is resumed."""
        kept = ("adv_estimator", "seed", "batch_size", "mini_batch_size", "n", "lora_rank")
        return {name: self.ppo[name] for name in kept}

    def overrides(
        self,
        *,
        models: Mapping[str, str],
        files: DataFiles,
        longest_prompt: int,
        reward: str | None,
        plan: Path,
        checkpoints: Path,
        attention: Mapping[str, str],
        cpu: bool,
        resume_from: Path | None,
        loggers: Sequence[str],
        names: tuple[str, str],
        tokenizer: Path | None,
        extra: Sequence[str],
    ) -> list[str]:
        """Hydra overrides for verl's ppo_trainer configuration; `extra` come last and win."""
        ppo, generation = self.ppo, self.generation
        run = RunSettings(
            algorithm="ppo" if self.has_critic else "grpo",
            model=models["actor"],
            train_files=(files.train.resolve(),),
            val_files=(files.val.resolve(),),
            reward=reward,
            plan=plan.resolve(),
            checkpoints=checkpoints.resolve(),
            steps=ppo["steps"],
            seed=ppo["seed"],
            train_batch_size=ppo["batch_size"],
            n=ppo["n"],
            mini_batch_size=ppo["mini_batch_size"],
            micro_batch_size=ppo["micro_batch_size"],
            max_prompt_length=longest_prompt,
            max_response_length=generation["max_new_tokens"],
            actor_lr=ppo["lr"],
            critic_lr=ppo["critic_lr"],
            kl_coef=ppo["kl_coef"],
            test_freq=ppo["test_freq"],
            save_freq=ppo["save_freq"],
            cpu=cpu,
            resume_from=None if resume_from is None else str(resume_from.resolve()),
            gradient_checkpointing=self.gradient_checkpointing,
            attn_implementation=attention["actor"],
            project=names[0],
            experiment=names[1],
        )
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        in_reward = self.has_ref and ppo["kl_in"] == "reward"
        more: dict[str, Any] = {
            "algorithm.adv_estimator": ppo["adv_estimator"],
            "algorithm.gamma": ppo["gamma"],
            "algorithm.lam": ppo["lam"],
            "algorithm.use_kl_in_reward": in_reward,
            "algorithm.kl_ctrl.kl_coef": ppo["kl_coef"],
            f"{actor}.use_kl_loss": self.has_ref and not in_reward,
            f"{actor}.kl_loss_coef": ppo["kl_coef"],
            f"{actor}.ppo_epochs": ppo["max_epochs"],
            f"{actor}.entropy_coeff": ppo["entropy_coeff"],
            f"{actor}.policy_loss.loss_mode": ppo["policy_loss"],
            **{f"{actor}.{name}": ppo["clip_ratio"] for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")},
            f"{rollout}.temperature": generation.get("temperature", 1.0),
            f"{rollout}.top_p": generation.get("top_p", 1.0),
            f"{rollout}.top_k": generation.get("top_k", 0) or -1,
            "critic.enable": self.has_critic,
            "trainer.val_before_train": resume_from is None and ppo["test_freq"] > 0,
            "trainer.logger": f"[{','.join(dict.fromkeys(['file', *loggers]))}]",
        }
        if "kl_penalty" in ppo:
            more["algorithm.kl_penalty" if in_reward else f"{actor}.kl_loss_type"] = ppo["kl_penalty"]
        if "enforce_eager" in generation:
            more[f"{rollout}.enforce_eager"] = generation["enforce_eager"]
        if "batch_size" in generation:
            more[f"{rollout}.max_num_seqs"] = generation["batch_size"]
        if ppo["lora_rank"]:
            for name in ("lora_rank", "lora_alpha"):
                more[f"actor_rollout_ref.model.{name}"] = ppo[name]
        found = to_overrides(run, [f"{key}={_value(value)}" for key, value in more.items()])
        if self.has_critic:
            found += _path("critic.model.path", models["critic"])
            found.append(f"+critic.model.override_config.attn_implementation={attention['critic']}")
            found.remove(f"+critic.model.override_config.attn_implementation={attention['actor']}")
        if tokenizer is not None:
            found += _path("actor_rollout_ref.model.tokenizer_path", str(tokenizer))
        return [*found, *extra]


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _path(key: str, value: str) -> list[str]:
    from verl_shard.verl_plugin.overrides import hydra_value

    return [f"{key}={hydra_value(value)}"]


def _filled(generation: Mapping[str, Any], ppo: Mapping[str, Any], processes: int) -> dict[str, Any]:
    filled = {**DEFAULTS, **ppo}
    estimator = filled["adv_estimator"]
    filled.setdefault("n", generation.get("num_return_sequences", 4 if estimator in GROUPED else 1))
    filled.setdefault("kl_in", "reward" if estimator == "gae" else "loss")
    filled.setdefault("mini_batch_size", filled["batch_size"])
    filled.setdefault(
        "micro_batch_size", math.gcd(_MICRO_BATCH, filled["mini_batch_size"] * filled["n"] // processes or 1)
    )
    return filled


def _contradictions(generation: Mapping[str, Any], ppo: Mapping[str, Any]) -> list[Finding]:
    found = []
    many, n = generation.get("num_return_sequences"), ppo.get("n")
    if many is not None and n is not None and many != n:
        where, why = "generation_config['num_return_sequences']", f"ppo_config's n is {n}"
        found.append(_fault("two-numbers", where, many, why, "Give one of them"))
    estimator = ppo.get("adv_estimator", DEFAULTS["adv_estimator"])
    if estimator in GROUPED and (n or many or 2) < 2:
        why = f"{estimator} compares the responses to a prompt, and one has nothing to be compared with"
        found.append(_fault("one-response", "ppo_config['n']", n or many, why, "Give 2 or more"))
    if estimator != "gae":
        for name in ("lam", "critic_lr"):
            if name in ppo:
                why = f"{estimator} has no {'GAE' if name == 'lam' else 'critic'}"
                found.append(_fault("no-effect", f"ppo_config['{name}']", ppo[name], why, "Leave it out"))
    if ppo.get("kl_coef") == 0:
        for name in ("kl_in", "kl_penalty"):
            if name in ppo:
                found.append(_fault("no-effect", f"ppo_config['{name}']", ppo[name], "kl_coef is 0", "Leave it out"))
    if "lora_alpha" in ppo and not ppo.get("lora_rank"):
        found.append(
            _fault("no-effect", "ppo_config['lora_alpha']", ppo["lora_alpha"], "there is no lora_rank", "Leave it out")
        )
    return found


def _arithmetic(ppo: Mapping[str, Any], processes: int) -> list[Finding]:
    found = []
    batch, mini, micro, n = (ppo[name] for name in ("batch_size", "mini_batch_size", "micro_batch_size", "n"))
    samples = mini * n
    if batch % mini:
        why = f"batch_size {batch} % mini_batch_size {mini} = {batch % mini}, not 0"
        found.append(_fault("batch-arithmetic", "ppo_config['mini_batch_size']", mini, why, "Choose a divisor"))
    if samples % processes:
        why = f"mini_batch_size {mini} x n {n} = {samples} responses, % {processes} processes = {samples % processes}, not 0"
        fix = f"Choose a mini_batch_size that makes it a multiple of {processes}"
        found.append(_fault("batch-arithmetic", "ppo_config['mini_batch_size']", mini, why, fix))
    elif (mine := samples // processes) % micro:
        why = f"mini_batch_size {mini} x n {n} / {processes} processes = {mine} responses, % {micro} = {mine % micro}, not 0"
        found.append(_fault("batch-arithmetic", "ppo_config['micro_batch_size']", micro, why, "Choose a divisor"))
    return found


def _fault(code: str, where: str, given: object, why: str, fix: str) -> Finding:
    return Finding("error", code, where, str(given), why, fix)
